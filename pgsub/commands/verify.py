"""``pgsub verify``: whether the target holds the publisher's rows, compared at one point while replication runs.

What the server offers for this is to stop all writes and count.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from pgsub.catalog import conflicts as history
from pgsub.catalog.locks import launcher_lock
from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import connect_target, ledger_session, verify_publisher
from pgsub.commands.status.status import serving
from pgsub.commands.status.wait import WaitOptions, wait
from pgsub.common.errors import ApplyError, PgsubError, SchemaFault, StateForbids, TimeoutExpired
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.common.threads import SupervisedThread
from pgsub.protocol.lsn import MAX_LSN, format_lsn
from pgsub.publisher import faults, publication
from pgsub.publisher.connect import connect
from pgsub.publisher.position import committed_position
from pgsub.publisher.tables import RemoteTable, describe_tables
from pgsub.reconcile import record
from pgsub.reconcile.comparison import Comparison, TableResult, sources
from pgsub.reconcile.expressions import ComparedTable, compared
from pgsub.reconcile.point import Point, one_point
from pgsub.reconcile.rows import DIFFERENT, EXTRA, MISSING, Difference, left_by
from pgsub.reconcile.side import Side, date_order
from pgsub.target.catalog.lookup import name_of
from pgsub.target.catalog.relation import describe
from pgsub.target.ledger import subscriptions
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.query import scalar
from pgsub.target.session.connect import SessionName, must_use_password, translate
from pgsub.target.session.connect import connect as connect_to_target

#: Seconds in which apply must come to the point, where nothing else is asked for.
TIMEOUT = 300.0
#: The reason for a difference where the publication leaves out what made it.
UNPUBLISHED = "unpublished"
EQUAL, UNEQUAL, NOT_COMPARED = "equal", "different", "not compared"


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The options of ``verify``.

    :ivar tables: schema.name of each; none for all.
    :ivar sample: percent of the keys that are compared, None for all.
    :ivar jobs: pieces of tables that are read at the same time.
    :ivar timeout: seconds in which apply must come to the point.
    """

    name: str
    state_dir: Path
    tables: tuple[str, ...] = ()
    sample: float | None = None
    jobs: int = 4
    timeout: float | None = None


@dataclass(slots=True)
class TableVerdict:
    """Outcome for one table.

    :ivar outcome: equal, different (in what has no known reason), or not compared.
    :ivar reason: why it was not compared; ``error`` where something failed.
    """

    schemaname: str
    relname: str
    outcome: str
    result: TableResult | None = None
    reason: str | None = None
    error: PgsubError | None = None

    @property
    def name(self) -> str:
        """Its name, for messages."""
        return f"{self.schemaname}.{self.relname}"


