"""Small tables are copied together: one slot, one snapshot, one task; what happens to one of them is nobody else's."""

from __future__ import annotations

import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgsub.apply.worker import worker
from pgsub.common.errors import ApplyError, Fenced, PgsubError, TargetUnavailable
from pgsub.tablesync import copy_pool, sync_slots
from pgsub.tablesync.context import SyncContext
from pgsub.tablesync.coordinator import TableSync
from pgsub.tablesync.copy import preparation
from pgsub.target.ledger import worker_takeover

if TYPE_CHECKING:
    from fix_engine import Task
    from fix_failpoints import At
from fix_pair import MakePair, Pair
from fix_program import until

NAMES = ("a", "b", "c", "d")
TABLES = "; ".join(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)" for name in NAMES)
ROWS = "; ".join(f"INSERT INTO {name} SELECT g, '{name}' || g FROM generate_series(1, 300) g" for name in NAMES)


def _slots(p: Pair) -> list[str]:
    query = "SELECT slot_name FROM pg_replication_slots WHERE slot_name ~ '_sync_' ORDER BY 1"
    return [name for (name,) in p.pubdb.rows(query)]


def _jobs(p: Pair) -> list[str]:
    """Names of the jobs that are submitted from now on."""
    names: list[str] = []
    submit = p.submit
    p.submit = lambda name, *rest: (names.append(name), submit(name, *rest))[1]  # type: ignore[method-assign, misc]
    return names


def _together(p: Pair) -> dict[str, PgsubError]:
    names = {p.relid(name): name for name in NAMES}
    return {names[relid]: error for relid, error in p.try_sync(*names).items()}


def _states(p: Pair) -> str:
    return "".join(p.state(name) for name in NAMES)


def _ends_well(p: Pair) -> None:
    for name in NAMES:
        if p.state(name) not in "sr" or _slots(p):
            p.sync(name)
    assert set(_states(p)) <= {"s", "r"} and _slots(p) == []
    assert p.subdb.value("SELECT count(*) FROM pgsub.copy_chunk") == 0
    p.apply()
    p.same(*NAMES)
    p.apply(*[f"UPDATE {n} SET v = 'streamed' WHERE id = 3; INSERT INTO {n} VALUES (4000, 'streamed')" for n in NAMES])
    p.same(*NAMES)
    assert _states(p) == "rrrr" and p.events() == []


def _paused_copy(p: Pair, at: At, gate: Path) -> Task:
    """The tables are being copied; it goes on when the file is made."""
    at(f"copy.middle=pause:{gate}@2")
    task = p.submit("sync", lambda _: _together(p), [None])
    p.until("SELECT count(xid) = 1 FROM pgsub.copy_chunk")
    return task


