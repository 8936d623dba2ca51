"""The same random workload through pgsub and through the server's own subscriber leaves the same rows on both targets.

``PGSUB_PROPERTY_EXAMPLES=300`` tries more workloads than a run of all tests does, and other ones;
``PGSUB_WORKLOAD="…"`` runs one again that failed, from what was printed.
"""

from __future__ import annotations

import builtins
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import patience
import pytest
import verified
import workload_meeting as meeting
from fix_branches import WORKLOAD
from fix_engine import Task
from fix_pair import Pair
from fix_servers import Database
from fix_writers import forced
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from psycopg import sql
from psycopg.sql import Identifier, Literal
from workload import ENCODINGS, TYPES, Workload, grow_table, published
from workload_compare import members, rows
from workload_run import Run

from pgsub.apply.conflicts.conflict import RowConflict
from pgsub.apply.parallel import worker
from pgsub.apply.parallel.worker import ParallelWorker
from pgsub.apply.worker import feedback
from pgsub.common.errors import Directive, PgsubError
from pgsub.common.subscription import AUTO
from pgsub.protocol.decoder import Decoder
from pgsub.protocol.messages import (
    CommitPrepared,
    Message,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
)
from pgsub.target.session import origins

if TYPE_CHECKING:
    from embedded import Server

EXAMPLES = int(os.environ.get("PGSUB_PROPERTY_EXAMPLES", "0"))
_SEED = st.integers(0, 2**24)
_PHASE = st.lists(_SEED, min_size=5, max_size=20, unique=True).map(tuple)
WORKLOADS = st.builds(
    Workload,
    tables=st.lists(_SEED, min_size=1, max_size=5, unique=True).map(tuple),
    phases=st.lists(_PHASE, min_size=2, max_size=4).map(tuple),
    sessions=st.integers(1, 3),
    via_root=st.booleans(),
    binary=st.booleans(),
    streaming=st.sampled_from(["parallel", "on", "parallel", "on", "off"]),
    apply_mode=st.sampled_from(["batched", "transactional"]),
    two_phase=st.booleans(),
    immediate=st.booleans(),
    encodings=st.sampled_from([ENCODINGS[0], *ENCODINGS]),
    writers=st.sampled_from([AUTO, 2, 4, 8, 3, 6, 1]),
)
_numbers = itertools.count(1)
Databases = Callable[[tuple[str, str]], tuple[Database, Database, Database]]