@dataclass(slots=True)
class Verification:
    """The result of ``verify``.

    :ivar lsn: the position that was compared; ``pause`` seconds for which apply stood still there.
    """

    name: str
    lsn: int
    pause: float
    sample: float | None
    tables: list[TableVerdict] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether no table has a difference without a known reason."""
        return all(table.outcome != UNEQUAL for table in self.tables)

    @property
    def error(self) -> PgsubError | None:
        """The first error that kept a table from being compared."""
        return next((table.error for table in self.tables if table.error is not None), None)


#: Told a table's name, and how many of its pieces are read.
Progress = Callable[[str, int, int], None]


def verify(
    options: VerifyOptions, *, reporter: Reporter, progress: Progress = lambda name, done, total: None
) -> Verification:
    """Compare the tables of a subscription with the publisher's.

    A launcher that serves the subscription goes on; where there is none, one runs until the point is found.

    :raises SubscriptionNotFound: there is none of this name.
    :raises StateForbids: it is disabled, a conflict or fault stops apply, or a named table is not its own.
    :raises TimeoutExpired: apply did not come to the point in time.
    :raises PgsubError: what keeps apply from getting there, or a server cannot be reached.
    """
    deadline = time.monotonic() + (TIMEOUT if options.timeout is None else options.timeout)
    with told_apart(), contextlib.ExitStack() as stack:
        store = stack.enter_context(StateStore.open(options.state_dir, create=False))
        sub = store.subscription(options.name)
        session = stack.enter_context(ledger_session(sub))
        wanted = _wanted(subscriptions.relations(session, sub.subid), options)
        if not sub.enabled:
            raise StateForbids(
                f'subscription "{sub.name}" is disabled', hint=f"Enable it:\npgsub enable {word(sub.name)}"
            )
        verify_publisher(session, sub, sub.connection)
        with served(store, options.state_dir, sub, reporter) as alive:
            check = caught_up(sub, options.state_dir, deadline, alive)
            holder = stack.enter_context(connect_target(sub))
            opened = one_point(session, holder, sub, deadline=deadline, report=reporter.warning, check=check)
            point = stack.enter_context(opened)
        return compare_at(point, session, store, sub, wanted, options, progress)


def compare_at(
    point: Point,
    session: psycopg.Connection,
    store: StateStore,
    sub: Subscription,
    wanted: Sequence[RelationState],
    options: VerifyOptions,
    progress: Progress = lambda name, done, total: None,
) -> Verification:
    """Compare tables at a point.

    :param session: on the target.
    """
    found = Verification(sub.name, point.lsn, point.pause, options.sample)
    work = _Work(session, sub, point, store)
    with Comparison(work.sides, jobs=options.jobs, sample=options.sample) as comparison:
        for state in wanted:
            found.tables.append(work.verdict(comparison, state, partial(progress, _name(state))))
    return found


def caught_up(sub: Subscription, folder: Path, deadline: float, alive: Callable[[], None]) -> Callable[[], None]:
    """Wait until apply is where the publisher is now.

    :param alive: raises what ended it.
    :return: the check of what keeps it from going on.
    """

    def reach(position: int, seconds: float) -> None:
        wait(WaitOptions(sub.name, folder, "lsn", position, seconds, even_if_stopped=False))

    def check() -> None:
        alive()
        with contextlib.suppress(TimeoutExpired):  # an error that is recorded is raised before
            reach(MAX_LSN, 0.0)

    reach(committed_position(sub.connection, sub.name), max(0.0, deadline - time.monotonic()))
    return check


def _no_difference(error: PgsubError) -> PgsubError:
    """Return an error that does not end as a difference does."""
    if not isinstance(error, ApplyError):
        return error
    return StateForbids(
        error.message, detail=error.detail, hint=error.hint, context=error.context, sqlstate=error.sqlstate
    )


@contextlib.contextmanager
def told_apart() -> Iterator[None]:
    """Let no error end as a difference does."""
    try:
        yield
    except ApplyError as error:  # whoever reads exit code 6 is to know that rows differ
        raise _no_difference(error) from None


def _name(state: RelationState) -> str:
    return f"{state.schemaname}.{state.relname}"


def _wanted(states: Sequence[RelationState], options: VerifyOptions) -> list[RelationState]:
    known = {_name(state): state for state in states}
    unknown = [name for name in options.tables if name not in known]
    if unknown:
        raise StateForbids(
            f'table "{unknown[0]}" is not part of subscription "{options.name}"',
            hint="Name tables as schema.name, as pgsub status shows them.",
        )
    return [known[name] for name in dict.fromkeys(options.tables or sorted(known))]


@contextlib.contextmanager
def served(store: StateStore, folder: Path, sub: Subscription, reporter: Reporter) -> Iterator[Callable[[], None]]:
    """Have the subscription served: by who does it already, else by a launcher of this process for so long.

    :return: raises what ended the latter.
    """
    if serving(store, folder, sub.subid) or launcher_lock(folder).holder() is not None:
        yield lambda: None
        return
    # here and not above: where somebody else serves it, Spark need not be loaded
    from pgsub.launcher.launcher import Launcher

    stop = threading.Event()

    def serve() -> None:
        with StateStore.open(folder, create=False) as own:
            Launcher(own, folder, reporter.log, names=(sub.name,)).run(stop)

    thread = SupervisedThread("verify", "verify", serve)

    def alive() -> None:
        if not thread.is_alive():
            raise thread.fatal_error or StateForbids(f'subscription "{sub.name}" is not served any more')

    thread.start()
    try:
        while not serving(store, folder, sub.subid):
            alive()
            time.sleep(0.05)
        yield alive
    finally:
        stop.set()
        thread.join()


def publisher_side(session: psycopg.Connection, sub: Subscription, snapshot: str) -> Side:
    """Make the publisher's side of a comparison.

    :param session: on the target.
    """
    password = must_use_password(session, sub)

    def publisher() -> psycopg.Connection:
        return connect(sub.connection, application_name=sub.name, must_use_password=password)

    return Side("publisher", publisher, snapshot, faults.translate, date_order(session))


class _Work:
    """The comparison of one subscription at a point."""

    def __init__(self, session: psycopg.Connection, sub: Subscription, point: Point, store: StateStore) -> None:
        self._sub = sub
        self._store = store
        order = date_order(session)

        def target() -> psycopg.Connection:
            return connect_to_target(sub.target, SessionName(sub.subid, "launcher", 0), views=False)

        self.sides = (
            publisher_side(session, sub, point.publisher),
            Side("target", target, point.target, translate, order),
        )
        self._in_utf8 = self._encoding(self.sides[0]) != self._encoding(self.sides[1])
        self._unpublished = self._operations()

    def _encoding(self, side: Side) -> str:
        with contextlib.closing(side.connect()) as connection, side.translating("read the encoding"):
            return str(scalar(connection, "SHOW server_encoding"))

    def _operations(self) -> dict[tuple[str, str], list[str]]:
        """Find tables of which not all is published: what was done there is not on the target."""
        with contextlib.closing(self.sides[0].connect()) as connection:
            return publication.unpublished_operations(connection, self._sub.publications)

    def _not_sent(self, state: RelationState) -> set[str]:
        """Return the kinds of differences that changes leave which are not published."""
        return left_by(self._unpublished.get((state.schemaname, state.relname), ()))

    def verdict(
        self, comparison: Comparison, state: RelationState, progress: Callable[[int, int], None]
    ) -> TableVerdict:
        """Compare one table, or say why it is not."""
        verdict = TableVerdict(state.schemaname, state.relname, NOT_COMPARED)
        if state.srsubstate != "r":
            verdict.reason = f"it is still being synchronized (state {state.srsubstate})"
        else:
            try:
                self._compare(verdict, comparison, state, progress)
            except PgsubError as error:
                verdict.error = error
        if verdict.error is not None:
            verdict.error = _no_difference(verdict.error)
            verdict.outcome, verdict.reason = NOT_COMPARED, verdict.error.message
        return verdict

    def _compare(
        self,
        verdict: TableVerdict,
        comparison: Comparison,
        state: RelationState,
        progress: Callable[[int, int], None],
    ) -> None:
        table, explained = self._described(comparison, state)
        unpublished = self._not_sent(state)
        result = comparison.compare(
            table,
            sources(table, in_utf8=self._in_utf8),
            lambda key, kind: explained.get(key) or (UNPUBLISHED if kind in unpublished else None),
            progress,
        )
        verdict.result, verdict.error = result, result.error
        verdict.outcome = UNEQUAL if result.differences.unexplained else EQUAL

    def _described(self, comparison: Comparison, state: RelationState) -> tuple[ComparedTable, dict[int, str]]:
        """Describe a table as both servers have it, and what the record explains of its rows."""
        publisher, target = self.sides
        remote = comparison.on(publisher, partial(self._remote, state))
        return comparison.on(target, partial(self._local, state, remote))

    def _remote(self, state: RelationState, connection: psycopg.Connection) -> RemoteTable:
        name = (state.schemaname, state.relname)
        with self.sides[0].seeing(connection, "describe a table"):
            found = describe_tables(connection, [name], self._sub.publications)
        if name in found.faults:
            raise found.faults[name]
        return found.tables[name]

    def _local(
        self, state: RelationState, remote: RemoteTable, connection: psycopg.Connection
    ) -> tuple[ComparedTable, dict[int, str]]:
        known_as = (state.schemaname, state.relname)
        with self.sides[1].seeing(connection, "describe a table"):
            name = name_of(connection, state.srrelid) or known_as
            local = describe(connection, *name)
            if local is None:
                raise SchemaFault(f'table "{".".join(name)}" does not exist on the target')
            table = compared(remote, local)
            absent = [c.name for c in remote.columns if c.name not in {d.name for d in table.columns}]
            if absent:
                raise SchemaFault(f'table "{table.name}" lacks published columns: {", ".join(absent)}')
            conflicts = self._conflicts(_name(state))
            subid, in_utf8 = self._sub.subid, self._in_utf8
            explained = record.explained(connection, subid, table, conflicts, known_as=known_as, in_utf8=in_utf8)
        return table, explained

    def _conflicts(self, table: str) -> Iterator[dict[str, Any]]:
        """Yield rows of conflicts whose change was not made."""
        for action in (history.SKIPPED, history.KEPT):
            for row in self._store.conflicts(self._sub.subid, table=table, action=action):
                if row.replayed_at is None:
                    yield from (one for one in (row.remote_tuple, row.replica_identity, row.local_tuple) if one)


def document(found: Verification, *, rows: bool = False) -> dict[str, Any]:
    """Make the JSON object of a result.

    :param rows: with both versions of the rows that differ, not their keys alone.
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
    explained = 0 if result is None else sum(result.differences.explained.values())
    return {
        "schemaname": verdict.schemaname,
        "relname": verdict.relname,
        "outcome": verdict.outcome,
        "reason": verdict.reason,
        "publisher_rows": None if result is None else result.publisher_rows,
        "target_rows": None if result is None else result.target_rows,
        **counts,
        "explained": explained,
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
        "key": {names[position]: present[position] for position in table.key} if table.keyed else None,
    }
    if rows or not table.keyed:
        sides = (("publisher", one.publisher), ("target", one.target))
        found |= {side: None if values is None else dict(zip(names, values, strict=True)) for side, values in sides}
    return found
