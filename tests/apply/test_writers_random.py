"""Several writers under random work: readers of the target see, at any moment, a state that the publisher had.

At the end the target has what the server's own subscriber made of the same work, with rows missing and tables altered.

``PGSUB_WRITERS_MINUTES=30`` goes on with further seeds for so long, as ``make soak`` does;
``PGSUB_WRITERS_SEED=N`` runs one again that failed, from what was printed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import patience
import psycopg
import pytest
from fix_engine import Task
from fix_pair import Pair
from fix_servers import Database
from fix_writers import Log, forced
from workload_ordered import NAMES, TABLES, TARGET, Ordered, look, number

from pgsub.apply.parallel import worker
from pgsub.apply.worker import feedback
from pgsub.apply.writers import pool
from pgsub.common.errors import Directive, PgsubError
from pgsub.common.subscription import AUTO

if TYPE_CHECKING:
    from embedded import Server

MINUTES = float(os.environ.get("PGSUB_WRITERS_MINUTES", "0"))

#: Between them they have all that there is: eight sessions, kills, strays, DDL, prepared transactions.
SEEDS = (6, 24, 34)


class Looking(threading.Thread):
    """A reader of the target; what it saw is judged when all is over."""

    def __init__(self, subdb: Database) -> None:
        super().__init__(daemon=True)
        self._subdb = subdb
        self._stop_it = threading.Event()
        self.seen: list[tuple[str, ...]] = []
        self.start()

    def run(self) -> None:
        """Thread body."""
        while not self._stop_it.is_set():
            with contextlib.suppress(psycopg.Error), closing(self._subdb.connect()) as session:
                session.execute("SET lock_timeout = '500ms'")
                while not self._stop_it.is_set():
                    with contextlib.suppress(psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                        found = look(session)
                        if not self.seen or self.seen[-1] != found:
                            self.seen.append(found)
                    time.sleep(random.random() / 50)

    def close(self) -> None:
        """Stop."""
        self._stop_it.set()
        self.join(30)
        assert not self.is_alive()

    def wrong(self, states: dict[tuple[str, ...], int]) -> Iterator[str]:
        """States that the publisher never had, and those that are older than the one before."""
        last = -1
        for place, state in enumerate(self.seen):
            if state not in states:
                yield f"look {place}: {number(state)} was never there, after {last}"
            elif states[state] < last:
                yield f"look {place}: {states[state]} after {last}"
            else:
                last = states[state]


class Course:
    """One random workload with everything that it needs: all of it grows from one integer."""

    def __init__(self, databases: Sequence[Database], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chance = chance = random.Random(f"writers {seed}")
        self.counts: Counter[str] = Counter()
        self.sessions = chance.randrange(2, 9)
        forced(monkeypatch, chance.choice([1, 1, 5, 20]), seed)
        monkeypatch.setattr(pool, "LONGEST_PAUSE", 2)  # or a few faults would leave most of it to one session
        two_phase = chance.random() < 0.5
        options = {
            "apply_workers": AUTO if seed % 3 == 1 else self.sessions,
            "apply_mode": chance.choice(["batched", "batched", "transactional"]),
            "streaming": chance.choice(["parallel", "on", "off"]),
            "binary": chance.random() < 0.3,
            "two_phase": "p" if two_phase else "d",
        }
        self.kills = chance.choice([0.0, 0.0, 0.3])
        self.alters = chance.choice([0.0, 0.2])
        self.strays = chance.random() < 0.2
        self.pubdb, self.subdb, self.native = databases
        for database in databases:
            database.execute(TABLES if database is self.pubdb else TABLES + TARGET)
        self.pubdb.execute(f"ALTER DATABASE {self.pubdb.name} SET logical_decoding_work_mem = 64")
        self.pubdb.execute("CREATE PUBLICATION p FOR ALL TABLES")
        self.pair = Pair(self.pubdb, self.subdb, **options).subscribe("r", None)
        self.native.execute(
            f"CREATE SUBSCRIPTION n{self.pair.subid} CONNECTION '{self.pubdb.conninfo}' PUBLICATION p"
            f" WITH (copy_data = false, streaming = off, two_phase = {two_phase})"
        )
        apart = chance.choice([0.0, 0.01, 0.05, 0.2])
        self.work = Ordered(self.pubdb, databases[1:], chance, apart, two_phase)
        self.two_phase = two_phase
        self.task: Task | None = None
        self.options = {**options, "kills": self.kills, "alters": self.alters, "apart": apart, "strays": self.strays}

    def run(self, transactions: int) -> Looking:
        """All of it; both sides are equal then."""
        self.work.note()
        reader = Looking(self.subdb)
        try:
            with ExitStack() as stack:
                sessions = [stack.enter_context(closing(self.pubdb.connect())) for _ in range(3)]
                for session in sessions:
                    session.execute("SET lock_timeout = '10ms'")
                for _ in range(4):
                    self.work.work(sessions, transactions // 4, self._between)
                    self.work.finish()
                    self._together()
                    self._stop()
                    if self.strays:
                        self.work.stray()
        finally:
            reader.close()
        return reader

    def _between(self) -> None:
        roll = self.chance.random()
        if roll < self.kills:
            self._kill()
        elif roll < self.kills + self.alters:
            self.work.alter()
        elif self._running() and self.chance.random() < 0.6:
            self._stop()  # what waits is more for the next one
        else:
            self._apply()

    def _kill(self) -> None:
        """End one of the worker's sessions, whichever it is."""
        query = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s ORDER BY backend_start, pid"
        self._apply()
        deadline = time.monotonic() + patience.SECONDS
        while not (pids := self.subdb.rows(query, f"pgsub {self.pair.subid} apply %")):
            assert time.monotonic() < deadline
            self._apply()
            time.sleep(0.01)
        self.subdb.rows("SELECT pg_terminate_backend(%s)", self.chance.choice(pids)[0])
        self.counts["killed"] += 1

    def _running(self) -> bool:
        return self.task is not None and not self.task.done()

    def _check(self) -> None:
        """Raise what ended the task, if the launcher would not start it again."""
        task, self.task = self.task, None
        error = task.error if task is not None else None
        if error is not None:
            if not isinstance(error, PgsubError) or error.directive is not Directive.RETRY:
                raise error
            self.counts["retried"] += 1

    def _apply(self) -> None:
        if not self._running():
            self._check()
            self.task = self.pair.start()

    def _stop(self) -> None:
        if self._running():
            assert self.task is not None
            with contextlib.suppress(PgsubError):  # it is looked at below
                self.pair.stop(self.task)
        self._check()

    def _together(self) -> None:
        """Wait until both have applied everything."""
        number = self.work.mark()
        deadline = time.monotonic() + patience.SECONDS
        for database in (self.native, self.subdb):
            while not database.value("SELECT count(*) FROM first WHERE n = %s", number):
                assert time.monotonic() < deadline, f"{database.name} is behind"
                self._apply()
                time.sleep(0.02)

    def wrong(self, reader: Looking) -> Iterator[str]:
        """What a reader saw that the publisher did not have, and what the targets do not have alike at the end."""
        if not self.strays:
            yield from reader.wrong(self.work.states)
            if look(self.subdb.connection) != look(self.pubdb.connection):
                yield "the target is unlike the publisher"
        for name in NAMES:
            query = f"SELECT r::text FROM {name} r ORDER BY 1"
            if self.subdb.rows(query) != self.native.rows(query):
                yield f"{name} is unlike that of the server's own subscriber"
        query = "SELECT body ->> 'conflict_type', count(*) FROM pgsub.event WHERE subid = %s GROUP BY 1"
        found = dict(self.subdb.rows(query, self.pair.subid))
        for kind in (None, "update_origin_differs", "delete_origin_differs"):  # a rewritten table's rows are from here
            found.pop(kind, None)
        self.counts["missed"] += sum(found.values())
        if not self.two_phase:  # the server's counts stay when a prepared transaction is rolled back
            expected = self._missed_by_native()
            if found != expected:
                yield f"missed: {found}, by the server's own subscriber {expected}"

    def _missed_by_native(self) -> dict[str, int]:
        """What it counted; it writes that at the latest when it ends."""
        self.native.execute(f"ALTER SUBSCRIPTION n{self.pair.subid} DISABLE")
        query = "SELECT count(*) FROM pg_stat_subscription WHERE subname = %s AND pid IS NOT NULL"
        self.native.wait(query, f"n{self.pair.subid}", value=0)
        query = "SELECT confl_update_missing, confl_delete_missing FROM pg_stat_subscription_stats WHERE subname = %s"
        [counts] = self.native.rows(query, f"n{self.pair.subid}")
        return {kind: n for kind, n in zip(("update_missing", "delete_missing"), counts, strict=True) if n}

    def close(self) -> None:
        """End what still runs, and leave the databases as they were."""
        self.pair.close()
        self.native.execute(f"DROP SUBSCRIPTION n{self.pair.subid}")
        slot = self.pair.sub.slot_name
        self.pubdb.wait("SELECT NOT active FROM pg_replication_slots WHERE slot_name = %s", slot)
        self.pubdb.rows("SELECT pg_drop_replication_slot(%s)", slot)
        self.pubdb.execute(f"DROP PUBLICATION p; ALTER DATABASE {self.pubdb.name} RESET ALL")
        for database in (self.pubdb, self.subdb, self.native):
            database.execute(f"SET client_min_messages = warning; DROP TABLE {', '.join(NAMES)} CASCADE")
        for database in (self.subdb, self.native):
            database.execute("DROP FUNCTION nothing")


