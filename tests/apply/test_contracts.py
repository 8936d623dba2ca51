"""Readers of the target watch all the time: what they see is a state that the publisher had, and never an earlier one.

Both contracts promise it, once all tables are ready: ``batched``, where a target commit may cover several transactions,
and ``transactional``.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

import patience
import psycopg
import pytest
from fix_pair import MakePair, Pair
from fix_program import until
from fix_servers import Pair as Servers
from psycopg import sql
from thorough import long, thorough

from pgsub.apply.worker import feedback
from pgsub.common.errors import Directive, PgsubError

ACCOUNTS = 20
_ROUNDS = 5  #: so often what was written is waited for, or one large batch would be all that readers see
TABLES = """
CREATE TABLE version (id int PRIMARY KEY, v int);
CREATE TABLE a (id int PRIMARY KEY, n int NOT NULL, pad text);
CREATE TABLE b (n int NOT NULL, id int); ALTER TABLE b REPLICA IDENTITY FULL;
CREATE TABLE log (k int);
"""
_START = (
    f"INSERT INTO version VALUES (1, 0); INSERT INTO a SELECT g, 100 FROM generate_series(1, {ACCOUNTS}) g;"
    f"INSERT INTO b SELECT 100, g FROM generate_series(1, {ACCOUNTS}) g"
)
#: Everything there is, in one statement and so in one snapshot.
_STATE = """
SELECT (SELECT v FROM version), (SELECT sum(n) FROM a) + (SELECT sum(n) FROM b),
       (SELECT md5(string_agg(x::text, ',' ORDER BY x::text)) FROM
           (SELECT 'a', id, n FROM a UNION ALL SELECT 'b', id, n FROM b
             UNION ALL SELECT 'log', k, count(*) FROM log GROUP BY k) AS x)
