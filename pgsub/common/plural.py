"""Formats numbers of things in messages, as ``ngettext`` does for the server."""

import re
from collections.abc import Sequence


def counted(number: int, what: str, verb: tuple[str, str] | None = None) -> str:
    """Format ``1 change``, ``2 changes``; with ``("was", "were")`` the verb too.

    :param what: the singular.
    """
    text = f"{number} {what}{'' if number == 1 else 's'}"
    return text if verb is None else f"{text} {verb[number != 1]}"


def some(names: Sequence[str], most: int = 20) -> str:
    """Return quoted names for a sentence; only the first ``most`` of many."""
    listed = ", ".join(f'"{name}"' for name in names[:most])
    return listed if len(names) <= most else f"{listed} and {len(names) - most} more"


def about(
    names: Sequence[str], nouns: tuple[str, str], message: str, detail: str = "", *, most: int = 20
) -> tuple[str, str]:
    """Return a message and its detail about one thing, or about several, whose names are added to the detail.

    :param names: unquoted names, at least one.
    :param nouns: singular and plural.
    :param message: ``{}`` stands for the name of a single thing or their number, ``[is|are]`` for a verb.
    :param most: the maximum number of names in the detail.
    """
    one = len(names) == 1
    text = re.sub(r"\[(\w*)\|(\w*)\]", lambda verb: verb[1 if one else 2], message)
    subject = f'{nouns[0]} "{names[0]}"' if one else f"{len(names)} {nouns[1]}"
    listing = "" if one else f" {nouns[1].capitalize()}: {some(names, most)}."
    return text.replace("{}", subject), f"{detail}{listing}".strip()
