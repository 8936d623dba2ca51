"""Certificates, and a server that encrypts its connections. Servers that come as wheels or by npm cannot."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from embedded import Server
from fix_servers import Database, other_servers

from pgsub.demo.binaries import find_binaries

_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
_numbers = itertools.count(1)


def with_tls() -> Path:
    """The programs of a server that was built with TLS."""
    for folder in [
        find_binaries(),
        *other_servers().values(),
        *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True),
    ]:
        config = [str(folder / "pg_config"), "--configure"]
        if (folder / "pg_config").exists() and "ssl" in subprocess.run(config, capture_output=True, text=True).stdout:
            return folder
    pytest.skip("no server here was built with TLS: name one in PGSUB_TEST_BINDIRS")


def openssl(folder: Path, *commands: str) -> None:
    """Run commands of it in a folder."""
    for command in commands:
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)


def signed(folder: Path, name: str, subject: str, days: int) -> None:
    """A key and a certificate that the authority in the folder signed; one of 0 days has expired."""
    openssl(
        folder,
        f"req -new {_KEY} -subj /CN={subject} -keyout {name}.key -out {name}.csr",
        f"x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days {days} -out {name}.crt",
    )


def authority(folder: Path) -> Path:
    """Make one that signs certificates in a folder."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    openssl(folder, f"req -new -x509 {_KEY} -subj /CN=authority -days 10 -keyout ca.key -out ca.crt")
    return folder


def installed(server: Server, certificates: Path, name: str, into: str | None = None) -> None:
    """Copy a certificate and its key to where the server reads them."""
    for suffix in ("crt", "key"):
        path = shutil.copy(certificates / f"{name}.{suffix}", server.data / f"{into or name}.{suffix}")
        os.chown(path, server.data.stat().st_uid, -1)
        os.chmod(path, 0o600)


def encrypting(server: Server, certificates: Path) -> None:
    """Let a server show the certificate ``good`` and take those that the authority signed."""
    installed(server, certificates, "good")
    installed(server, certificates, "ca")
    server.append_conf({"ssl": True, "ssl_ca_file": "ca.crt", "ssl_cert_file": "good.crt", "ssl_key_file": "good.key"})


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority, servers' certificates ``good`` and ``expired``, and that of a ``client``."""
    folder = authority(tmp_path_factory.mktemp("certificates"))
    for name, subject, days in (("good", "localhost", 10), ("expired", "localhost", 0), ("client", "certified", 10)):
        signed(folder, name, subject, days)
    return folder


@pytest.fixture(scope="session")
def tls_server(certificates: Path) -> Iterator[Server]:
    """One for the whole test process, never stopped or reconfigured."""
    server = Server(fast=True, binaries=with_tls())
    try:
        server.init()
        encrypting(server, certificates)
        server.start()
        yield server
    finally:
        server.destroy()


@pytest.fixture
def tls_databases(tls_server: Server) -> Iterator[tuple[Database, Database]]:
    """Two fresh databases on it."""
    made = [Database(tls_server, f"tls_{os.getpid()}_{next(_numbers)}") for _ in range(2)]
    yield made[0], made[1]
    for database in made:
        database.drop()
