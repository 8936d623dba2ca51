"""Ranges that a ``pgsub verify`` finds equal, kept in the state store until it ends, so that another run can continue.

A kept row is invalid if the comparison would now differ in columns, types, key, row filter, publications or sample, or
if the table was copied again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pgsub.catalog.rows import VerifiedRow
from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.common.subscription import Subscription
from pgsub.protocol.lsn import format_lsn, parse_lsn
from pgsub.reconcile.expressions import ComparedTable
from pgsub.reconcile.key_ranges import EqualRanges, Ranges, key_type
from pgsub.target.ledger.subscriptions import RelationState

#: Seconds between writes, because there may be thousands of tables. After a kill, unwritten ones are compared again.
_INTERVAL = 1.0


@dataclass(frozen=True, slots=True)
class Known:
    """The knowledge about one table from an interrupted verify.

    :ivar lsn: the position at which the whole table was equal, None if unknown.
    :ivar ranges: the ranges that were equal. It also keeps new ones.
    """

    lsn: int | None
    ranges: Ranges


class EqualBefore:
    """Tables and ranges that this verify found equal and, if it resumes, those that the last one did.

    :param sample: percentage of the keys that are compared.
    :param resume: use what is known. Otherwise it is forgotten.
    """

    def __init__(
        self,
        store: StateStore,
        sub: Subscription,
        tables: Sequence[RelationState],
        reporter: Reporter,
        *,
        sample: float | None,
        resume: bool,
    ) -> None:
        self._store = store
        self._sub = sub
        self._sample = sample
        self._names = [(one.schemaname, one.relname) for one in tables]
        self._reporter = reporter
        self._rows = {(row.schemaname, row.relname): row for row in store.verified(sub.subid)} if resume else {}
        self._marks: dict[tuple[str, str], str] = {}
        self._unwritten: list[VerifiedRow] = []
        self._next = 0.0
        if not resume:
            self.forget()
        elif not self._rows.keys() & set(self._names):
            reporter.notice(f'no verify of subscription "{sub.name}" was interrupted: everything is compared')

    def of(self, state: RelationState, table: ComparedTable, lsn: int) -> Known:
        """Return what is known about a table, if it is still valid.

        :param lsn: the position of this comparison.
        """
        name = (state.schemaname, state.relname)
        self._marks[name] = _mark(self._sub, state, table, self._sample)
        ranges = Ranges(lsn, partial(self._keep_ranges, name))
        row = self._rows.get(name)
        if row is None:
            return Known(None, ranges)
        usable = _read(row, ranges, table)
        # guard: what was found equal of something else is not taken for this
        if row.compared != self._marks[name] or not usable:
            self._store.forget_verified(self._sub.subid, [name])
            self._reporter.warning(
                f'table "{".".join(name)}" is compared from the beginning',
                "The table, its publications or the sample have changed since a part of it was found equal.",
            )
            return Known(None, Ranges(lsn, ranges.keep))
        return Known(row.lsn, ranges)

    def keep_table(self, name: tuple[str, str], lsn: int) -> None:
        """Keep that a whole table was equal."""
        self._unwritten.append(VerifiedRow(*name, self._marks[name], lsn, {}))
        if time.monotonic() >= self._next:
            self.write()
            self._next = time.monotonic() + _INTERVAL

    def _keep_ranges(self, name: tuple[str, str], ranges: Ranges) -> None:
        equal = [[one.first, one.until, format_lsn(one.lsn), one.rows] for one in ranges.joined()]
        found = {"bounds": list(ranges.bounds), "equal": equal}
        self._unwritten.append(VerifiedRow(*name, self._marks[name], None, found))
        self.write()

    def write(self) -> None:
        """Write the latest findings."""
        if self._unwritten:
            self._store.put_verified(self._sub.subid, self._unwritten)
            self._unwritten = []

    def forget(self) -> None:
        """Forget everything, because the comparison has ended."""
        self._unwritten = []
        self._store.forget_verified(self._sub.subid, self._names)


def _mark(sub: Subscription, state: RelationState, table: ComparedTable, sample: float | None) -> str:
    """Return a hash that identifies what is compared, and how."""
    remote, target = table.remote, table.target
    compared = (
        (sample, sub.publications, state.srrelid, state.srsublsn),
        (remote.oid, remote.schema, remote.name, remote.relkind, remote.columns, remote.row_filter),
        (target.oid, target.schema, target.name, target.relkind, target.columns, target.identity),
    )
    return hashlib.sha256(repr(compared).encode()).hexdigest()


def _read(row: VerifiedRow, ranges: Ranges, table: ComparedTable) -> bool:
    """Read the ranges of a row. Return whether they are valid, because anybody may have edited the file."""
    try:
        bounds = tuple(map(str, row.ranges.get("bounds", ())))
        equal = [EqualRanges(int(a), int(b), parse_lsn(lsn), int(n)) for a, b, lsn, n in row.ranges.get("equal", ())]
    except (TypeError, ValueError):
        return False
    ranges.bounds, ranges.equal = bounds, equal
    if row.lsn is not None:
        return not bounds
    known = all(0 <= one.first < one.until <= ranges.count for one in equal)
    return known and bool(bounds) and key_type(table) is not None
