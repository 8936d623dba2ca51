"""Formats numbers of things in messages, as ``ngettext`` does for the server."""

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
