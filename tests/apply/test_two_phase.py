"""PREPARE, COMMIT PREPARED and ROLLBACK PREPARED on the target. Mirrors t/021 to t/023_twophase_stream.pl."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from typing import Any

import psycopg
import pytest
from fix_failpoints import At
from fix_pair import MakePair, Pair, elsewhere

from pgsub.apply.execute import executor
from pgsub.apply.worker import skip_rolled_back
from pgsub.commands.status import blocked_state, next_steps
from pgsub.common import failpoints
from pgsub.common.errors import ApplyError, PgsubError, StreamsMustRestart, WrongSystem
from pgsub.launcher.mirror import lock_waits
from pgsub.protocol.lsn import parse_lsn
from pgsub.target.ledger import skip, two_phase_state

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
_GIDS = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() ORDER BY gid"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[str], bool]]:
    """Whether a branch was taken, by the words with which it is noted."""
    with caplog.at_level(logging.DEBUG, logger="pgsub.apply"):
        yield lambda words: any(words in r.getMessage() for r in caplog.records)


@pytest.fixture
def prepared(pair: MakePair) -> Iterator[Callable[..., Pair]]:
    """A pair with two_phase pending; prepared transactions that the test leaves behind are rolled back."""
    made: list[Pair] = []

    def make(ddl: str = TABLE, **options: Any) -> Pair:
        made.append(pair(ddl, two_phase="p", **options))
        return made[-1]

    yield make
    for one in made:
        for database in (one.pubdb, one.subdb):
            for (gid,) in database.rows(_GIDS):
                database.execute(f"ROLLBACK PREPARED '{gid}'")


def _ledger(p: Pair) -> tuple[int, int]:
    """Rows of markers that can be seen, and of prepared transactions in the ledger."""
    [(markers, listed)] = p.subdb.rows(
        "SELECT (SELECT count(*) FROM pgsub.prepared_xact), (SELECT count(*) FROM pgsub.prepared_pending)"
    )
    return int(markers), int(listed)


def test_a_prepared_transaction_is_prepared_here_and_ends_as_on_the_publisher(prepared: Callable[..., Pair]) -> None:
    p = prepared()
    p.apply("BEGIN; INSERT INTO t VALUES (1, 'a'); PREPARE TRANSACTION 'one'")
    p.apply("BEGIN; INSERT INTO t VALUES (2, 'b'); PREPARE TRANSACTION 'two'")
    gids = [gid for (gid,) in p.subdb.rows(_GIDS)]
    assert len(gids) == 2 and all(gid.startswith(f"pgsub_{p.subid}_") for gid in gids)
    assert p.subdb.value("SELECT count(*) FROM t") == 0 and _ledger(p) == (0, 2)
    p.apply("INSERT INTO t VALUES (3, 'meanwhile')", "COMMIT PREPARED 'one'", "ROLLBACK PREPARED 'two'")
    p.same("t")
    assert p.subdb.rows("SELECT id FROM t ORDER BY id") == [(1,), (3,)]
    assert p.subdb.rows(_GIDS) == [] and _ledger(p) == (0, 0)


@pytest.mark.parametrize("streaming", ["off", "on", "parallel"])
def test_a_prepared_transaction_that_was_streamed_is_prepared_whole(
    prepared: Callable[..., Pair], streaming: str, said: Callable[[str], bool]
) -> None:
    p = prepared(streaming=streaming)
    p.pubdb.execute(f"ALTER DATABASE {p.pubdb.name} SET debug_logical_replication_streaming = immediate")
    task = p.start()
    for gid, rows in (("kept", (1, 200)), ("gone", (301, 500))):
        p.pubdb.execute(
            f"BEGIN; INSERT INTO t SELECT g, 'x' FROM generate_series({rows[0]}, {rows[1]}) g;"
            f" SAVEPOINT a; DELETE FROM t; ROLLBACK TO a; UPDATE t SET v = 'y' WHERE id % 2 = 0;"
            f" PREPARE TRANSACTION '{gid}'"
        )
    p.until(f"SELECT count(*) FROM ({_GIDS}) AS x", value=2, task=task)
    p.until("SELECT count(*) FROM pgsub.prepared_pending", value=2, task=task)
    p.pubdb.execute("COMMIT PREPARED 'kept'")
    p.pubdb.execute("ROLLBACK PREPARED 'gone'")
    p.until("SELECT count(*) FROM pgsub.prepared_pending", value=0, task=task)
    p.stop(task)
    p.same("t")
    assert p.subdb.value("SELECT count(*) FROM t") == 200
    assert not said("replayed")


_STEPS = (
    "apply.before_prepare",
    "apply.after_prepare",
    "apply.before_target_commit",
    "apply.before_finish_prepared",
    "apply.after_finish_prepared",
)


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("step", _STEPS)
def test_a_worker_that_ends_at_any_step_is_followed_by_one_that_finds_what_it_did(
    prepared: Callable[..., Pair],
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[[str], bool],
    reached: Callable[[str], None],
    step: str,
    end: str,
) -> None:
    p = prepared(pub="INSERT INTO t VALUES (9, 'only there')")
    p.apply("INSERT INTO t VALUES (1, 'before')")
    for number, statement in enumerate(
        (
            "BEGIN; INSERT INTO t VALUES (2, 'x'); DELETE FROM t WHERE id = 9; PREPARE TRANSACTION 'x'",
            f"{end} PREPARED 'x'",
        )
    ):
        p.pubdb.execute(statement)
        with monkeypatch.context() as patch:
            patch.setenv("PGSUB_FAILPOINTS", f"{step}=error")
            patch.setattr(failpoints, "_counts", {})
            stops = (number == 1) if "finish" in step else (number == 0 or step == "apply.before_target_commit")
            with pytest.raises(PgsubError, match=step) if stops else nullcontext():
                p.catch_up()
        p.apply()
        assert len(p.subdb.rows(_GIDS)) == 1 - number
    p.same("(SELECT * FROM t WHERE id < 9)")
    assert p.subdb.rows(_GIDS) == [] and _ledger(p) == (0, 0)
    assert [event["conflict_type"] for event in p.events()] == ["delete_missing"]
    if step == "apply.after_prepare":
        assert said("prepared again")
        reached("PREPARE sent again: prepared anew")
    if step == "apply.after_finish_prepared":
        assert said("found done")
        reached("COMMIT PREPARED sent again")


def test_a_transaction_prepared_before_two_phase_was_enabled_comes_with_its_commit(
    prepared: Callable[..., Pair],
    at: At,
    said: Callable[[str], bool],
    reached: Callable[[str], None],
) -> None:
    p = prepared()
    p.session.execute("UPDATE pgsub.subscription SET two_phase = 'd'")
    p.apply("BEGIN; INSERT INTO t VALUES (1, 'old'); PREPARE TRANSACTION 'old'", "INSERT INTO t VALUES (2, 'later')")
    two_phase_state.ask_for(p.session, p.subid)
    p.apply("INSERT INTO t VALUES (3, 'enabled')")
    assert two_phase_state.state(p.session, p.subid) == "e" and p.subdb.rows(_GIDS) == []
    p.pubdb.execute("COMMIT PREPARED 'old'")
    at("apply.before_finish_prepared=error")
    with pytest.raises(PgsubError):
        p.catch_up()
    assert len(p.subdb.rows(_GIDS)) == 1
    before = p.progress()[0]
    p.apply()
    assert said("sent again: found")
    reached("PREPARE sent again: found")
    reached("prepared before two_phase was enabled")
    assert p.progress()[0] > before
    p.same("t")


def test_a_commit_of_a_transaction_that_was_never_prepared_here_is_passed_over(
    prepared: Callable[..., Pair], said: Callable[[str], bool], reached: Callable[[str], None]
) -> None:
    """Some publishers send it for transactions that only took locks."""
    p = prepared("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE other (id int)", names=[("public", "t")])
    p.apply("INSERT INTO t VALUES (1, 'x')")
    p.apply("BEGIN; SELECT FROM t FOR UPDATE; PREPARE TRANSACTION 'locks'", "COMMIT PREPARED 'locks'")
    if not said("never prepared"):  # publishers that were mended since: the ledger's list as if it had been so
        p.pubdb.execute("BEGIN; INSERT INTO other VALUES (1); PREPARE TRANSACTION 'x'")
        p.apply()
        [(gid,)] = p.subdb.rows(_GIDS)
        p.subdb.execute(f"ROLLBACK PREPARED '{gid}'")
        p.subdb.execute("DELETE FROM pgsub.prepared_pending")
        p.apply("COMMIT PREPARED 'x'")
    assert said("never prepared")
    p.apply("INSERT INTO t VALUES (2, 'y')")
    p.same("t")
    assert _ledger(p) == (0, 0)
    reached("COMMIT PREPARED without PREPARE")


def test_an_empty_prepared_transaction_has_something_to_commit(prepared: Callable[..., Pair]) -> None:
    p = prepared("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE other (id int)", names=[("public", "t")])
    p.apply("BEGIN; INSERT INTO other VALUES (1); PREPARE TRANSACTION 'x'")
    assert len(p.subdb.rows(_GIDS)) == 1
    p.apply("COMMIT PREPARED 'x'")
    assert p.subdb.value("SELECT count(*) FROM other") == 0 and _ledger(p) == (0, 0)


@pytest.mark.parametrize(("end", "by_hand"), [("COMMIT", "ROLLBACK"), ("ROLLBACK", "COMMIT")])
def test_a_prepared_transaction_that_somebody_ended_the_other_way_is_told(
    prepared: Callable[..., Pair], end: str, by_hand: str
) -> None:
    p = prepared()
    p.apply("BEGIN; INSERT INTO t VALUES (1, 'x'); PREPARE TRANSACTION 'x'")
    [(gid,)] = p.subdb.rows(_GIDS)
    p.subdb.execute(f"{by_hand} PREPARED '{gid}'")
    p.pubdb.execute(f"{end} PREPARED 'x'")
    with pytest.raises(ApplyError) as caught:
        p.catch_up()
    assert gid in caught.value.message and caught.value.hint is not None
    p.subdb.execute(caught.value.hint.splitlines()[-1])
    p.apply()
    assert _ledger(p) == (0, 0)


def test_a_prepared_transaction_that_somebody_ended_the_same_way_is_found_done(
    prepared: Callable[..., Pair], said: Callable[[str], bool]
) -> None:
    p = prepared()
    p.apply("BEGIN; INSERT INTO t VALUES (1, 'x'); PREPARE TRANSACTION 'x'")
    [(gid,)] = p.subdb.rows(_GIDS)
    p.subdb.execute(f"COMMIT PREPARED '{gid}'")
    p.apply("COMMIT PREPARED 'x'")
    p.same("t")
    assert said("found done") and _ledger(p) == (0, 0)


def test_a_name_that_somebody_took_between_a_crash_and_the_recovery_stops_apply_and_stays_theirs(
    prepared: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = prepared("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE theirs (id int)", names=[("public", "t")])
    p.pubdb.execute("BEGIN; INSERT INTO t VALUES (1, 'x'); PREPARE TRANSACTION 'x'")
    with monkeypatch.context() as patch:
        patch.setenv("PGSUB_FAILPOINTS", "apply.after_prepare=error")
        patch.setattr(failpoints, "_counts", {})
        with pytest.raises(PgsubError, match=r"apply\.after_prepare"):
            p.catch_up()
    [(gid,)] = p.subdb.rows(_GIDS)
    # the same role, with another purpose
    p.subdb.execute(f"ROLLBACK PREPARED '{gid}'")
    p.subdb.execute(f"BEGIN; INSERT INTO theirs VALUES (1); PREPARE TRANSACTION '{gid}'")
    with pytest.raises(ApplyError, match="already in use") as caught:
        p.catch_up()
    assert f'in database "{p.subdb.name}"' in str(caught.value.detail) and gid in str(caught.value.hint)
    assert p.subdb.rows(_GIDS) == [(gid,)]
    p.subdb.execute(f"COMMIT PREPARED '{gid}'")
    p.apply("COMMIT PREPARED 'x'")
    p.same("t")
    assert p.subdb.rows("SELECT id FROM theirs") == [(1,)] and _ledger(p) == (0, 0)


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_a_name_that_somebody_took_over_from_a_prepared_transaction_is_never_ended_by_apply(
    prepared: Callable[..., Pair], end: str
) -> None:
    p = prepared("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE theirs (id int)", names=[("public", "t")])
    p.apply("BEGIN; INSERT INTO t VALUES (1, 'x'); PREPARE TRANSACTION 'x'")
    [(gid,)] = p.subdb.rows(_GIDS)
    p.subdb.execute(f"{'ROLLBACK' if end == 'COMMIT' else 'COMMIT'} PREPARED '{gid}'")
    p.subdb.execute(f"BEGIN; INSERT INTO theirs VALUES (1); PREPARE TRANSACTION '{gid}'")
    p.pubdb.execute(f"{end} PREPARED 'x'")
    with pytest.raises(ApplyError, match=r"(rolled back|committed) on the target"):
        p.catch_up()
    assert p.subdb.rows(_GIDS) == [(gid,)] and p.subdb.value("SELECT count(*) FROM theirs") == 0


def test_a_fault_in_a_prepared_transaction_is_named_with_its_prepare_lsn(prepared: Callable[..., Pair]) -> None:
    p = prepared(sub="INSERT INTO t VALUES (1, 'here already')")
    p.apply("INSERT INTO t VALUES (2, 'x')")
    p.pubdb.execute("BEGIN; INSERT INTO t VALUES (3, 'x'), (1, 'x'); PREPARE TRANSACTION 'x'")
    with pytest.raises(ApplyError) as caught:
        p.catch_up()
    assert caught.value.conflict == "insert_exists" and caught.value.relation == "public.t"
    assert caught.value.finish_lsn is not None and parse_lsn(caught.value.finish_lsn) > p.progress()[0]
    assert p.subdb.rows(_GIDS) == []
    p.subdb.execute("DELETE FROM t WHERE id = 1")
    p.apply("COMMIT PREPARED 'x'")
    p.same("t")


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_a_change_that_waits_for_what_its_subscription_has_prepared_is_told_and_goes_on_once_that_is_ended(
    prepared: Callable[..., Pair], end: str
) -> None:
    rule = "insert_exists=apply_remote"
    p = prepared("CREATE TABLE t (id int PRIMARY KEY, u text UNIQUE)", on_conflict=(rule,))
    p.subdb.execute("INSERT INTO t VALUES (5, 'x')")  # deleted by the rule, and locked on the target only
    p.apply("BEGIN; INSERT INTO t VALUES (1, 'x'); PREPARE TRANSACTION 'x'")
    [(gid,)] = p.subdb.rows(_GIDS)
    p.pubdb.execute("INSERT INTO t VALUES (5, 'y')")
    task = p.start()
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    p.until(waits, value=1, task=task)
    found = blocked_state.own_prepared({"for": lock_waits.locks(p.session, p.subid)["apply"]})
    assert found is not None and found[0] == gid
    assert p.pubdb.rows(next_steps.STATUS_OF_XID.format(xid=found[1])) == [("in progress", "x")]
    p.pubdb.execute(f"{end} PREPARED 'x'")
    status = "committed" if end == "COMMIT" else "aborted"
    assert p.pubdb.rows(next_steps.STATUS_OF_XID.format(xid=found[1])) == [(status, None)]
    p.subdb.execute(f"{end} PREPARED '{gid}'")
    p.until("SELECT count(*) FROM pgsub.prepared_pending", value=0, task=task)
    p.stop(task)
    p.same("t")


def test_a_prepared_transaction_keeps_nobody_else_waiting(prepared: Callable[..., Pair]) -> None:
    p = prepared()
    task = p.start()
    with closing(p.pubdb.connect()) as session:
        session.execute("BEGIN; INSERT INTO t VALUES (1, 'x'); PREPARE TRANSACTION 'x'")
        p.until("SELECT count(*) FROM pgsub.prepared_pending", value=1, task=task)
        for number in range(2, 12):
            session.execute(f"INSERT INTO t VALUES ({number}, 'x')".encode())
        p.until("SELECT count(*) = 10 FROM t", task=task)
        session.execute("COMMIT PREPARED 'x'")
    p.until("SELECT count(*) = 11 FROM t", task=task)
    p.stop(task)


def test_feedback_waits_for_all_rows_that_were_missing_in_a_prepared_transaction(
    prepared: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "RECORDS", 3)
    p = prepared()
    p.apply("INSERT INTO t SELECT generate_series(1, 600)")  # more than a round trip
    p.subdb.execute("TRUNCATE t")
    task = p.start()
    p.pubdb.execute("BEGIN; UPDATE t SET v = 'x'; PREPARE TRANSACTION 'missing'")
    p.until("SELECT count(*) = 1 FROM pgsub.prepared_pending", task=task)
    p.until("DELETE FROM pgsub.event RETURNING true", task=task)  # as the launcher does
    p.until("SELECT reported_lsn >= remote_lsn FROM pgsub.progress WHERE worker = 0", task=task)
    p.pubdb.execute("COMMIT PREPARED 'missing'")
    p.until("SELECT count(*) = 0 FROM pgsub.prepared_pending", task=task)
    assert len(p.events()) > 3
    at = p.progress()[0]
    p.pubdb.execute("INSERT INTO t VALUES (1000, 'later')")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    p.until("SELECT pg_sleep(0.3) IS NOT NULL", task=task)
    assert p.progress()[1] < at and p.confirmed() < at
    p.subdb.execute("DELETE FROM pgsub.event")
    p.until("SELECT reported_lsn >= remote_lsn FROM pgsub.progress WHERE worker = 0", task=task)
    p.stop(task)


def test_a_prepared_transaction_that_was_rolled_back_before_it_was_decoded_stops_nothing(
    prepared: Callable[..., Pair],
) -> None:
    """It comes with holes (a fault of PostgreSQL 18's), and its ROLLBACK PREPARED would never be read."""
    p = prepared(streaming="on")
    p.pubdb.execute(f"ALTER DATABASE {p.pubdb.name} SET logical_decoding_work_mem = '64kB'")
    p.apply("INSERT INTO t SELECT g, 'x' FROM generate_series(1, 20) g")
    p.apply()  # two_phase is enabled now
    for statement in (
        "BEGIN; DELETE FROM t WHERE id = 1; INSERT INTO t SELECT g, repeat('y', 500) FROM generate_series(100, 1100) g;"
        "SAVEPOINT s; INSERT INTO t VALUES (1, 'again'); RELEASE SAVEPOINT s; PREPARE TRANSACTION 'holes'",
        "ROLLBACK PREPARED 'holes'",
        "INSERT INTO t VALUES (50, 'after')",
    ):
        p.pubdb.execute(statement)
    with suppress(StreamsMustRestart):  # where it stops apply: that is started again, as by the launcher
        p.apply()
    p.apply()
    p.same("t")
    assert p.subdb.rows(_GIDS) == [] and _ledger(p) == (0, 0)
    assert p.subdb.value("SELECT count(*) FROM pgsub.skipped_change") == 0


def test_another_server_does_not_say_that_a_transaction_was_rolled_back(pair: MakePair) -> None:
    p = pair(TABLE)
    p.apply("INSERT INTO t VALUES (1, 'a')")
    with elsewhere(p, TABLE) as there, psycopg.connect(there.conninfo) as session:
        xid = session.execute("SELECT pg_current_xact_id()::text").fetchone()
        session.rollback()
        assert xid is not None
        error = ApplyError("it failed")
        error.xid, error.finish_lsn, error.relation = int(xid[0]), "0/10", "public.t"
        with pytest.raises(WrongSystem):
            skip_rolled_back.leaves_out(p.sub, error)
    assert skip.pending(p.session, p.sub.subid) is None
