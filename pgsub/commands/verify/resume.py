"""What a ``pgsub verify`` finds equal, in the state store until it has ended: another one can go on from there.

A row says nothing any more where something else would be compared now, or in another way: other columns, types, key or
row filter, other publications, a table that was copied again, another sample.
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
from pgsub.reconcile.ranges import EqualRanges, Ranges, key_type
from pgsub.target.ledger.subscriptions import RelationState

#: Seconds between writes for whole tables, of which there may be thousands: what a kill takes is compared once more.
_INTERVAL = 1.0


@dataclass(frozen=True, slots=True)
class Known:
    """Knowledge of one table, from a verify that broke off.

    :ivar lsn: where all of it was equal, if that is known.
    :ivar ranges: those of it that were, and what keeps more of them.
    """

    lsn: int | None
    ranges: Ranges


class EqualBefore:
    """Tables and ranges that were found equal, by this verify and, if it goes on, by the last one of these tables.

    :param sample: percent of the keys that are compared.
    :param resume: go on with what is known; otherwise it is forgotten.
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
            reporter.notice(f'no verify of subscription "{sub.name}" broke off: everything is compared')

    def of(self, state: RelationState, table: ComparedTable, lsn: int) -> Known:
        """Return what is known of a table, if the same would be compared.

        :param lsn: position of this comparison.
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
        """Keep that all of a table was equal."""
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
        """Write what was found last."""
        if self._unwritten:
            self._store.put_verified(self._sub.subid, self._unwritten)
            self._unwritten = []

    def forget(self) -> None:
        """Forget all of it: the comparison has ended."""
        self._unwritten = []
        self._store.forget_verified(self._sub.subid, self._names)


def _mark(sub: Subscription, state: RelationState, table: ComparedTable, sample: float | None) -> str:
    """Make a mark of what is compared, and how."""
    remote, target = table.remote, table.target
    compared = (
        (sample, sub.publications, state.srrelid, state.srsublsn),
        (remote.oid, remote.schema, remote.name, remote.relkind, remote.columns, remote.row_filter),
        (target.oid, target.schema, target.name, target.relkind, target.columns, target.identity),
    )
    return hashlib.sha256(repr(compared).encode()).hexdigest()


def _read(row: VerifiedRow, ranges: Ranges, table: ComparedTable) -> bool:
    """Read the ranges of a row; return whether they can be those of the table. Anybody may have edited the file."""
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