def test_beside_the_copies_a_group_costs_the_same_however_many_tables_it_has(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = ("a", "b"), ("c", "d", "e", "f", "g", "h", "i", "j")
    p = pair("; ".join(f"CREATE TABLE {name} (id int PRIMARY KEY)" for name in (*few, *many)), state="i")
    here, execute, statements = threading.get_ident(), psycopg.Connection.execute, 0

    def counted(self: psycopg.Connection, *args: Any, **more: Any) -> Any:
        nonlocal statements
        statements += threading.get_ident() == here
        return execute(self, *args, **more)

    monkeypatch.setattr(psycopg.Connection, "execute", counted)
    costs = []
    for relids in [[p.relid(name) for name in names] for names in (few, many)]:
        statements = 0
        assert p.try_sync(*relids) == {}
        costs.append(statements)
    assert 0 < costs[1] <= costs[0] + 3


def test_tables_copied_together_take_one_slot_and_one_task(pair: MakePair) -> None:
    p = pair(TABLES, pub=ROWS, state="i")
    jobs = _jobs(p)
    assert _together(p) == {}
    assert _states(p) == "ssss"
    assert jobs == ["copy a and 3 more"]
    assert len(set(p.subdb.rows("SELECT srsublsn FROM pgsub.subscription_rel"))) == 1
    _ends_well(p)


def test_apply_waits_at_their_changes_so_that_nothing_need_be_streamed(pair: MakePair, at: At, tmp_path: Path) -> None:
    p = pair(TABLES + "; CREATE TABLE other (id int PRIMARY KEY)", pub=ROWS, state="i")
    p.sync("other")
    jobs, gate = _jobs(p), tmp_path / "gate"
    sync = _paused_copy(p, at, gate)
    apply = p.start()
    p.pubdb.execute("INSERT INTO other VALUES (1)")
    p.until("SELECT count(*) = 1 FROM other", task=apply)  # apply is beyond the slot's consistent point
    p.pubdb.execute("INSERT INTO a VALUES (1001, 'beyond'); INSERT INTO d VALUES (1001, 'beyond')")
    p.pubdb.execute("INSERT INTO other VALUES (2)")
    gate.touch()
    assert sync.result() == [{}]
    assert not any(name.startswith("catch up") for name in jobs)
    p.until("SELECT count(*) = 2 FROM other", task=apply)
    p.stop(apply)
    _ends_well(p)


def _passed(p: Pair, at: At) -> None:
    """The tables are copied and apply has passed changes of all of them."""
    at("sync.after_f=error")
    with pytest.raises(TargetUnavailable):
        _together(p)
    at("")
    p.session.execute("UPDATE pgsub.subscription_rel SET handover_lsn = NULL")
    p.apply(*[f"INSERT INTO {n} VALUES (1001, 'passed'); UPDATE {n} SET v = 'more' WHERE id < 20" for n in NAMES])
    assert _states(p) == "ffff"


def test_where_apply_lost_its_patience_the_tables_catch_up_together(
    pair: MakePair, at: At, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "CLAIM_PATIENCE", 0.0)
    p = pair(TABLES, pub=ROWS, state="i")
    jobs, gate = _jobs(p), tmp_path / "gate"
    sync = _paused_copy(p, at, gate)
    apply = p.start()
    p.pubdb.execute("INSERT INTO a VALUES (1001, 'a'); INSERT INTO b VALUES (1001, 'b')")
    p.pubdb.execute("UPDATE a SET v = 'more' WHERE id < 20")
    p.until("SELECT remote_lsn > (SELECT min(remote_lsn) FROM pgsub.progress WHERE worker <> 0)"
            " FROM pgsub.progress WHERE worker = 0", task=apply)  # fmt: skip
    gate.touch()
    assert sync.result() == [{}]
    assert [name for name in jobs if name.startswith("catch up")] == [
        "catch up a and 1 more"
    ]  # c and d kept their claims
    assert set(_states(p)) <= {"s", "r"} and _slots(p) == []
    p.stop(apply)
    _ends_well(p)


def test_a_table_of_a_group_catches_up_alone_without_moving_the_slot_of_the_others(pair: MakePair, at: At) -> None:
    p = pair(TABLES, pub=ROWS, state="i")
    _passed(p, at)
    [shared] = _slots(p)
    where = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
    before = p.pubdb.value(where, shared)
    assert p.try_sync(p.relid("a"), p.relid("b")) == {}
    assert p.state("a") == p.state("b") == "s"
    assert _slots(p) == [shared] and p.pubdb.value(where, shared) == before
    _ends_well(p)


def test_a_server_that_is_gone_is_not_tried_for_each_table_of_a_group(pair: MakePair, at: At) -> None:
    p = pair(TABLES, pub=ROWS, state="i")
    _passed(p, at)
    at("sync.before_separation=error@1")
    errors = p.try_sync(*map(p.relid, NAMES[:3]))  # the fourth needs the slot, so each gets one of its own
    assert list(errors) == [p.relid("a")] and isinstance(errors[p.relid("a")], TargetUnavailable)
    assert _states(p) == "ffff"
    at("")
    _ends_well(p)


def test_tables_that_were_interrupted_while_they_caught_up_together_go_on_in_any_way(pair: MakePair, at: At) -> None:
    p = pair(TABLES, pub=ROWS, state="i")
    _passed(p, at)
    [shared] = _slots(p)
    at("sync.before_s=error")
    with pytest.raises(TargetUnavailable):
        _together(p)
    at("")
    assert _states(p) == "ffff"
    copied = "SELECT count(DISTINCT remote_lsn) = 1 FROM pgsub.progress WHERE worker <> 0"
    assert p.subdb.value(copied), "their progress is one"
    p.session.execute("UPDATE pgsub.subscription_rel SET handover_lsn = NULL")
    p.apply(*[f"INSERT INTO {n} VALUES (1002, 'passed, too')" for n in NAMES])
    p.sync("c")  # on a copy of a slot that was streamed
    assert p.state("c") == "s" and _slots(p) == [shared]
    _ends_well(p)


def test_apply_takes_back_the_claim_of_one_table_and_the_others_change_hands(
    pair: MakePair, at: At, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "CLAIM_PATIENCE", 0.0)
    p = pair(TABLES, pub=ROWS, state="i")
    _passed(p, at)
    gate = tmp_path / "gate"
    at(f"sync.after_claim=pause:{gate}")
    task = p.submit("sync", lambda _: _together(p), [None])
    p.until("SELECT count(handover_lsn) = 4 FROM pgsub.subscription_rel", task=task)
    apply = p.start()
    p.pubdb.execute("INSERT INTO a VALUES (1003, 'beyond the claim')")
    p.until("SELECT handover_lsn IS NULL FROM pgsub.subscription_rel WHERE relname = 'a'", task=apply)
    p.until("SELECT remote_lsn > (SELECT max(handover_lsn) FROM pgsub.subscription_rel)"
            " FROM pgsub.progress WHERE worker = 0", task=apply)  # fmt: skip
    gate.touch()
    assert task.result() == [{}]
    assert p.state("a") == "f" and {p.state(name) for name in NAMES[1:]} <= {"s", "r"}
    p.stop(apply)
    _ends_well(p)


def test_a_table_that_is_taken_from_a_group_gets_no_more_changes_from_its_stream(
    pair: MakePair, at: At, tmp_path: Path
) -> None:
    p = pair(TABLES, pub=ROWS, state="i")
    _passed(p, at)
    gate = tmp_path / "gate"
    at(f"apply.before_target_commit=pause:{gate}@1")
    task = p.submit("sync", lambda _: _together(p), [None])
    p.until(  # a change is made
        "SELECT count(*) > 0 FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE relation = 'b'::regclass"
        " AND mode = 'RowExclusiveLock' AND application_name ~ ' sync:' AND wait_event = 'ClientRead'"
    )
    worker_takeover.take_over(p.session, p.subid, p.relid("b"))
    gate.touch()
    with pytest.raises(Fenced):
        task.result()
    assert p.subdb.value("SELECT count(*) FROM b WHERE id = 1001") == 0
    at("")
    _ends_well(p)


def test_a_table_in_which_a_change_fails_leaves_the_others_to_catch_up_together(pair: MakePair, at: At) -> None:
    p = pair(TABLES, pub=ROWS, state="i")
    _passed(p, at)
    p.subdb.execute("INSERT INTO b VALUES (1001, 'mine')")
    errors = _together(p)
    assert list(errors) == ["b"] and isinstance(errors["b"], ApplyError)
    assert _states(p) == "ffff"
    jobs = _jobs(p)
    assert p.try_sync(*map(p.relid, ("a", "c", "d"))) == {}
    assert _states(p) == "sfss" and jobs == ["catch up a and 2 more"]
    with pytest.raises(ApplyError):
        p.sync("b")
    p.subdb.execute("DELETE FROM b WHERE v = 'mine'")
    _ends_well(p)


@pytest.mark.long
@pytest.mark.parametrize("point", ["sync.before_separation", "sync.after_separation", "sync.before_slot_drop"])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_separation_that_was_interrupted_is_finished(
    pair: MakePair, at: At, monkeypatch: pytest.MonkeyPatch, point: str, name: str
) -> None:
    monkeypatch.setattr(worker, "CLAIM_PATIENCE", 0.0)
    p = pair(TABLES, pub=ROWS, state="i")
    at("sync.after_f=error")
    with pytest.raises(TargetUnavailable):
        _together(p)
    assert _states(p) == "ffff"
    p.apply("INSERT INTO a VALUES (1001, 'a'); INSERT INTO b VALUES (1001, 'b')")
    p.sync("c")
    p.sync("d")
    at(f"{point}=error")
    with pytest.raises(TargetUnavailable):
        p.sync(name)
    p.apply("INSERT INTO a VALUES (1002, 'a'); INSERT INTO b VALUES (1002, 'b')")
    _ends_well(p)


def test_a_take_over_waits_while_an_attempt_creates_the_slot_of_its_table(
    pair: MakePair, at: At, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The take-over would end the attempt's session on the target, and not what it does on the publisher."""
    monkeypatch.setattr(worker, "CLAIM_PATIENCE", 0.0)
    p, go_on = pair(TABLES, pub=ROWS, state="i"), tmp_path / "go on"
    at("sync.after_f=error")
    with pytest.raises(TargetUnavailable):
        _together(p)
    p.apply("INSERT INTO a VALUES (1001, 'a'); INSERT INTO b VALUES (1001, 'b')")
    for name in ("c", "d"):
        p.sync(name)
    shared = _slots(p)
    at(f"sync.after_separation=pause:{go_on}@1")
    attempts = [p.submit("sync", lambda _: p.sync("a"), [None])]
    until(lambda: _slots(p) != shared)
    attempts.append(p.submit("sync", lambda _: p.sync("a"), [None]))
    p.subdb.wait("SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query ~ 'pgsub.control'")
    go_on.touch()
    with suppress(Fenced):
        attempts[0].result()
    attempts[1].result()
    assert p.state("a") == "s"
    _ends_well(p)


def test_an_error_in_one_table_stops_no_other_and_keeps_no_slot(pair: MakePair) -> None:
    p = pair(TABLES, pub=ROWS, sub="INSERT INTO b VALUES (5, 'mine')", state="i")
    errors = _together(p)
    assert list(errors) == ["b"] and isinstance(errors["b"], ApplyError)
    assert errors["b"].sqlstate == "23505" and errors["b"].relation == "public.b"
    assert _states(p) == "sdss" and _slots(p) == []
    assert p.subdb.rows("SELECT * FROM b") == [(5, "mine")]
    p.apply("INSERT INTO a VALUES (1001, 'goes on'); INSERT INTO b VALUES (1001, 'is copied later')")
    p.same("a")
    p.subdb.execute("DELETE FROM b")
    _ends_well(p)


def test_a_table_that_cannot_be_copied_is_left_out(pair: MakePair) -> None:
    p = pair(TABLES, pub=ROWS, state="i")
    p.subdb.execute("ALTER TABLE c RENAME TO c_away")
    names = {p.relid(n): n for n in ("a", "b", "d")} | {p.subdb.value("SELECT 'c_away'::regclass::oid::bigint"): "c"}
    errors = p.try_sync(*names)
    assert [(names[relid], error.message) for relid, error in errors.items()] == [
        ("c", 'table "public.c_away" not found on publisher')  # by the name that it bears now, as in the server
    ]
    assert _states(p) == "ssds"
    p.subdb.execute("ALTER TABLE c_away RENAME TO c")
    _ends_well(p)


@pytest.mark.parametrize("point", ["copy.middle=error@2", "copy.before_commit=error@3", "copy.after_commit=error@1"])
def test_a_table_that_fails_for_a_moment_is_tried_again_with_the_rest(pair: MakePair, at: At, point: str) -> None:
    p = pair(TABLES, pub=ROWS, state="i")
    jobs = _jobs(p)
    at(point)
    assert _together(p) == {}
    assert len(jobs) == 2 and _states(p) == "ssss"
    assert set(p.subdb.rows("SELECT attempt FROM pgsub.subscription_rel")) == {(1,)}
    _ends_well(p)


def test_a_table_that_somebody_locks_leaves_the_others_and_waits_by_itself(pair: MakePair) -> None:
    p = pair(TABLES, pub=ROWS, state="i")
    with closing(p.subdb.connect()) as holder:
        holder.execute("BEGIN; LOCK TABLE b IN SHARE MODE")
        errors = _together(p)
        assert {name: error.sqlstate for name, error in errors.items()} == {"b": "55P03"}
        assert [p.state(name) in "sr" for name in NAMES] == [True, False, True, True]
        holder.execute("ROLLBACK")
    _ends_well(p)


@pytest.mark.long
def test_a_table_to_adopt_that_somebody_locks_for_good_leaves_the_others(pair: MakePair) -> None:
    p = pair(TABLES, pub=ROWS, sub=ROWS, state="i")
    p.session.execute("UPDATE pgsub.subscription_rel SET adopt = true")
    with closing(p.subdb.connect()) as holder:
        holder.execute("BEGIN; LOCK TABLE b")
        task = p.submit("sync", lambda _: _together(p), [None])
        p.until("SELECT count(*) = 3 FROM pgsub.subscription_rel WHERE srsubstate IN ('s', 'r')", task=task)
        [errors] = task.result()
        assert {name: error.sqlstate for name, error in errors.items()} == {"b": "55P03"}
        holder.execute("ROLLBACK")
    p.sync("b")
    p.apply()
    p.same(*NAMES)
    assert _states(p) == "rrrr" and _slots(p) == []


@pytest.mark.long
@pytest.mark.parametrize("point", ["sync.before_slot", "sync.after_slot", "copy.before_commit", "sync.after_f"])
def test_an_attempt_that_failed_for_all_leaves_nothing(
    pair: MakePair, at: At, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setattr(copy_pool, "TRIES", 1)
    p = pair(TABLES, pub=ROWS, state="i")
    at(f"{point}=error")
    if point == "copy.before_commit":
        assert len(_together(p)) == 1
    else:
        with pytest.raises(TargetUnavailable):
            _together(p)
    assert len(_slots(p)) == (1 if point == "sync.after_f" else 0)
    assert p.subdb.value("SELECT count(handover_lsn) FROM pgsub.subscription_rel WHERE srsubstate = 'd'") == 0
    p.apply(*[f"INSERT INTO {n} VALUES (1001, 'between')" for n in NAMES])
    _ends_well(p)


def test_a_table_taken_over_by_another_attempt_is_left_to_it(pair: MakePair, at: At, tmp_path: Path) -> None:
    p = pair(TABLES, pub=ROWS, state="i")
    gate = tmp_path / "gate"
    at(f"copy.middle=pause:{gate}@3")
    first = p.submit("sync", lambda _: _together(p), [None])
    p.until("SELECT count(xid) = 2 FROM pgsub.copy_chunk")
    second = p.submit("other", lambda _: p.sync("c"), [None])  # ends the first one's session, which copies this table
    p.until("SELECT epoch = 2 FROM pgsub.control WHERE worker = %s", p.relid("c"))
    gate.touch()
    second.result()
    errors = first.result()[0]
    assert list(errors) in ([], ["c"]) and all(isinstance(error, Fenced) for error in errors.values())
    assert p.state("c") == "s" and set(_states(p)) <= {"s", "f"}  # those that are left catch up by themselves
    _ends_well(p)


def test_stopping_lets_apply_and_the_slot_go(pair: MakePair, at: At, tmp_path: Path) -> None:
    p = pair(TABLES, pub=ROWS, state="i")
    stopping, gate = threading.Event(), tmp_path / "gate"
    at(f"copy.middle=pause:{gate}@2")
    sync = TableSync(SyncContext(p.sub, "1", p.submit, stopping), *map(p.relid, NAMES))
    task = p.submit("sync", lambda _: sync.run(), [None])
    p.until("SELECT count(xid) = 1 FROM pgsub.copy_chunk")
    stopping.set()
    with pytest.raises(Fenced, match="asked to stop"):
        task.result()
    gate.touch()
    assert p.subdb.value("SELECT count(handover_lsn) FROM pgsub.subscription_rel WHERE srsubstate = 'd'") == 0
    _ends_well(p)


def test_a_slot_that_another_table_names_is_not_dropped(pair: MakePair, at: At) -> None:
    p = pair(TABLES, pub=ROWS, state="i")
    at("sync.after_f=error")
    with pytest.raises(TargetUnavailable):
        _together(p)
    [shared] = _slots(p)
    for name in NAMES[:3]:
        worker_takeover.take_over(p.session, p.subid, p.relid(name))
        sync_slots.release(p.session, p.sub, p.relid(name))
        sync_slots.release(p.session, p.sub, p.relid(name))
        assert _slots(p) == [shared]
    sync_slots.release(p.session, p.sub, p.relid("d"))
    assert _slots(p) == []


UNKEYED = "CREATE TABLE a (id int, v text); ALTER TABLE a REPLICA IDENTITY FULL; CREATE TABLE b (id int PRIMARY KEY)"


@pytest.mark.long
def test_a_claim_that_is_older_than_the_slot_is_not_where_a_table_changes_hands(
    pair: MakePair, at: At, tmp_path: Path
) -> None:
    p = pair(UNKEYED, pub="INSERT INTO a VALUES (1, 'x')", state="i")
    gate = tmp_path / "gate"
    at(f"sync.before_slot=pause:{gate}")
    task = p.submit("sync", lambda _: p.try_sync(p.relid("a"), p.relid("b")), [None])
    p.until("SELECT count(*) = 2 FROM pgsub.subscription_rel WHERE handover_lsn IS NOT NULL")
    p.pubdb.execute("INSERT INTO a VALUES (2, 'between the claim and the slot')")
    with closing(p.subdb.connect()) as busy:
        busy.execute("BEGIN")
        busy.execute("SELECT FROM pgsub.progress WHERE worker = 0 FOR UPDATE")  # apply's long transaction
        gate.touch()
        p.until("SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name ~ ' sync:'", task=task)
        assert p.state("a") == "f"
        busy.execute("ROLLBACK")
    assert task.result() == [{}]
    p.apply()
    p.same("a")


@pytest.mark.long
def test_a_task_that_was_given_up_finishes_no_table_behind_its_slot(pair: MakePair, at: At, tmp_path: Path) -> None:
    p = pair(TABLES, pub=ROWS, state="i")
    gate, stopping = tmp_path / "gate", threading.Event()
    at(f"copy.middle=pause:{gate}@2")
    sync = TableSync(SyncContext(p.sub, "1", p.submit, stopping), *map(p.relid, NAMES))
    task = p.submit("sync", lambda _: sync.run(), [None])
    p.until("SELECT count(xid) = 1 FROM pgsub.copy_chunk")
    stopping.set()
    with pytest.raises(Fenced):
        task.result()
    gate.touch()
    for given_up in p.tasks:
        given_up._thread.join(20)
    nameless = "SELECT count(*) FROM pgsub.subscription_rel WHERE srsubstate = 'f' AND sync_slot IS NULL"
    assert p.subdb.value(nameless) == 0
    p.apply(*[f"INSERT INTO {name} VALUES (1001, 'later')" for name in NAMES])
    _ends_well(p)


def test_apply_outlives_a_ledger_row_that_somebody_holds(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "CLAIM_PATIENCE", 0.0)
    p = pair(TABLES, pub=ROWS)
    p.session.execute("UPDATE pgsub.subscription_rel SET srsubstate = 'd', handover_lsn = '0/1' WHERE relname = 'a'")
    with closing(p.subdb.connect()) as busy:
        busy.execute("BEGIN")
        busy.execute("SELECT FROM pgsub.subscription_rel FOR UPDATE")
        task = p.start()
        p.pubdb.execute("INSERT INTO a VALUES (1001, 'x')")
        p.until(
            "SELECT count(*) > 0 FROM pg_locks l JOIN pg_stat_activity s USING (pid)"
            " WHERE NOT l.granted AND s.application_name ~ ' apply '"
        )
        p.until(  # it gave up waiting once at least
            "SELECT count(*) = 0 FROM pg_locks l JOIN pg_stat_activity s USING (pid)"
            " WHERE NOT l.granted AND s.application_name ~ ' apply '"
        )
        busy.execute("ROLLBACK")
    p.until("SELECT handover_lsn IS NULL FROM pgsub.subscription_rel WHERE relname = 'a'", task=task)
    p.stop(task)


@pytest.mark.long
def test_a_piece_that_a_lost_session_holds_ends_the_attempt(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_pool, "TRIES", 2)
    p = pair(TABLES, pub=ROWS, state="i")
    names = _jobs(p)
    holder = p.subdb.connect(application_name=f"pgsub {p.subid} copy:{p.relid('b')} 1")
    prepare = preparation.prepare

    def held(*arguments: object, **options: object) -> object:
        made = prepare(*arguments, **options)  # type: ignore[arg-type]
        holder.execute("BEGIN")
        holder.execute("SELECT FROM pgsub.copy_chunk WHERE srrelid = %s FOR UPDATE", (p.relid("b"),))
        return made

    monkeypatch.setattr(preparation, "prepare", held)
    with closing(holder), pytest.raises(TargetUnavailable, match="locked by a session"):
        _together(p)
    assert len(names) == 2
    monkeypatch.setattr(preparation, "prepare", prepare)
    _ends_well(p)


def test_what_is_copied_is_not_kept_locked_on_the_publisher(pair: MakePair, at: At, tmp_path: Path) -> None:
    p = pair(TABLES, pub=ROWS, state="i")
    gate = tmp_path / "gate"
    sync = _paused_copy(p, at, gate)
    with closing(p.pubdb.connect()) as other:  # holding a lock and waiting for another one would be half a deadlock
        other.execute("SET lock_timeout = '5s'")
        other.execute("BEGIN")
        other.execute("LOCK TABLE d, a IN ACCESS EXCLUSIVE MODE")
        gate.touch()
        p.until("SELECT count(xid) = 3 FROM pgsub.copy_chunk")
        other.execute("COMMIT")
    assert sync.result() == [{}]
    _ends_well(p)


@pytest.mark.long
@pytest.mark.parametrize(
    "statement",
    ["ALTER TABLE c ALTER v TYPE varchar(99), ALTER id TYPE bigint", "TRUNCATE c", "VACUUM FULL c"],
    ids=["ALTER TABLE", "TRUNCATE", "VACUUM FULL"],
)
def test_a_table_that_was_rewritten_before_its_copy_is_copied_from_another_snapshot_and_the_others_are_not(
    pair: MakePair, at: At, tmp_path: Path, statement: str
) -> None:
    p = pair(TABLES, pub=ROWS, state="i")
    gate = tmp_path / "gate"
    at(f"sync.after_slot=pause:{gate}")
    sync = p.submit("sync", lambda _: p.try_sync(*map(p.relid, NAMES)), [None])
    p.until("SELECT count(*) = %s FROM pgsub.progress WHERE worker <> 0", len(NAMES))
    p.pubdb.execute(statement)  # nobody has to wait
    gate.touch()
    [errors] = sync.result()
    assert list(errors) == [p.relid("c")] and "was rewritten" in errors[p.relid("c")].message
    at("")
    _ends_well(p)
