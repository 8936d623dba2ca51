"""``pgsub verify``: compares the target's rows with the publisher's at one point while replication continues.

With the server, one must stop all writes and count.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.refresh.given_table_names import named
from pgsub.commands.reporter import COMPARED, COMPARING, WAITING, CallbackReporter, Reporter, TableProgress
from pgsub.commands.serve.apply_to_point import catch_up, served
from pgsub.commands.sessions import connect_target, ledger_session, verify_publisher
from pgsub.commands.verify.result import Verification, told_apart
from pgsub.commands.verify.resume import EqualBefore
from pgsub.commands.verify.table_comparisons import TableComparisons
from pgsub.common import failpoints
from pgsub.common.errors import StateForbids
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.reconcile.comparison import Comparison
from pgsub.reconcile.point import one_point
from pgsub.reconcile.point_attempt import Point
from pgsub.reconcile.reading.read_rate import BLOCK
from pgsub.target.ledger import subscriptions
from pgsub.target.ledger.subscriptions import RelationState

#: Default limit in seconds within which apply must reach the point.
TIMEOUT = 300.0
#: Seconds before the first report of progress, and between reports.
_FIRST, _INTERVAL = 1.0, 0.2


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The options of ``verify``.

    :ivar tables: schema.name of each table, empty for all.
    :ivar sample: percentage of the keys to compare, None for all.
    :ivar jobs: number of pieces of tables that are read at the same time.
    :ivar rate: limit in bytes per second for reading tables on each server, None for no limit.
    :ivar resume: leave out what the last verify found equal, if it was interrupted.
    :ivar timeout: seconds within which apply must reach the point.
    """

    name: str
    state_dir: Path
    tables: tuple[str, ...] = ()
    sample: float | None = None
    jobs: int = 4
    timeout: float | None = None
    rate: int | None = None
    resume: bool = False

    def deadline(self) -> float:
        """Return the time, by ``time.monotonic()``, until which apply must reach the point from now on."""
        return time.monotonic() + (TIMEOUT if self.timeout is None else self.timeout)


def verify(options: VerifyOptions, *, reporter: Reporter) -> Verification:
    """Compare the tables of a subscription with the publisher's.

    If no launcher serves the subscription, one runs until the point is reached.

    :raises StateForbids: apply is disabled, or stopped by a conflict or fault, or a named table is not subscribed.
    :raises TimeoutExpired: apply did not reach the point in time.
    :raises PgsubError: an error that stops apply, or a server cannot be reached.
    """
    deadline = options.deadline()
    with told_apart(), contextlib.ExitStack() as stack:
        store = stack.enter_context(StateStore.open(options.state_dir, create=False))
        sub = store.subscription(options.name)
        session = stack.enter_context(ledger_session(store, sub, reporter))
        wanted = _wanted(session, subscriptions.relations(session, sub.subid), options.tables)
        if not sub.enabled:
            raise StateForbids(
                f'subscription "{sub.name}" is disabled', hint=f"Enable it:\npgsub enable {word(sub.name)}"
            )
        verify_publisher(session, sub, sub.connection)
        attempt = stack.enter_context(store.journal_attempt("verify", sub, {"sample": options.sample}))
        with served(store, options.state_dir, sub, reporter) as check:
            catch_up(session, sub, options.state_dir, deadline)
            holder = stack.enter_context(connect_target(sub))
            opened = one_point(session, holder, sub, deadline=deadline, report=reporter.warning, check=check)
            point = stack.enter_context(opened)
        failpoints.point("verify.at_point")
        before = EqualBefore(store, sub, wanted, reporter, sample=options.sample, resume=options.resume)
        found = compare_at(point, session, store, sub, wanted, options, reporter=reporter, before=before)
        if found.error is None:
            before.forget()
        else:  # only failed tables may be left
            before.write()
        store.journal_done(attempt)
        return found


def compare_at(
    point: Point,
    session: psycopg.Connection,
    store: StateStore,
    sub: Subscription,
    wanted: Sequence[RelationState],
    options: VerifyOptions,
    *,
    reporter: Reporter | None = None,
    before: EqualBefore | None = None,
) -> Verification:
    """Compare tables at a point.

    :param before: contains what need not be compared. What is found equal is added.
    """
    found = Verification(sub.name, point.lsn, point.pause, options.sample, named=bool(options.tables))
    progress = _ShownProgress(CallbackReporter() if reporter is None else reporter, wanted)
    tables = TableComparisons(session, sub, point, store)
    with Comparison(tables.sides, jobs=options.jobs, sample=options.sample, rate=options.rate) as comparison:
        for number, state in enumerate(wanted):
            progress.begin(number)
            found.tables.append(tables.verdict(comparison, state, partial(progress.read, number), before))
            progress.end(number)
            failpoints.point("verify.table_compared")
    if reporter is not None:
        reporter.done()
    return found


def _wanted(session: psycopg.Connection, states: Sequence[RelationState], names: Sequence[str]) -> list[RelationState]:
    """Return the tables of these names, or all sorted by name."""
    found = [named(session, text, states) for text in names] or sorted(
        states, key=lambda one: (one.schemaname, one.relname)
    )
    return list(dict.fromkeys(found))


class _ShownProgress:
    """The progress of all tables to be compared."""

    def __init__(self, reporter: Reporter, tables: Sequence[RelationState]) -> None:
        self._reporter = reporter
        self._rows = [TableProgress(one.schemaname, one.relname, WAITING, 0, None, 0, None, 0, 0) for one in tables]
        self._began = 0.0
        self._next = time.monotonic() + _FIRST
        self._shown = False

    def begin(self, number: int) -> None:
        """Show that a table's comparison has begun."""
        self._began = time.monotonic()
        self._rows[number] = replace(self._rows[number], state=COMPARING)
        self._report()

    def read(self, number: int, done: int, total: int) -> None:
        """Show how many blocks of the table on both servers are read."""
        speed = int(done * BLOCK / max(time.monotonic() - self._began, 0.001))
        self._rows[number] = replace(
            self._rows[number],
            bytes_done=done * BLOCK,
            bytes_total=total * BLOCK or None,
            bytes_per_second=speed or None,
            seconds_left=-(-(total - done) * BLOCK // speed) if speed else None,
        )
        self._report()

    def end(self, number: int) -> None:
        """Show that the table is compared."""
        self._rows[number] = replace(self._rows[number], state=COMPARED)
        if self._shown and number + 1 == len(self._rows):
            self._next = 0.0
        self._report()

    def _report(self) -> None:
        if time.monotonic() >= self._next:
            self._next, self._shown = time.monotonic() + _INTERVAL, True
            self._reporter.progress(self._rows)
