"""A publisher whose files were put back is told by its WAL, and no publisher that is what it was is taken for one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from apply.test_held import hold, release
from embedded import Server
from fix_failpoints import At
from fix_pair import MakePair, Pair
from fix_servers import Database

from pgsub.apply import verified_publisher
from pgsub.apply.worker import feedback, start
from pgsub.common.errors import PgsubError, TargetUnavailable, WrongSystem
from pgsub.protocol.lsn import format_lsn
from pgsub.protocol.wal_records import Unreadable
from pgsub.publisher import wal_reader
from pgsub.publisher.connect import connect
from pgsub.target.ledger import publisher_record

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
_ROWS = "INSERT INTO t SELECT g, 'x' FROM generate_series({}, {}) g"
_PREPARED = "BEGIN; INSERT INTO t VALUES (7, 'x'); PREPARE TRANSACTION '{}'"
_MANY = "SELECT format('CREATE TABLE many.m%s (i int PRIMARY KEY)', i) FROM generate_series(1, 25) i"

Looks = list[Any]


def _each(query: str) -> str:
    """Run each line of a query."""
    return f"DO $$ DECLARE line text; BEGIN FOR line IN {query} LOOP EXECUTE line; END LOOP; END $$"


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """What workers find in the publisher's WAL, who look there at every start."""
    found: Looks = []
    of_start, has = start._slot, verified_publisher._has_transaction

    def slot(*words: Any) -> Any:
        state = of_start(*words)
        return state and replace(state, confirmed_flush_lsn=0, restart_lsn=0)

    def look(*words: Any) -> bool:
        try:
            found.append(has(*words))
        except Exception as error:
            found.append(error)
            raise
        return bool(found[-1])

    monkeypatch.setattr(start, "_slot", slot)
    monkeypatch.setattr(verified_publisher, "_has_transaction", look)
    return found


def ended(p: Pair) -> int | None:
    """The time of the last transaction in the ledger."""
    return publisher_record.commit_time(p.session, p.subid, 0, p.progress()[0])


def in_wal(p: Pair, lsn: int, time: int) -> bool:
    """Whether the publisher's WAL has a transaction that ended so."""
    with closing(connect(p.pubdb.conninfo, application_name="x", replication=True)) as connection:
        return wal_reader.has_transaction(connection, lsn, time, 0)


def from_elsewhere(p: Pair) -> str:
    """A transaction with the time of an origin."""
    name = f"elsewhere{p.subid}"
    return (
        f"SELECT pg_replication_origin_create('{name}'); SELECT pg_replication_origin_session_setup('{name}'); BEGIN;"
        " SELECT pg_replication_origin_xact_setup('0/10', '2001-02-03 04:05:06.789'); INSERT INTO t VALUES (1, 'x');"
        " COMMIT; SELECT pg_replication_origin_session_reset()"
    )


#: What is done on the publisher, one transaction after the other.
ENDINGS: dict[str, Callable[[Pair], list[str]]] = {
    "a row": lambda p: ["INSERT INTO t VALUES (1, 'x')"],
    "several in one commit of the target": lambda p: [_ROWS.format(i, i) for i in range(20)],
    "a large row": lambda p: ["INSERT INTO t VALUES (1, repeat(md5('x'), 3000))"],
    "subtransactions": lambda p: [
        "DO $$ BEGIN FOR i IN 1..300 LOOP BEGIN INSERT INTO t VALUES (i); EXCEPTION WHEN unique_violation THEN END;"
        " END LOOP; END $$"
    ],
    "a record of several pages": lambda p: [
        "CREATE SCHEMA many",
        f"BEGIN; {_ROWS.format(1, 9)}; {_each(_MANY)}; COMMIT",
    ],
    "nothing that is published": lambda p: [_ROWS.format(1, 3), "CREATE TABLE IF NOT EXISTS u (i int)"],
    "truncated": lambda p: [_ROWS.format(1, 3), "TRUNCATE t"],
    "at the end of a segment": lambda p: [_ROWS.format(1, 3), "SELECT pg_switch_wal()", _ROWS.format(4, 5)],
    "before a new segment": lambda p: [_ROWS.format(1, 3), "SELECT pg_switch_wal()"],
    "from elsewhere": lambda p: [from_elsewhere(p)],
}