class Subscribers:
    """One publisher with a workload's tables, the server's own subscription and one of pgsub.

    :param native: the target of the server's own subscription.
    """

    def __init__(self, pubdb: Database, subdb: Database, native: Database, workload: Workload) -> None:
        self.name = f"w{next(_numbers)}"
        self.workload = workload
        self.chance = random.Random(repr(workload.phases))
        self.pubdb, self.subdb, self.native = pubdb, subdb, native
        self.tables = [grow_table(self.name, n, seed, workload) for n, seed in enumerate(workload.tables)]
        self.task: Task | None = None
        self.retries = 0
        self._markers = itertools.count(1)
        self._sides = meeting.Sides(pubdb, (subdb, native), self.tables, workload)
        self._define()
        self.pgsub = self._subscribe()

    def _define(self) -> None:
        marker = Identifier(self.name, "marker")
        for database in (self.pubdb, self.subdb, self.native):
            run = database.connection.execute
            run(sql.SQL("CREATE SCHEMA {}").format(Identifier(self.name)))
            run(sql.SQL("CREATE TABLE {} (n int PRIMARY KEY)").format(marker))
            for table in self.tables:
                run(table.publisher if database is self.pubdb else table.target)
        setting = "debug_logical_replication_streaming = immediate" if self.workload.immediate else ""
        for text in ("RESET ALL", f"SET {setting or 'logical_decoding_work_mem = 64'}"):
            self.pubdb.execute(f"ALTER DATABASE {self.pubdb.name} {text}")
        text = sql.SQL("CREATE PUBLICATION {} FOR TABLE {}, {} WITH (publish_via_partition_root = {})")
        self.pubdb.connection.execute(
            text.format(Identifier(self.name), marker, published(self.tables), Literal(self.workload.via_root))
        )

    def _subscribe(self) -> Pair:
        work = self.workload
        self.native.execute(
            f"CREATE SUBSCRIPTION {self.name} CONNECTION '{self.pubdb.conninfo}' PUBLICATION {self.name}"
            f" WITH (slot_name = {self.name}_native, copy_data = false, streaming = off, two_phase = {work.two_phase},"
            f" binary = {not work.binary and not self._differs()})"
        )
        options: dict[str, Any] = {
            "publications": (self.name,),
            "binary": work.binary,
            "streaming": work.streaming,
            "apply_mode": work.apply_mode,
            "two_phase": "p" if work.two_phase else "d",
            "apply_workers": work.writers,
        }
        return Pair(self.pubdb, self.subdb, **options).subscribe("r", None)

    def _differs(self) -> bool:
        return any(column.kind != column.wide for table in self.tables for column in table.columns)

    # what it does

    def work(self) -> Counter[str]:
        """The whole workload; returns when both have applied it."""
        with ExitStack() as stack:
            sessions = [stack.enter_context(closing(self.pubdb.connect())) for _ in range(self.workload.sessions)]
            for session in sessions:
                session.execute("SET lock_timeout = '10ms'")
            run = Run(sessions, self.pubdb.connection, self.tables, self.name, self.chance)
            run.fill()
            for first, *seeds in self.workload.phases:
                self._meet(run, random.Random(f"meeting {first}"))
                run.phase(seeds, self._interrupt)
            run.finish()
            self.together()
            self._stop()
        return run.done

    def _meet(self, run: Run, chance: random.Random) -> None:
        action = chance.choice([None, *meeting.ACTIONS])
        if action is None:
            self._interrupt()  # what is prepared stays so
            return
        run.finish()
        self.together()
        note(action(self._sides, chance))

    def _interrupt(self) -> None:
        """Apply stops or starts, wherever the publisher's sessions are."""
        if self.task is not None and not self.task.done():
            self._stop()
        else:
            self._run()

    def _stop(self) -> None:
        if self.task is not None and not self.task.done():
            self.pgsub.stop(self.task)

    def _run(self) -> None:
        """Have an apply worker, as the launcher would."""
        task = self.task
        if task is not None and task.done():
            if task.error is not None:
                if not isinstance(task.error, PgsubError) or task.error.directive is not Directive.RETRY:
                    raise task.error
                self.retries += 1
            task = None
        self.task = task or self.pgsub.start()

    def together(self) -> None:
        """Wait until both have applied everything."""
        number = next(self._markers)
        self.pubdb.connection.execute(sql.SQL("INSERT INTO {} VALUES (%s)").format(self._marker()), (number,))
        query = sql.SQL("SELECT count(*) FROM {} WHERE n = %s").format(self._marker()).as_string()
        deadline = time.monotonic() + patience.SECONDS
        for database in (self.native, self.subdb):
            while not database.value(query, number):
                assert time.monotonic() < deadline, f"{database.name} is behind:\n{self._doing(database)}"
                self._run()
                time.sleep(0.005)

    def _doing(self, database: Database) -> str:
        """What the sessions of a target wait for, and the end of its server's log."""
        query = "SELECT ROW(pid, application_name, state, wait_event, pg_blocking_pids(pid), query)::text"
        rows = database.rows(f"{query} FROM pg_stat_activity WHERE datname = current_database()")
        return "\n".join([*(row for (row,) in rows), database.server.log.read_text(errors="replace")[-3000:]])

    def _marker(self) -> Identifier:
        return Identifier(self.name, "marker")

    # what both have at the end

    def compare(self) -> None:
        """Rows, sequences and counted conflicts are those of the server's own subscriber."""
        for table in self.tables:
            assert rows(self.subdb, table) == rows(self.native, table), table.name
        assert list(self._unlike_publisher()) == []
        sequences = "SELECT sequencename, last_value FROM pg_sequences WHERE schemaname = %s ORDER BY 1"
        assert self.subdb.rows(sequences, self.name) == self.native.rows(sequences, self.name)
        if not self.workload.two_phase:  # the server's counts stay when a prepared transaction is rolled back
            self._compare_missed()

    def _unlike_publisher(self) -> Iterator[str]:
        """What verify finds at one point, while apply runs, in tables that are meant to have the publisher's rows."""
        alike = [table.name.as_string() for table in self.tables if table.alike]
        below = members(self.pubdb, alike)
        names = [name for name in self.pgsub.published_names() if name in below]
        assert len(names) >= len(alike)
        self._run()
        for result in verified.results(self.pgsub, names):
            if result.error is not None:
                yield f"{result.table.name}: {result.error}"
            elif any(result.differences.counts.values()):
                yield f"{result.table.name}: {result.differences.counts} {result.differences.listed[:3]}"
        self._stop()

    def _compare_missed(self) -> None:
        """Changes whose row was missing are counted alike."""
        query = "SELECT body ->> 'conflict_type', count(*) FROM pgsub.event WHERE subid = %s GROUP BY 1"
        found = dict(self.subdb.rows(query, self.pgsub.subid))
        counted = ("update_missing", "delete_missing", "update_origin_differs", "delete_origin_differs")
        expected = (0, *(found.pop(kind, 0) for kind in counted))
        assert found == {}
        self._end_native_worker()
        query = (
            f"SELECT ROW(apply_error_count, {', '.join(f'confl_{kind}' for kind in counted)})::text"
            " FROM pg_stat_subscription_stats WHERE subname = %s"
        )
        self.native.wait(query, self.name, value=str(expected).replace(" ", ""))

    def _end_native_worker(self) -> None:
        """It writes its counts at the latest when it ends."""
        self.native.execute(f"ALTER SUBSCRIPTION {self.name} DISABLE")
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_subscription WHERE subname = %s AND pid IS NOT NULL"
        self.native.rows(query, self.name)

    def drop(self) -> None:
        """Remove it all."""
        self.native.execute(f"DROP SUBSCRIPTION {self.name}")
        slot = self.pgsub.sub.slot_name
        self.pubdb.wait("SELECT NOT active FROM pg_replication_slots WHERE slot_name = %s", slot)
        self.pubdb.rows("SELECT pg_drop_replication_slot(%s)", slot)
        self.pubdb.execute(f"DROP PUBLICATION {self.name}")
        origins.drop_all(self.subdb.connection, self.pgsub.subid)  # many workloads have one server
        for database in (self.pubdb, self.subdb, self.native):
            database.execute(f"SET client_min_messages = warning; DROP SCHEMA {self.name} CASCADE")


