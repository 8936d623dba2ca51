"""Notes in the state folder: which slot a creation that is under way makes, and whether it has asked for it.

The ledger alone must not determine which slot is dropped, because its owner may write any name. And as long as the
publisher was not asked to create the slot, one with its name is somebody else's.
"""

from __future__ import annotations

import os
from pathlib import Path

from pgsub.catalog.state_folder import open_private

_NAME = "creating-"
#: The end of a note once the publisher is asked to create the slot.
_ASKED = "\nasked"


def path(folder: Path, subid: int) -> Path:
    """Return the path of a subscription's note."""
    return folder / f"{_NAME}{subid}"


def subids(folder: Path) -> list[int]:
    """Return the subscriptions of which the folder has a note."""
    numbers = (note.name.removeprefix(_NAME) for note in folder.glob(f"{_NAME}*"))
    return [int(number) for number in numbers if number.isdecimal()]


def write(note: Path, slot_name: str, *, asked: bool) -> None:
    """Write a note durably. One with the same name is lengthened or shortened, so at no time is the name missing."""
    with open(open_private(note), "w") as file:
        file.write(f"{slot_name}{_ASKED if asked else ''}")
        file.flush()
        file.truncate()
        os.fsync(file.fileno())


def slot_name(note: Path) -> str | None:
    """Return the slot's name, None without a note."""
    text = _text(note)
    return None if text is None else text.removesuffix(_ASKED)


def asked(note: Path) -> bool:
    """Return whether the publisher was asked to create the slot."""
    return (_text(note) or "").endswith(_ASKED)


def _text(note: Path) -> str | None:
    return note.read_text(errors="replace") if note.exists() else None