def course(databases: Sequence[Database], seed: int) -> Counter[str]:
    """One of them, from its seed; what happened in it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)
        monkeypatch.setattr(worker, "LOCK_TIMEOUT", "200ms")
        one = Course(databases, seed, monkeypatch)
        print(f"PGSUB_WRITERS_SEED={seed}: {one.options}", flush=True)
        try:
            reader = one.run(400 if MINUTES else 200)
            wrong = list(one.wrong(reader))
            assert wrong == [], wrong[:5]
        finally:
            one.close()
    return one.work.done + one.counts + Counter(looks=len(reader.seen))


def _seeds() -> Iterator[int]:
    if "PGSUB_WRITERS_SEED" in os.environ:
        yield int(os.environ["PGSUB_WRITERS_SEED"])
    elif not MINUTES:
        yield from SEEDS
    else:
        first, deadline = random.SystemRandom().randrange(2**32), time.monotonic() + 60 * MINUTES
        for one in itertools.count(first):
            if time.monotonic() > deadline:
                break
            yield one


@pytest.fixture
def databases(target: Server, pubdb: Database, subdb: Database) -> Iterator[list[Database]]:
    """The publisher's, pgsub's target and the one that the server's own subscriber fills."""
    native = Database(target, f"{subdb.name}_native")
    yield [pubdb, subdb, native]
    native.drop()


@pytest.mark.long
@pytest.mark.timeout(240 + 90 * MINUTES)
def test_readers_see_states_that_the_publisher_had_whatever_several_writers_do(
    databases: Sequence[Database], said: Log, caplog: pytest.LogCaptureFixture
) -> None:
    done: Counter[str] = Counter()
    for seed in _seeds():
        began = time.monotonic()
        found = course(databases, seed)
        found["batches of several writers"] = len(said("units of"))
        found["units that failed"] = len(said("failed:"))
        caplog.clear()
        print(f"{time.monotonic() - began:.1f} s: {dict(found)}", flush=True)
        done += found
    print(dict(done))
    assert done["batches of several writers"] > 0
    if not os.environ.get("PGSUB_WRITERS_SEED"):
        kinds = ("killed", "DDL", "TRUNCATE", "COMMIT PREPARED", "looks", "stray", "missed")
        assert min(done[kind] for kind in kinds) > 0, done
