"""``pgsub version``: the installed versions, from package metadata. It imports nothing large."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

from pgsub import __version__
from pgsub.catalog.schema import MIGRATIONS

#: Supported versions of the logical replication protocol: 1 (10), 2 streaming (14), 3 two-phase (15), 4 parallel (16).
PROTOCOL_VERSIONS = (1, 2, 3, 4)


def version() -> dict[str, Any]:
    """Return the versions of pgsub and its components as JSON, None for a missing package."""
    return {
        "pgsub": __version__,
        "python": platform.python_version(),
        "psycopg": _package("psycopg"),
        "libpq": _libpq(),
        "pyspark": _package("pyspark"),
        "state_schema": MIGRATIONS[-1][0],
        "protocol": PROTOCOL_VERSIONS,
    }


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
