"""``pgsub version``: what is installed, read from package metadata; nothing heavy is imported for it."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata

from pgsub import __version__
from pgsub.catalog.schema import MIGRATIONS

#: logical replication protocol versions that can be spoken: 1 (10), 2 streaming (14), 3 two-phase (15), 4 parallel (16)
PROTOCOL_VERSIONS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Versions:
    """Versions of pgsub and of what it stands on; None where a package is missing."""

    pgsub: str
    python: str
    psycopg: str | None
    libpq: str | None
    pyspark: str | None
    state_schema: int
    protocol: tuple[int, ...]


def version() -> Versions:
    """Return the versions of this installation; libpq reports its own."""
    return Versions(
        pgsub=__version__,
        python=platform.python_version(),
        psycopg=_package("psycopg"),
        libpq=_libpq(),
        pyspark=_package("pyspark"),
        state_schema=MIGRATIONS[-1][0],
        protocol=PROTOCOL_VERSIONS,
    )


def _package(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _libpq() -> str | None:
    try:
        from psycopg import pq
    except ImportError:
        return None
    return "{}.{}".format(*divmod(pq.version(), 10000))