@pytest.mark.publishers(long=True)
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_transaction_is_found_however_it_ended(pair: MakePair, looks: Looks, ending: str) -> None:
    p = pair(TABLE)
    p.apply(*ENDINGS[ending](p))
    p.apply()
    assert looks == [True]
    lsn, time = p.progress()[0], ended(p)
    assert time is not None and not in_wal(p, lsn, time + 1) and not in_wal(p, lsn - 8, time)


@pytest.mark.parametrize("streaming", ["on", "parallel"])
def test_a_streamed_transaction_is_found(pair: MakePair, looks: Looks, streaming: str) -> None:
    p = pair(TABLE, streaming=streaming)
    p.pubdb.execute(f"ALTER DATABASE {p.pubdb.name} SET debug_logical_replication_streaming = immediate")
    p.apply(f"BEGIN; {_ROWS.format(1, 300)}; SAVEPOINT a; DELETE FROM t; ROLLBACK TO a; COMMIT")
    p.apply()
    assert looks == [True]


@pytest.mark.publishers(long=True)
@pytest.mark.since(15)
def test_every_step_of_a_prepared_transaction_is_found(pair: MakePair, looks: Looks) -> None:
    p = pair(TABLE, two_phase="p")
    p.apply("INSERT INTO t VALUES (1, 'x')")
    for end in ("COMMIT", "ROLLBACK"):
        gid = f"{p.pubdb.name}_{end}"
        p.apply("DELETE FROM t WHERE id = 7")
        for statement in (_PREPARED.format(gid), f"{end} PREPARED '{gid}'"):
            before = p.progress()[0]
            p.apply(statement)
            assert p.progress()[0] > before
            p.apply()
    assert len(looks) > 8 and set(looks) == {True}


def test_units_of_several_sessions_are_found(pair: MakePair, looks: Looks) -> None:
    p = pair(TABLE, apply_workers=4)
    p.apply(*[_ROWS.format(10 * i, 10 * i + 9) for i in range(50)])
    p.apply()
    assert looks == [True]


def test_held_changes_that_are_released_leave_the_time_of_the_last_transaction(pair: MakePair, looks: Looks) -> None:
    p = pair(f"{TABLE}; CREATE TABLE other (id int)")
    hold(p, "t")
    p.apply("INSERT INTO t VALUES (1, 'held')", "INSERT INTO other VALUES (1)")
    lsn, time = p.progress()[0], ended(p)
    release(p, "t")
    p.apply()
    p.same("t")
    assert (p.progress()[0], ended(p)) == (lsn, time)
    p.apply()
    assert looks == [True] * 2


