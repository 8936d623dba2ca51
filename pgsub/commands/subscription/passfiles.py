"""Passwords of subscriptions in the state folder: one private password file for each side (libpq's ``passfile``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pgsub.commands.subscription.definition import Definition
from pgsub.common.connections import conninfo as ci
from pgsub.common.connections import passfile


@contextlib.contextmanager
def written(made: Definition) -> Iterator[list[Path]]:
    """Write passwords to their files, and remove them at the end of the block unless the list was emptied."""
    paths: list[Path] = []
    try:
        for path, params in made.passwords.items():
            paths.append(path)
            passfile.store(params, path)
        yield paths
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def remove(folder: Path, subid: int, *named_in: str) -> None:
    """Remove the passwords of a subscription.

    :param named_in: connection strings whose password files are kept.
    """
    for file in (folder / "passfiles").glob(f"{subid}.*"):
        if not any(file.name in text for text in named_in):
            file.unlink(missing_ok=True)


def revealed(conninfo: str, side: str, folder: Path) -> str:
    """Return a stored connection string with the password from its password file in the state folder.

    :param side: publisher or target.
    """
    params = ci.parse(conninfo, side)
    named = Path(params.get("passfile", ""))
    if named.parent != folder / "passfiles":
        return conninfo
    return ci.join({**{k: v for k, v in params.items() if k != "passfile"}, "password": passfile.password(named)})
