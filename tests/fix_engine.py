"""The engine without Spark: worker tasks in threads of the test, between two real databases.

What Spark adds is placement; the tasks are the same functions. Tests of the promise under kill -9 go through the
command line and Spark instead.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import patience
import psycopg
import pytest

from pgsub.apply.worker import feedback, start, worker
from pgsub.apply.worker.loop import WorkerResult
from pgsub.apply.worker.start import WorkerSpec
from pgsub.common.errors import PgsubError
from pgsub.common.subscription import Subscription
from pgsub.protocol.lsn import lsn_or_none
from pgsub.publisher import connect as publisher
from pgsub.publisher import identity, slots
from pgsub.tablesync.context import SyncContext
from pgsub.tablesync.coordinator import TableSync
from pgsub.target.catalog.relation import describe
from pgsub.target.ledger import subscriptions, worker_takeover
from pgsub.target.ledger.schema import installation
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session import connect as target

feedback.MIRROR_SECONDS = 0.1  # nobody mirrors what these workers record

if TYPE_CHECKING:
    from fix_servers import Database


class Task:
    """A task function in a thread: the Job that a submitter would return."""

    def __init__(self, function: Callable[[Any], Any], items: Sequence[Any]) -> None:
        self._result: list[Any] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._body, args=(function, items), daemon=True)
        self._thread.start()

    def _body(self, function: Callable[[Any], Any], items: Sequence[Any]) -> None:
        try:
            self._result = [function(item) for item in items]
        except BaseException as error:
            self.error = error

    def done(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    def stack(self) -> str:
        """What its thread runs."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "it has ended" if frame is None else "".join(traceback.format_stack(frame))

    def ends_within(self, seconds: float) -> bool:
        """Wait for it for a while."""
        self._thread.join(seconds)
        return self.done()

    def result(self, timeout: float | None = None) -> list[Any]:
        """Results, or its exception."""
        self._thread.join(timeout or patience.SECONDS)
        assert self.done(), "the task did not end in time"
        if self.error is not None:
            raise self.error
        return self._result

    def cancel(self) -> None:
        """Threads cannot be cancelled; tests end tasks by their control row."""


class Subscriber:
    """A subscription in the ledger with its slot on the publisher, and ways to run its workers."""

    def __init__(self, pubdb: Database, subdb: Database, **options: Any) -> None:
        self.pubdb, self.subdb = pubdb, subdb
        self.subid = secrets.randbelow(2**31 - 1) + 1
        options = {"publications": ("p",), "slot_name": f"s{self.subid}", **options}
        self.sub = Subscription(self.subid, f"s{self.subid}", pubdb.conninfo, subdb.conninfo, **options)
        self.session = target.connect(subdb.conninfo, f"pgsub {self.subid} launcher 0")
        self.tasks: list[Task] = []
        self.set_based = start.SET_BASED
        installation.install(self.session)

    def register(self, *tables: str, state: str = "r") -> Subscriber:
        """Register with these tables of schema public in one state, and create the slot."""
        rows = []
        for name in tables:
            found = describe(self.session, "public", name)
            assert found is not None, name
            rows.append(RelationState(found.oid, "public", name, state))
        return self.registered(rows)

    def registered(self, rows: Sequence[RelationState]) -> Self:
        """Register with these tables, and create the slot."""
        sub = self.sub
        subscriptions.register(
            self.session, sub.subid, sub.name, "test", sub.slot_name, rows, slot_intent=True, two_phase=sub.two_phase
        )
        with contextlib.closing(
            publisher.connect(sub.connection, application_name=sub.name, replication=True)
        ) as replication:
            assert sub.slot_name is not None
            position = slots.create_slot(replication, sub.slot_name)
            who = identity.identify(replication)
            known = subscriptions.Publisher(who.system_identifier, who.dbname, who.database_oid, who.timeline)
            subscriptions.slot_created(self.session, sub.subid, known, position)
        return self

    def relid(self, name: str) -> int:
        """The target table's oid."""
        return int(self.subdb.value("SELECT %s::regclass::oid::bigint", f"public.{name}"))

    def take_over(self, name: str | None = None) -> Claim:
        """Raise the epoch of apply, or of a table's sync worker."""
        return worker_takeover.take_over(
            self.session, self.subid, worker_takeover.APPLY if name is None else self.relid(name)
        )

    def spec(self, claim: Claim, **more: Any) -> WorkerSpec:
        """What an apply task is given."""
        assert self.sub.slot_name is not None
        return WorkerSpec(self.sub, claim, self.sub.slot_name, self.sub.name, set_based=self.set_based, **more)

    def start(self, **more: Any) -> Task:
        """An apply worker under a new epoch."""
        return self.submit("apply", worker.run, [self.spec(self.take_over(), **more)])

    def submit(self, name: str, function: Callable[[Any], Any], items: Sequence[Any]) -> Task:
        """Run a task function in a thread."""
        task = Task(function, items)
        self.tasks.append(task)
        return task

    def sync(self, *names: str) -> None:
        """Bring a table to ``s``, or several together, in this thread."""
        self.sync_oid(*map(self.relid, names))

    def sync_oid(self, *relids: int) -> None:
        """As :meth:`sync`, for tables whose names are no words."""
        for error in self.try_sync(*relids).values():
            raise error

    def try_sync(self, *relids: int) -> dict[int, PgsubError]:
        """As :meth:`sync_oid`; the errors of single tables by oid."""
        context = SyncContext(self.sub, "1", self.submit, threading.Event())
        return TableSync(context, *relids).run()

    def stop(self, task: Task) -> WorkerResult:
        """Ask to stop at a boundary and wait; ask again, as the launcher does: a row that is locked is passed over."""
        for _ in range(100):
            worker_takeover.ask_to_stop(self.session, self.subid)
            if task.ends_within(0.6):
                break
        result: list[WorkerResult] = task.result()
        return result[0]

    def catch_up(self) -> WorkerResult:
        """Run apply until everything that the publisher has now is applied."""
        position = self.pubdb.value("SELECT pg_current_wal_flush_lsn()")
        task = self.start(until_lsn=lsn_or_none(position))
        result: list[WorkerResult] = task.result()
        return result[0]

    def state(self, name: str) -> str:
        """A table's srsubstate."""
        return str(
            self.subdb.value(
                "SELECT srsubstate::text FROM pgsub.subscription_rel WHERE subid = %s AND relname = %s",
                self.subid,
                name,
            )
        )

    def renew(self) -> None:
        """A new session of the launcher, after a crash of the target."""
        self.session.close()
        self.session = target.connect(self.subdb.conninfo, f"pgsub {self.subid} launcher 0")

    def close(self) -> None:
        """End what still runs, drop the slot."""
        if not self.session.closed:
            try:
                worker_takeover.ask_to_stop(self.session, self.subid)
                for task in self.tasks:
                    task.ends_within(1)
                worker_takeover.take_over(
                    self.session, self.subid, worker_takeover.APPLY
                )  # of who did not hear it the session is ended
                for task in self.tasks:
                    task.ends_within(10)
            except psycopg.Error:
                pass  # the test took the target away
            self.session.close()


@pytest.fixture
def subscriber(pubdb: Database, subdb: Database) -> Iterator[Callable[..., Subscriber]]:
    """Makes subscribers between the test's two databases."""
    made: list[Subscriber] = []

    def make(**options: Any) -> Subscriber:
        made.append(Subscriber(pubdb, subdb, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
