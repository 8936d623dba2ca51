"""The result of ``pgsub verify``, for programs and as JSON."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from pgsub.common.errors import ApplyError, PgsubError, StateForbids
from pgsub.protocol.lsn import format_lsn
from pgsub.reconcile.comparison import TableResult
from pgsub.reconcile.expressions import ComparedTable
from pgsub.reconcile.rows import DIFFERENT, EXTRA, MISSING, Difference

EQUAL, UNEQUAL, NOT_COMPARED = "equal", "different", "not compared"


@dataclass(frozen=True, slots=True)
class EarlierRange:
    """Rows of a table that an earlier run found equal.

    :ivar column: the first column of the key.
    :ivar low: the lower bound of its values, None without one. ``high`` is the upper bound.
    :ivar rows: number of rows on each side, at that position.
    """

    column: str
    low: str | None
    high: str | None
    lsn: int
    rows: int


@dataclass(slots=True)
class TableVerdict:
    """The outcome for one table.

    :ivar outcome: equal, different (for no known reason), or not compared.
    :ivar lsn: the position of the comparison, an older one if an interrupted verify made it.
    :ivar reason: why it was not compared. ``error`` is set if something failed.
    :ivar written_by: another subscription that writes to the table, too.
    :ivar earlier: key ranges that an interrupted verify found equal, each with its own position.
    """

    schemaname: str
    relname: str
    outcome: str
    lsn: int
    result: TableResult | None = None
    reason: str | None = None
    error: PgsubError | None = None
    written_by: str | None = None
    earlier: list[EarlierRange] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The table's name for messages."""
        return f"{self.schemaname}.{self.relname}"

    @property
    def differing(self) -> int:
        """The number of rows that differ, for whatever reason."""
        return 0 if self.result is None else sum(self.result.differences.counts.values())

    @property
    def explained(self) -> int:
        """The number of differing rows with a known reason."""
        return 0 if self.result is None else sum(self.result.differences.explained.values())


@dataclass(slots=True)
class Verification:
    """The result of ``verify``.

    :ivar lsn: the position of the comparison, where apply was stopped for ``pause`` seconds.
    :ivar named: whether the user named the tables, and so needs a result for each of them.
    """

    name: str
    lsn: int
    pause: float
    sample: float | None
    tables: list[TableVerdict] = field(default_factory=list)
    named: bool = False

    @property
    def equal(self) -> bool | None:
        """Whether no table differs without a known reason, None if requested tables were not compared."""
        outcomes = [table.outcome for table in self.tables]
        if UNEQUAL in outcomes:
            return False
        # guard: what was not compared is not reported as equal
        if EQUAL not in outcomes or (self.named and NOT_COMPARED in outcomes):
            return None
        return True

    @property
    def error(self) -> PgsubError | None:
        """The first error that prevented a comparison."""
        return next((table.error for table in self.tables if table.error is not None), None)


def no_difference(error: PgsubError) -> PgsubError:
    """Return an error whose exit code is not that of a difference."""
    if not isinstance(error, ApplyError):
        return error
    return StateForbids(
        error.message, detail=error.detail, hint=error.hint, context=error.context, sqlstate=error.sqlstate
    )


@contextlib.contextmanager
def told_apart() -> Iterator[None]:
    """Change errors of the block so that their exit code is not that of a difference."""
    try:
        yield
    except ApplyError as error:  # exit code 6 must mean that rows differ
        raise no_difference(error) from None


def document(found: Verification, *, rows: bool = False) -> dict[str, Any]:
    """Return the result as JSON.

    :param rows: include both versions of differing rows, not only their keys.
    """
    return {
        "subscription": found.name,
        "lsn": format_lsn(found.lsn),
        "pause": round(found.pause, 6),
        "sample": found.sample,
        "equal": found.equal,
        "tables": [_table(table, rows=rows) for table in found.tables],
    }


def _table(verdict: TableVerdict, *, rows: bool) -> dict[str, Any]:
    result = verdict.result
    counts = dict.fromkeys((MISSING, EXTRA, DIFFERENT), 0) if result is None else result.differences.counts
    return {
        "schemaname": verdict.schemaname,
        "relname": verdict.relname,
        "outcome": verdict.outcome,
        "lsn": format_lsn(verdict.lsn),
        "reason": verdict.reason,
        "written_by": verdict.written_by,
        "earlier": [{**asdict(one), "lsn": format_lsn(one.lsn)} for one in verdict.earlier],
        "publisher_rows": None if result is None else result.publisher_rows,
        "target_rows": None if result is None else result.target_rows,
        **counts,
        "explained": verdict.explained,
        "differences": []
        if result is None
        else [_difference(result.table, one, rows=rows) for one in result.differences.listed],
    }


def _difference(table: ComparedTable, one: Difference, *, rows: bool) -> dict[str, Any]:
    present = one.publisher if one.publisher is not None else one.target
    assert present is not None
    names = [column.name for column in table.columns]
    found: dict[str, Any] = {
        "kind": one.kind,
        "explained": one.explained,
        "left_out": one.left_out,
        "key": {names[position]: present[position] for position in table.key} if table.keyed else None,
    }
    if rows or not table.keyed:
        sides = (("publisher", one.publisher), ("target", one.target))
        found |= {side: None if values is None else dict(zip(names, values, strict=True)) for side, values in sides}
    return found
