"""Log sequence numbers: text form, parsing, and the one predicate that compares a transaction with a position.

Mirrors ``src/backend/utils/adt/pg_lsn.c``. In memory an LSN is a plain ``int`` (0 is the server's InvalidXLogRecPtr).
Texts are never compared, because servers write an LSN in two forms: ``0/50`` up to 18, ``0/00000050`` from 19 on. pgsub
reads both, and writes the former for any server.
"""

from __future__ import annotations

import re

MAX_LSN = 2**64 - 1  #: no record begins here, so no position covers a transaction that finishes here

_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})", re.ASCII)


def parse_lsn(text: str) -> int:
    """Parse ``X/X`` like ``pg_lsn_in``: one to eight hexadecimal digits on each side and nothing else.

    :return: byte position in the WAL, 0 to 2**64 - 1.
    :raises ValueError: invalid text; the message is suitable for users.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f'invalid LSN "{text}": expected two hexadecimal numbers as in 16/B374D848')
    return int(match[1], 16) << 32 | int(match[2], 16)


def lsn_or_none(text: str | None) -> int | None:
    """Parse the text of a pg_lsn column that may be NULL."""
    return None if text is None else parse_lsn(text)


def format_lsn(lsn: int) -> str:
    """Format an LSN like ``pg_lsn_out`` of 18: ``%X/%X`` without padding, for example ``16/B374D848``."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def covered(finish_lsn: int, position: int) -> bool:
    """Return whether a position includes a transaction, which then must not be applied again.

    The comparison is strict. A position may be "last byte + 1" of the previous record, which is the start of this
    transaction's own commit record. That is why ``should_apply_changes_for_rel`` uses ``<=`` in the reverse comparison.

    :param finish_lsn: the transaction's commit_lsn, or the prepare_lsn of a prepared one.
    :param position: an end position: progress of an origin, srsublsn, a claim.
    """
    # guard: a position does not cover a transaction that finishes at it
    return finish_lsn < position
