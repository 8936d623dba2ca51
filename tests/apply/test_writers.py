"""Several writers: units of a batch at once, commits in order, faults named by the one session that applies alone."""

from __future__ import annotations

import random
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import patience
import psycopg
import pytest
from fix_failpoints import At, WithoutThreads
from fix_pair import MakePair, Pair
from fix_writers import Log
from thorough import long

from pgsub.apply.writers import dependencies, pool
from pgsub.common.errors import PgsubError, StreamsMustRestart

ACCOUNTS = """
CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL, email text UNIQUE);
CREATE TABLE log (id int PRIMARY KEY, account int NOT NULL REFERENCES account);
"""
pytestmark = pytest.mark.usefixtures("said")


def fill(p: Pair, accounts: int = 400) -> None:
    """Accounts on both sides, and a worker that has seen the descriptions of the tables."""
    p.apply(f"INSERT INTO account SELECT g, 100, 'mail' || g FROM generate_series(1, {accounts}) g")


def work(p: Pair, transactions: int, seed: int, first: int = 1) -> None:
    """Transfers that leave the sum as it is, each with its number in the log; addresses go from one to another."""
    chance = random.Random(seed)
    with closing(p.pubdb.connect()) as session:
        for number in range(first, first + transactions):
            one, other = chance.sample(range(1, 401), 2)
            session.execute("BEGIN")
            session.execute("UPDATE account SET balance = balance - 1 WHERE id = %s", (one,))
            session.execute("INSERT INTO log VALUES (%s, %s)", (number, one))
            if chance.random() < 0.1:
                session.execute("UPDATE account SET email = NULL WHERE id = %s", (other,))
                session.execute("UPDATE account SET email = %s WHERE id = %s", (f"new{number}", other))
            if chance.random() < 0.1 and number > 20:
                session.execute("DELETE FROM log WHERE id = %s", (number - 10,))
                session.execute("INSERT INTO log VALUES (%s, %s)", (number - 10, other))
            session.execute("UPDATE account SET balance = balance + 1 WHERE id = %s", (other,))
            session.execute("COMMIT")


class Reader:
    """A reader of the target, which must never have a state that the publisher did not have."""

    def __init__(self, p: Pair) -> None:
        self._pair, self._stop = p, threading.Event()
        self.wrong: list[object] = []
        self.seen: list[int] = []
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        query = "SELECT (SELECT sum(balance) FROM account), count(*), coalesce(max(id), 0) FROM log"
        while not self._stop.is_set():
            try:
                with closing(self._pair.subdb.connect()) as session:
                    while not self._stop.is_set():
                        [(total, count, last)] = session.execute(query.encode()).fetchall()
                        if total not in (None, 40000) or count != last or (self.seen and last < self.seen[-1]):
                            self.wrong.append((total, count, last, self.seen[-3:]))
                        self.seen.append(last)
            except psycopg.Error:
                time.sleep(0.05)

    def close(self) -> None:
        """Stop, and say what was seen."""
        self._stop.set()
        self._thread.join(10)
        assert not self.wrong, self.wrong[:5]


def catch_up(p: Pair, tries: int = 40) -> None:
    """As :meth:`Pair.catch_up`, again where the streams have to restart."""
    for _ in range(tries):
        try:
            p.catch_up()
        except PgsubError as error:
            if error.directive.value != "retry" and not isinstance(error, StreamsMustRestart):
                raise
        else:
            return
    raise AssertionError("apply did not get to the end")


@pytest.mark.long
@pytest.mark.parametrize("sessions", [2, 8])
def test_readers_see_only_states_that_the_publisher_had(pair: MakePair, said: Log, sessions: int) -> None:
    p = pair(ACCOUNTS, apply_workers=sessions)
    fill(p)
    reader = Reader(p)
    for number in range(3):
        work(p, 150, seed=number, first=1 + 150 * number)
        catch_up(p)
    reader.close()
    assert said("units of")
    p.same("account", "log")


