"""Passwords of subscriptions in the state folder: one private passfile for each side (libpq's ``passfile``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pgsub.commands.subscription.definition import Definition
from pgsub.common import conninfo as ci


@contextlib.contextmanager
def written(made: Definition) -> Iterator[list[Path]]:
    """Write passwords to their files for the length of the block; emptying the list keeps them."""
    paths: list[Path] = []
    try:
        for path, params in made.passwords.items():
            paths.append(path)
            ci.store_password(params, path)
        yield paths
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def remove(folder: Path, subid: int, *named_in: str) -> None:
    """Remove the passwords of a subscription.

    :param folder: the state folder.
    :param named_in: connection strings whose files stay.
    """
    for file in (folder / "passfiles").glob(f"{subid}.*"):
        if not any(file.name in text for text in named_in):
            file.unlink(missing_ok=True)