def test_a_worker_that_ended_before_it_reported_is_followed_by_one_that_finds_its_transaction(
    pair: MakePair, at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = pair(TABLE)
    found: list[bool] = []
    has = verified_publisher._has_transaction
    monkeypatch.setattr(verified_publisher, "_has_transaction", lambda *a: found.append(has(*a)) or found[-1])
    p.apply("INSERT INTO t VALUES (1, 'x')")
    p.apply()
    assert found == []  # the slot says as much
    at("apply.after_target_commit=error")
    with pytest.raises(TargetUnavailable):
        p.apply("INSERT INTO t VALUES (2, 'x')")
    at("")
    p.apply("INSERT INTO t VALUES (3, 'x')")
    assert found == [True]
    p.same("t")


def spoiled(p: Pair) -> None:
    """The ledger has a transaction that the publisher does not have."""
    p.session.execute("UPDATE pgsub.progress SET remote_commit_ts = remote_commit_ts + '1 us'")


def test_a_transaction_that_the_wal_does_not_have_stops_apply_with_what_to_do(pair: MakePair, looks: Looks) -> None:
    p = pair(TABLE)
    p.apply("INSERT INTO t VALUES (1, 'x')", "INSERT INTO t VALUES (2, 'x')")
    spoiled(p)
    p.pubdb.execute("INSERT INTO t VALUES (3, 'x')")
    with pytest.raises(WrongSystem, match="does not have the subscription's last transaction") as refused:
        p.catch_up()
    error = refused.value
    assert error.diverged and not error.elsewhere and error.exit_code == 7
    assert format_lsn(p.progress()[0]) in (error.detail or "") and f"pgsub reconcile {p.sub.name}" in (error.hint or "")
    assert p.subdb.value("SELECT count(*) FROM t") == 2


def test_a_position_that_somebody_advanced_is_that_of_no_transaction(pair: MakePair, looks: Looks) -> None:
    p = pair(TABLE)
    p.apply("INSERT INTO t VALUES (1, 'x')")
    p.session.execute("UPDATE pgsub.progress SET remote_commit_ts = NULL")
    assert ended(p) is None
    p.apply("INSERT INTO t VALUES (2, 'x')")
    assert looks == [] and ended(p) is not None


def test_a_publisher_without_a_further_walsender_is_gone_on_with(
    make_server: Callable[..., Server], subdb: Database, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)
    source = Database(make_server(max_wal_senders=1), "narrow")
    free = "SELECT count(*) = 0 FROM pg_stat_replication"
    for database in (source, subdb):
        database.execute(TABLE)
    source.execute("CREATE PUBLICATION p FOR ALL TABLES")
    with closing(Pair(source, subdb).subscribe("r", None)) as p:
        for number in range(3):
            source.wait(free)
            p.apply(f"INSERT INTO t VALUES ({number}, 'x')")
            spoiled(p)
        p.same("t")
    assert len(looks) == 2 and all("max_wal_senders" in str(one) for one in looks)
    source.close()


@pytest.mark.parametrize("why", ["another server", "removed"])
def test_wal_that_is_not_to_be_had_proves_nothing(
    pair: MakePair, looks: Looks, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    p = pair(TABLE)
    p.apply("INSERT INTO t VALUES (1, 'x')", "INSERT INTO t VALUES (2, 'x')")
    spoiled(p)
    if why == "removed":
        has = wal_reader.has_transaction
        monkeypatch.setattr(wal_reader, "has_transaction", lambda connection, *_: has(connection, 1 << 20, 0, 0))
    else:
        monkeypatch.setattr(wal_reader, "same_server", lambda *_: False)
    p.apply("INSERT INTO t VALUES (3, 'x')")
    assert isinstance(looks[0], Unreadable) and ("removed" if why == "removed" else "another") in str(looks[0])
    p.same("t")


def test_the_first_feedback_names_nothing_that_is_still_to_be_applied(pair: MakePair) -> None:
    p = pair(TABLE)
    p.apply("INSERT INTO t VALUES (1, 'x')")
    p.pubdb.execute("INSERT INTO t VALUES (2, 'of the new history')")
    # the former history went on without anything for the subscription, which was reported
    p.subdb.execute("UPDATE pgsub.progress SET reported_lsn = %s WHERE worker = 0", format_lsn(p.published()))
    with closing(p.subdb.connect()) as holder, holder.transaction():
        holder.execute("LOCK TABLE t")
        task = p.start()
        p.until("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)", task=task)
        p.pubdb.wait("SELECT flush_lsn IS NOT NULL FROM pg_stat_replication WHERE application_name = %s", p.sub.name)
        holder.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE NOT granted")
        with pytest.raises(PgsubError):
            task.result(100)
    assert p.catch_up().outcome == "reached"
    p.same("t")
    assert p.confirmed() == p.progress()[1]