def test_where_no_thread_can_be_started_one_session_applies(pair: MakePair, without_threads: WithoutThreads) -> None:
    p = pair(ACCOUNTS, apply_workers=4)
    fill(p)
    work(p, 100, seed=3)
    with without_threads("writer") as refused:
        p.apply()
    assert refused
    work(p, 100, seed=4, first=101)
    p.apply()
    p.same("account", "log")


def test_a_dependency_that_no_key_shows_is_found_on_the_target(
    pair: MakePair, said: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = np.empty(0, np.int64)
    monkeypatch.setattr(dependencies, "_pairs", lambda codes, numbers: (none, none))
    p = pair(ACCOUNTS, apply_workers=4)
    fill(p)
    reader = Reader(p)
    for number in range(20):  # the dependent ones may happen to come in their order
        work(p, 200, seed=7 + number, first=1 + 200 * number)
        catch_up(p)
        if said("failed:"):
            break
    reader.close()
    assert said("failed:")
    p.same("account", "log")
    assert p.events() == []


def test_a_row_that_is_changed_before_it_came_is_not_taken_for_missing(
    pair: MakePair, said: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = np.empty(0, np.int64)
    monkeypatch.setattr(dependencies, "_pairs", lambda codes, numbers: (none, none))
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v int)", apply_workers=4, apply_mode="transactional")
    pairs = [(f"INSERT INTO t VALUES ({n}, 0)", f"UPDATE t SET v = 1 WHERE id = {n}") for n in range(1, 60)]
    p.apply("INSERT INTO t VALUES (0, 0)", *(statement for two in pairs for statement in two))
    assert said("failed: a row is missing")
    p.same("t")
    assert p.events() == []


def test_a_fault_is_named_with_its_finish_lsn_and_everything_before_it_is_committed(pair: MakePair, said: Log) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY)", apply_workers=4)
    p.apply("INSERT INTO t VALUES (0)")
    p.subdb.execute("INSERT INTO t VALUES (60)")
    for number in range(1, 100):
        p.pubdb.execute(f"INSERT INTO t VALUES ({number})")
    with pytest.raises(PgsubError) as caught:
        p.catch_up()
    assert said("units of")
    assert (caught.value.exit_code, caught.value.relation) == (6, "public.t")
    assert caught.value.finish_lsn is not None
    assert p.subdb.value("SELECT array_agg(id ORDER BY id) FROM t") == list(range(61))
    p.subdb.execute("DELETE FROM t WHERE id = 60")
    p.catch_up()
    p.same("t")


def test_each_transaction_is_a_commit_of_its_own_where_that_was_asked_for(pair: MakePair, said: Log) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY)", apply_workers=4, apply_mode="transactional")
    p.apply("INSERT INTO t VALUES (0)", *[f"INSERT INTO t VALUES ({number})" for number in range(1, 100)])
    assert said("units of")
    p.same("t")
    assert p.subdb.value("SELECT count(DISTINCT xmin::text) FROM t") == 100


def test_a_unit_whose_lock_is_waited_for_while_it_waits_for_its_turn_does_not_wait_for_ever(
    pair: MakePair, said: Log
) -> None:
    """The unit before it has not begun, for it waits for the one that waits for the lock."""
    p = pair(
        "CREATE TABLE t (id int PRIMARY KEY, code text UNIQUE)",
        apply_workers=5,
        apply_mode="transactional",
    )
    p.apply("INSERT INTO t SELECT g FROM generate_series(0, 3) g")
    for text in (
        "code = 'u' WHERE id = 0",
        "code = 'w' WHERE id = 1",
        "code = 'v' WHERE id = 1",
        "code = 'w' WHERE id = 3",
    ):
        p.pubdb.execute(f"UPDATE t SET {text}")
    stuck = (  # they have begun to change the table, and do nothing more
        "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
        " WHERE a.application_name LIKE %s AND l.granted"
        " AND l.relation = 't'::regclass AND l.mode = 'RowExclusiveLock'"
        " AND (a.wait_event_type = 'Lock' OR a.state = 'idle in transaction')"
    )
    with closing(p.subdb.connect()) as other:
        other.execute("BEGIN; SELECT FROM t WHERE id = 1 FOR UPDATE")
        task = p.start()
        p.until("SELECT count(*) FROM t WHERE code = 'u'", value=1, task=task)
        p.until(stuck, f"pgsub {p.subid} apply %", value=2, task=task)
    p.until("SELECT count(*) FROM t WHERE code = 'w' AND id = 3", value=1, task=task)
    p.stop(task)
    assert said("units of")
    p.same("t")


