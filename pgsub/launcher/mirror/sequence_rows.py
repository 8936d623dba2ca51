"""Sequences as rows of the state store, for commands and launchers."""

from __future__ import annotations

from collections.abc import Iterable

from pgsub.catalog.rows import SequenceRow
from pgsub.catalog.times import utc_now
from pgsub.tablesync.sequences.definition import Position
from pgsub.tablesync.sequences.synchronization import Outcome

_MOST = 2**63 - 1  #: the largest value of a column


def rows(outcomes: Iterable[Outcome]) -> list[SequenceRow]:
    """Make the rows of sequences after an attempt to synchronize them."""
    now = utc_now()
    return [
        SequenceRow(
            one.oid,
            "r" if one.problem is None else "i",
            *one.key,
            *_position(one.publisher),
            *_position(one.target),
            None if one.ahead is None else max(-_MOST, min(one.ahead, _MOST)),
            one.problem,
            now,
        )
        for one in outcomes
    ]


def _position(position: Position | None) -> tuple[int | None, bool | None]:
    return (None, None) if position is None else (position.last_value, position.is_called)