"""


class Writer(threading.Thread):
    """Transactions that move amounts between its own accounts of two tables, and at their end count the version up.

    What it sees then, with the version's row locked, is what everybody sees after its commit.
    """

    def __init__(
        self, session: psycopg.Connection, states: dict[int, str], number: int, transactions: int, *, prepares: bool
    ) -> None:
        super().__init__(daemon=True)
        self._session, self._states, self._prepares = session, states, prepares
        self._gid = f"{session.info.dbname} {number}"
        self._accounts = range(1 + number, ACCOUNTS + 1, 2)
        self._chance = random.Random(f"{number} {max(states)}")
        self._transactions = transactions
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for _ in range(self._transactions):
                self._transaction()
        except BaseException as error:
            self.error = error

    def _transaction(self) -> None:
        execute, chance = self._session.execute, self._chance
        execute("BEGIN")
        for _ in range(chance.choice([1, 1, 3, 8])):
            self._transfer()
        if chance.random() < 0.3:
            execute("SAVEPOINT s")
            execute("UPDATE a SET n = 0 WHERE id = %s", (self._accounts[0],))
            execute("INSERT INTO log SELECT -1 FROM generate_series(1, 60)")
            execute("ROLLBACK TO s")
        if chance.random() < 0.1:
            execute("ROLLBACK")
            return
        found = execute("UPDATE version SET v = v + 1 RETURNING v").fetchone()
        assert found is not None
        execute("INSERT INTO log SELECT %s FROM generate_series(1, %s)", (found[0], chance.choice([1, 2, 70])))
        state = execute(_STATE.encode()).fetchone()
        assert state is not None and state[1] == 200 * ACCOUNTS
        if self._prepares and chance.random() < 0.4:
            execute(sql.SQL("PREPARE TRANSACTION {}").format(self._gid))
            if chance.random() < 0.3:
                execute(sql.SQL("ROLLBACK PREPARED {}").format(self._gid))
                return
            self._states[found[0]] = state[2]
            execute(sql.SQL("COMMIT PREPARED {}").format(self._gid))
        else:
            self._states[found[0]] = state[2]
            execute("COMMIT")

    def _transfer(self) -> None:
        one, two = self._chance.sample(self._accounts, 2)
        amount = self._chance.randint(1, 9)
        self._session.execute("UPDATE a SET n = n - %s, pad = repeat('x', %s) WHERE id = %s", (amount, amount, one))
        self._session.execute("UPDATE b SET n = n + %s WHERE id = %s", (amount, two))


class Reader(threading.Thread):
    """Looks at the target until it sees the last version, or is told that nothing more comes."""

    def __init__(self, session: psycopg.Connection) -> None:
        super().__init__(daemon=True)
        self._session = session
        self.over = threading.Event()
        self.seen: list[tuple[int, int, str]] = []

    def run(self) -> None:
        self._session.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        while True:
            last = self.over.is_set()
            with self._session.transaction():
                state = self._session.execute(_STATE.encode()).fetchone()
                assert state is not None and self._session.execute(_STATE.encode()).fetchone() == state
            self.seen.append(state)
            if last:
                return
            time.sleep(0.002)  # the worker is a thread of this process too


def _writers(p: Pair, stack: ExitStack, states: dict[int, str], transactions: int) -> list[Writer]:
    sessions = [stack.enter_context(closing(p.pubdb.connect())) for _ in range(2)]
    prepares = p.sub.two_phase == "p"
    return [Writer(one, states, number, transactions, prepares=prepares) for number, one in enumerate(sessions)]


def _joined(writers: list[Writer]) -> None:
    for writer in writers:
        writer.join(patience.SECONDS)
        assert not writer.is_alive() and writer.error is None, writer.error


def _watched(p: Pair, transactions: int) -> None:
    p.apply(_START)
    first = p.pubdb.rows(_STATE)[0]
    states = {0: first[2]}
    with ExitStack() as stack:
        readers = [Reader(stack.enter_context(closing(p.subdb.connect()))) for _ in range(2)]
        task = p.start()
        for reader in readers:
            reader.start()
        for _ in range(_ROUNDS):
            writers = _writers(p, stack, states, transactions // _ROUNDS)
            for writer in writers:
                writer.start()
            _joined(writers)
            p.until("SELECT v = %s FROM version", max(states), task=task)
            seen = [len(reader.seen) for reader in readers]
            until(lambda seen=seen: all(len(reader.seen) > n + 1 for reader, n in zip(readers, seen, strict=True)))
        for reader in readers:
            reader.over.set()
            reader.join(patience.SECONDS)
            assert not reader.is_alive()
        p.stop(task)
    for reader in readers:
        wrong = [seen for seen in reader.seen if seen[1] != 200 * ACCOUNTS or seen[2] != states[seen[0]]]
        assert not wrong
        versions = [version for version, _, _ in reader.seen]
        assert versions == sorted(versions)
        assert len(set(versions)) > _ROUNDS and versions[-1] == max(states)
    p.same("version", "a", "b", "log")


@pytest.mark.parametrize(
    ("mode", "streaming", "two_phase"),
    [
        ("batched", "off", "d"),
        *long([("batched", "parallel", "p"), ("transactional", "on", "p")]),
        *thorough(
            [
                ("transactional", "parallel", "d"),
                ("batched", "off", "p"),
                ("batched", "on", "d"),
                ("batched", "parallel", "d"),
                ("transactional", "off", "d"),
            ]
        ),
    ],
)
def test_a_reader_sees_states_that_the_publisher_had_in_their_order(
    pair: MakePair, mode: str, streaming: str, two_phase: str
) -> None:
    p = pair(TABLES, apply_mode=mode, streaming=streaming, two_phase=two_phase)
    if streaming != "off":
        p.pubdb.execute(f"ALTER DATABASE {p.pubdb.name} SET debug_logical_replication_streaming = immediate")
    _watched(p, 40)
    p.pubdb.execute("SELECT pg_stat_clear_snapshot()")
    streamed = "SELECT stream_txns > 0 FROM pg_stat_replication_slots WHERE slot_name = %s"
    p.pubdb.wait(streamed, p.sub.slot_name, value=streaming != "off")
    assert p.pubdb.value("SELECT two_phase FROM pg_replication_slots WHERE slot_name = %s", p.sub.slot_name) == (
        two_phase == "p"
    )
    if mode == "transactional":
        commits = p.subdb.value("SELECT count(DISTINCT xmin::text) FROM log")
        assert commits == p.subdb.value("SELECT v FROM version")


@pytest.mark.long
def test_a_crash_of_either_server_leaves_a_state_that_the_publisher_had(
    own_pair: Callable[..., Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    # with streams, prepared transactions and commits that are not flushed under way
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)
    servers = own_pair(
        publisher={"debug_logical_replication_streaming": "immediate"}, target={"wal_writer_delay": "10s"}
    )
    p = Pair(servers.pubdb, servers.subdb, streaming="parallel", two_phase="p", synchronous_commit="off")
    p.ddl(TABLES)
    p.pubdb.execute("CREATE PUBLICATION p FOR ALL TABLES")
    p.subscribe("r", None).apply(_START)
    states = {0: p.pubdb.rows(_STATE)[0][2]}
    for crashed in (servers.target, servers.publisher) * 2:
        task, before = p.start(), p.subdb.value("SELECT v FROM version")
        with ExitStack() as stack:
            writers = _writers(p, stack, states, 25)
            for writer in writers:
                writer.start()
            p.until("SELECT v > %s FROM version", before, task=task)
            if crashed is servers.publisher:
                _joined(writers)  # who lost the reply to a commit would not know the states
            crashed.stop("immediate")
            crashed.start()
            _joined(writers)
        with pytest.raises(PgsubError) as caught:
            task.result()
        assert caught.value.directive is Directive.RETRY
        found = p.subdb.rows(_STATE)[0]
        assert found[2] == states[found[0]]
        p.renew()
    p.apply()
    p.same("version", "a", "b", "log")
    assert p.subdb.value("SELECT v FROM version") == max(states)
    assert p.subdb.value("SELECT count(*) FROM pg_prepared_xacts") == 0
    p.close()


@pytest.mark.parametrize(
    ("kind", "value", "setting"),
    [
        ("timestamptz", "'2020-01-01 12:00+00'::timestamptz + g * interval '1 day'", ("timezone", "Asia/Tokyo")),
        ("bytea", "decode(lpad(to_hex(24929 + g), 4, '0'), 'hex')", ("bytea_output", "escape")),
    ],
    ids=["timestamptz", "bytea"],
)
def test_a_key_has_one_text_in_a_change_set_though_the_publishers_configuration_is_reloaded(
    pair: MakePair, kind: str, value: str, setting: tuple[str, str]
) -> None:
    """Updates of one row that leave different columns alone are different statements, in an order of their own."""
    table = f"CREATE TABLE k (id {kind} PRIMARY KEY, a int, big text); ALTER TABLE k ALTER big SET STORAGE EXTERNAL;"
    p = pair(f"{table} CREATE TABLE other (id int PRIMARY KEY)")
    server = p.pubdb.server
    p.apply(f"INSERT INTO k SELECT {value}, 0, repeat('x', 3000) FROM generate_series(0, 60) g")
    task = p.start()
    p.pubdb.execute("INSERT INTO other VALUES (1)")
    p.until("SELECT count(*) = 1 FROM other", task=task)
    try:
        with closing(p.subdb.connect()) as local:
            local.execute("BEGIN; SELECT FROM pgsub.progress FOR UPDATE")
            p.pubdb.execute("INSERT INTO other VALUES (2)")
            p.subdb.wait("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted")  # what comes now gathers
            p.pubdb.execute("UPDATE k SET a = 1")
            end = p.pubdb.value("SELECT pg_current_wal_lsn()")
            p.pubdb.wait("SELECT sent_lsn >= %s FROM pg_stat_replication WHERE sent_lsn IS NOT NULL", end)
            server.query(f"ALTER SYSTEM SET {setting[0]} = '{setting[1]}'")
            server.reload()
            p.pubdb.execute("UPDATE k SET a = 2, big = 'new' WHERE id = (SELECT min(id) FROM k)")
            p.pubdb.execute("INSERT INTO other VALUES (3)")
            end = p.pubdb.value("SELECT pg_current_wal_lsn()")
            p.pubdb.wait("SELECT sent_lsn >= %s FROM pg_stat_replication WHERE sent_lsn IS NOT NULL", end)
            local.execute("ROLLBACK")
        p.until("SELECT count(*) = 3 FROM other", task=task)
    finally:
        server.query(f"ALTER SYSTEM RESET {setting[0]}")
        server.reload()
    p.stop(task)
    p.same("k")