def _behind(pair: MakePair) -> Pair:
    """A pair of two writers with a hundred transactions to apply."""
    p = pair("CREATE TABLE t (id int PRIMARY KEY)", apply_workers=2)
    p.apply("INSERT INTO t VALUES (0)")
    for number in range(1, 100):
        p.pubdb.execute(f"INSERT INTO t VALUES ({number})")
    return p


def test_a_stranger_who_takes_the_lock_of_a_turn_does_not_stop_apply(
    pair: MakePair, said: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = _behind(pair)
    monkeypatch.setenv("PGSUB_FAILPOINTS", "apply.unit_executed=sleep:1@1")  # the unit before it has long committed
    turn = (
        "SELECT classid::bigint << 32 | objid::bigint FROM pg_locks"
        f" WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND classid = {p.subid}"
    )
    taken = threading.Event()

    def take() -> None:
        while not (found := stranger.execute(turn.encode()).fetchone()):
            time.sleep(0.001)
        stranger.execute("SELECT pg_advisory_lock(%s)", found)
        taken.set()

    with closing(p.subdb.connect()) as stranger:
        thief = threading.Thread(target=take, daemon=True)
        thief.start()
        task = p.start()
        p.until("SELECT count(*) FROM t", value=100, task=task)
        assert taken.wait(patience.SECONDS)
        p.stop(task)
    assert said("waited for a stranger's advisory lock")
    p.same("t")


def test_a_unit_that_waits_for_its_own_turn_is_no_strangers_business(
    pair: MakePair, said: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = _behind(pair)
    monkeypatch.setattr(pool, "STRANGER_SECONDS", 0.1)
    monkeypatch.setenv("PGSUB_FAILPOINTS", "apply.unit_executed=sleep:2@1")  # those behind it wait
    task = p.start()
    p.until("SELECT count(*) FROM t", value=100, task=task)
    p.stop(task)
    assert not said("waited for a stranger's advisory lock")
    p.same("t")


@pytest.mark.parametrize(
    "point", ["apply.unit_executed=error@3", "apply.unit_reply_lost=error@2", "thread.writer=die@6"]
)
def test_a_session_that_ends_anywhere_loses_nothing(pair: MakePair, said: Log, at: At, point: str) -> None:
    p = pair(ACCOUNTS, apply_workers=4)
    fill(p)
    reader = Reader(p)
    work(p, 200, seed=3)
    at(point)
    catch_up(p)
    reader.close()
    assert said("units of")
    p.same("account", "log")


@pytest.mark.long
def test_sessions_that_are_ended_at_random_lose_nothing(pair: MakePair, said: Log) -> None:
    p = pair(ACCOUNTS, apply_workers=8)
    fill(p)
    reader, stop = Reader(p), threading.Event()
    query = (
        "SELECT pg_terminate_backend(pid) FROM (SELECT pid FROM pg_stat_activity WHERE application_name"
        f" LIKE 'pgsub {p.subid} apply %' ORDER BY random() LIMIT 1) x"
    )

    def kill() -> None:
        with closing(p.subdb.connect()) as session:
            while not stop.wait(0.4):
                session.execute(query.encode())

    killer = threading.Thread(target=kill, daemon=True)
    work(p, 400, seed=11)
    killer.start()
    threading.Timer(6, stop.set).start()
    catch_up(p)
    stop.set()
    killer.join()
    reader.close()
    p.same("account", "log")


def test_units_that_were_decided_by_older_table_states_are_decided_again(
    pair: MakePair, said: Log, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    p = pair(
        ACCOUNTS + "CREATE TABLE other (id int PRIMARY KEY);",
        names=[("public", "account"), ("public", "log")],
        apply_workers=4,
    )
    fill(p)
    work(p, 100, seed=5)
    monkeypatch.setenv("PGSUB_FAILPOINTS", f"apply.unit_executed=pause:{tmp_path / 'go'}@1")
    task = p.start()
    p.until("SELECT count(*) > 0 FROM log", task=task)  # the first unit is committed
    p.add("other")
    (tmp_path / "go").touch()
    p.until("SELECT count(*) FROM log", value=100, task=task)
    p.stop(task)
    assert said("compare-and-set of the progress row failed")
    p.same("account", "log")


def test_a_task_that_was_taken_over_commits_nothing_more(
    pair: MakePair, said: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = pair(ACCOUNTS, apply_workers=4)
    fill(p)
    work(p, 100, seed=6)
    monkeypatch.setenv("PGSUB_FAILPOINTS", "apply.unit_executed=sleep:2@1")
    first = p.start()
    p.until("SELECT count(*) > 0 FROM log", task=first)
    catch_up(p)  # under a new epoch
    assert first.ends_within(patience.SECONDS)
    assert isinstance(first.error, PgsubError)
    p.same("account", "log")


@pytest.mark.parametrize(
    ("sub", "change"),
    [
        ("CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';"
         "CREATE TRIGGER f BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f();"
         "ALTER TABLE t ENABLE ALWAYS TRIGGER f;", "a trigger fires"),
        ("ALTER TABLE t ADD mine serial", "has a default"),
        ("ALTER TABLE t DROP CONSTRAINT t_pkey", "neither a replica identity index nor a primary key"),
    ],
)  # fmt: skip
def test_where_changes_may_depend_on_others_unseen_one_session_applies(
    pair: MakePair, said: Log, sub: str, change: str
) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY)", sub=sub, apply_workers=4)
    p.apply("INSERT INTO t VALUES (0)", *[f"INSERT INTO t VALUES ({number})" for number in range(1, 50)])
    assert not said("units of")
    assert said(change)
    p.same("t", columns="id")


RANDOM = """
CREATE TABLE a (id int PRIMARY KEY, code text UNIQUE, n int, UNIQUE (n, id));
CREATE TABLE b (k text, n int, v text, PRIMARY KEY (k, n));
CREATE TABLE c (id int PRIMARY KEY, a int REFERENCES a ON DELETE CASCADE, at timestamptz);
"""
STATEMENTS = (
    "INSERT INTO a VALUES (%(x)s, %(s)s, %(y)s) ON CONFLICT DO NOTHING",
    "UPDATE a SET n = n + 1, code = %(s)s WHERE id = %(x)s",
    "UPDATE a SET code = NULL WHERE id BETWEEN %(x)s AND %(x)s + 3",
    "DELETE FROM a WHERE id = %(x)s",
    "INSERT INTO b VALUES (%(s)s, %(y)s, 'v') ON CONFLICT (k, n) DO UPDATE SET v = b.v || 'x'",
    "UPDATE b SET n = n + 100 WHERE k = %(s)s",
    "DELETE FROM b WHERE n = %(y)s",
    "INSERT INTO c SELECT %(x)s, %(y)s, now() FROM a WHERE id = %(y)s ON CONFLICT DO NOTHING",
    "UPDATE c SET at = now() WHERE id < %(y)s",
)


@pytest.mark.parametrize("seed", [0, *long([1, 2])])
def test_random_transactions_end_as_on_the_publisher(pair: MakePair, said: Log, seed: int) -> None:
    chance = random.Random(seed)
    p = pair(RANDOM, apply_workers=chance.randrange(2, 9), apply_mode=chance.choice(["batched", "transactional"]))
    with closing(p.pubdb.connect()) as session:
        for _ in range(3):
            for _ in range(150):
                session.execute("BEGIN")
                for _ in range(chance.choice([1, 1, 2, 6])):
                    values = {"x": chance.randrange(300), "y": chance.randrange(300), "s": f"s{chance.randrange(200)}"}
                    session.execute("SAVEPOINT s")
                    try:
                        session.execute(chance.choice(STATEMENTS).encode(), values)
                    except psycopg.errors.IntegrityError:
                        session.execute("ROLLBACK TO s")
                session.execute("COMMIT")
            p.catch_up()
            p.same("a", "b", "c")
    assert said("units of")
    assert p.events() == []