@pytest.fixture
def databases(publisher: Server, target: Server, pubdb: Database) -> Iterator[Databases]:
    """Publisher, pgsub's target and the one that the server's own subscriber fills, once for each pair of encodings."""
    made: dict[tuple[str, str], tuple[Database, Database, Database]] = {}

    def make(encodings: tuple[str, str]) -> tuple[Database, Database, Database]:
        if encodings not in made:
            name = f"{pubdb.name}_{'_'.join(encodings)}".lower()
            first, second = encodings
            made[encodings] = (
                Database(publisher, name, first),
                Database(target, name, second),
                Database(target, f"{name}_native", second),
            )
            for database in made[encodings]:
                database.execute(TYPES)
        return made[encodings]

    yield make
    for three in made.values():
        for database in three[::-1]:
            database.drop()


_MESSAGES: dict[type[Message], str] = {
    StreamCommit: "streamed commit",
    StreamPrepare: "streamed prepare",
    Prepare: "prepare",
    CommitPrepared: "commit prepared",
    RollbackPrepared: "rollback prepared",
}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What is rare in what the publisher sends, and whether transactions are applied while they arrive."""
    found: Counter[str] = Counter()
    decode, complete = Decoder.decode, ParallelWorker.complete

    def decoded(self: Decoder, payload: bytes) -> Message:
        message = decode(self, payload)
        if isinstance(message, StreamAbort):
            found["streamed abort" if message.xid == message.subxid else "subtransaction abort in a stream"] += 1
        elif type(message) in _MESSAGES:
            found[_MESSAGES[type(message)]] += 1
        return message

    def completed(self: ParallelWorker, *args: Any) -> list[RowConflict] | None:
        missing = complete(self, *args)
        found["applied while it arrived"] += missing is not None
        if self.reason is not None:  # an exception of Python's would be a bug that nobody notices
            assert not hasattr(builtins, self.reason.partition(":")[0]), self.reason
        return missing

    monkeypatch.setattr(Decoder, "decode", decoded)
    monkeypatch.setattr(ParallelWorker, "complete", completed)
    return found


def _given() -> Callable[[Callable[[Workload], None]], Callable[[], None]]:
    again = os.environ.get("PGSUB_WORKLOAD")
    which = st.just(eval(again, {"Workload": Workload})) if again else WORKLOADS
    limits = settings(
        max_examples=1 if again else EXAMPLES or 6,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    return lambda function: limits(given(which)(function))


@pytest.mark.usefixtures("fast")
def test_the_target_ends_as_one_of_the_servers_own_subscriber(
    databases: Databases, seen: Counter[str], reached: Callable[[str], None]
) -> None:
    """Whatever the tables are, and whatever transactions do: with rows missing here and there, and tables altered."""
    done: Counter[str] = Counter()

    @_given()
    def run(workload: Workload) -> None:
        note(f'again: PGSUB_WORKLOAD="{workload}"')
        subscribers = Subscribers(*databases(workload.encodings), workload)
        try:
            done.update(subscribers.work())
            subscribers.compare()
        finally:
            subscribers.pgsub.close()
        subscribers.drop()

    run()
    if "PGSUB_WORKLOAD" not in os.environ:
        assert min(done[kind] for kind in ("insert", "update", "move", "delete", "truncate")) > 0, done
        assert [branch for branch in WORKLOAD if not seen[branch]] == []
    for branch in seen:
        reached(branch)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher to wait for, no long wait for a lock before what arrives is replayed, and writers at any time."""
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)
    monkeypatch.setattr(worker, "LOCK_TIMEOUT", "200ms")
    forced(monkeypatch, 1)
