"""Log sequence numbers: text form, parsing, and the one predicate that compares a transaction with a position.

Mirrors ``src/backend/utils/adt/pg_lsn.c``. In memory an LSN is a plain ``int`` (0 is the server's InvalidXLogRecPtr).
Text is never compared: servers write one LSN in two forms, ``0/50`` up to 18 and ``0/00000050`` from 19 on. Both are
read, and pgsub writes the first one, whatever server it comes from.
"""

from __future__ import annotations

import re

MAX_LSN = 2**64 - 1  #: no record begins here: what "finishes" at it is covered by no position

_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})", re.ASCII)


def parse_lsn(text: str) -> int:
    """Read ``X/X`` as ``pg_lsn_in`` does: one to eight hexadecimal digits on each side, nothing around them.

    :return: byte position in the WAL, 0 to 2**64 - 1.
    :raises ValueError: anything else, with a text fit for a user.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f'invalid LSN "{text}": expected two hexadecimal numbers as in 16/B374D848')
    return int(match[1], 16) << 32 | int(match[2], 16)


def lsn_or_none(text: str | None) -> int | None:
    """Read the text of a pg_lsn column that may be NULL."""
    return None if text is None else parse_lsn(text)


def format_lsn(lsn: int) -> str:
    """Write an LSN as ``pg_lsn_out`` of 18 does: ``%X/%X``, no padding.

    :return: for example ``16/B374D848``.
    """
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def covered(finish_lsn: int, position: int) -> bool:
    """Return whether a position already contains a transaction.

    Strictly less: a position may be "last byte + 1" of the record before, which is the start of this transaction's
    own commit record. ``should_apply_changes_for_rel`` compares with ``<=`` the other way round for that reason.

    :param finish_lsn: the transaction's commit_lsn, for a prepared one its prepare_lsn.
    :param position: an end position: progress of an origin, srsublsn, a claim.
    :return: True if the transaction must not be applied again.
    """
    # guard: a position does not cover a transaction that finishes at it
    return finish_lsn < position
