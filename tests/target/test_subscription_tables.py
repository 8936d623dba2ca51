"""The ledger's set of tables changes as a whole, under the fence of the sync workers concerned, or not at all."""

from __future__ import annotations

import psycopg
import pytest

from pgsub.common.errors import Fenced, LockHeld, StateForbids
from pgsub.target.ledger import subscriptions, worker_takeover
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.ledger.tables import states, subscription_tables
from pgsub.target.ledger.tables.subscription_tables import Change, Renamed
from pgsub.target.session import advisory_locks
from pgsub.target.sql import resync_truncate

SUBID = 7
_TABLES = "SELECT relname, srsubstate::text FROM pgsub.subscription_rel ORDER BY relname"


def tables(session):
    """srsubstate by table."""
    return dict(session.execute(_TABLES).fetchall())


def oid(session, name):
    return session.execute("SELECT %s::regclass::oid::bigint", (f"public.{name}",)).fetchone()[0]


def version(session):
    return session.execute("SELECT states_version FROM pgsub.progress WHERE worker = 0").fetchone()[0]


def change(session, wanted):
    with states.changing(session, SUBID):
        subscription_tables.change(session, SUBID, wanted)


def copy_again(session, emptied):
    """What a refresh does to a table that is copied again."""
    with states.changing(session, SUBID):
        subscription_tables.change(session, SUBID, Change(again=[emptied.oid]))
        resync_truncate.truncate(session, [emptied])


def set_table(session, name, **columns):
    for column, value in columns.items():
        query = f"UPDATE pgsub.subscription_rel SET {column} = %s WHERE relname = %s"
        session.execute(query, (value, name))


def test_all_of_a_change_commits_together_and_apply_is_made_to_look_again(session):
    session.execute("CREATE TABLE public.c (id int)")
    before = version(session)
    again, gone = oid(session, "a"), oid(session, "b")
    set_table(session, "a", srsubstate="r", srsublsn="0/10", handover_lsn="0/20")
    session.execute("INSERT INTO pgsub.progress (subid, worker) VALUES (7, %s), (7, %s)", (again, gone))
    new = RelationState(oid(session, "c"), "public", "c", "i")
    change(session, Change([new], [gone], [], [again]))
    assert tables(session) == {"a": "i", "c": "i"}
    assert version(session) == before + 1
    row = session.execute("SELECT srsublsn, handover_lsn FROM pgsub.subscription_rel WHERE relname = 'a'").fetchone()
    assert row == (None, None)
    assert session.execute("SELECT worker FROM pgsub.progress").fetchall() == [(0,)]


def test_a_sync_worker_that_took_over_meanwhile_stops_the_change(session):
    claim = worker_takeover.take_over(session, SUBID, oid(session, "a"))
    worker_takeover.take_over(session, SUBID, oid(session, "a"))
    for wanted in (
        Change(drop=[oid(session, "a")], claims=[claim]),
        Change(again=[oid(session, "a")], claims=[claim]),
    ):
        with pytest.raises(Fenced):
            change(session, wanted)
    with pytest.raises(Fenced):
        subscription_tables.reset_to_datasync(session, [claim])
    assert tables(session) == {"a": "i", "b": "i"}


def test_a_table_is_not_forgotten_while_it_names_a_slot(session):
    for column in ("sync_slot", "spare_slot"):
        set_table(session, "a", **{column: "still_there"})
        with pytest.raises(Fenced):
            change(session, Change(drop=[oid(session, "a")]))
        set_table(session, "a", **{column: None})
    change(session, Change(drop=[oid(session, "a")]))
    assert tables(session) == {"b": "i"}


def test_a_table_that_is_no_longer_there_stops_the_change(session):
    gone = oid(session, "a")
    change(session, Change(drop=[gone]))
    with pytest.raises(Fenced):
        change(session, Change(drop=[gone]))


def test_only_a_finished_copy_is_forsaken_and_its_claim_with_it(session):
    for name, state in (("a", "f"), ("b", "s")):
        set_table(session, name, srsubstate=state, handover_lsn="0/20")
    subscription_tables.reset_to_datasync(
        session, [worker_takeover.take_over(session, SUBID, oid(session, name)) for name in ("a", "b")]
    )
    assert tables(session) == {"a": "d", "b": "s"}
    query = "SELECT relname FROM pgsub.subscription_rel WHERE handover_lsn IS NOT NULL"
    assert session.execute(query).fetchall() == [("b",)]


def test_two_tables_may_change_their_names_for_each_others(session):
    a, b = oid(session, "a"), oid(session, "b")
    change(session, Change(rename=[Renamed(a, "public", "b"), Renamed(b, "public", "a")]))
    rows = session.execute("SELECT relname, srrelid::bigint FROM pgsub.subscription_rel").fetchall()
    assert dict(rows) == {"a": b, "b": a}


def test_rows_and_state_go_together_or_stay_together(session, connect):
    session.execute("INSERT INTO public.a VALUES (1, 'x')")
    set_table(session, "a", srsubstate="r")
    (emptied,) = resync_truncate.inspect(session, SUBID, [oid(session, "a")], replica=True, tagged=True)
    reader = connect("reader")
    reader.execute("BEGIN")
    reader.execute("SELECT FROM public.a")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        copy_again(session, emptied)
    assert tables(session)["a"] == "r" and resync_truncate.lock_holders(session, [emptied])
    reader.execute("ROLLBACK")
    copy_again(session, emptied)
    assert tables(session)["a"] == "i"
    assert session.execute("SELECT count(*) FROM public.a").fetchone() == (0,)


def test_one_command_at_a_time_changes_a_subscription(session, connect, monkeypatch):
    monkeypatch.setattr(advisory_locks, "PATIENCE_SECONDS", 0.1)
    other = connect("other")
    with subscription_tables.maintenance(session, SUBID, "s"):
        with (
            pytest.raises(LockHeld, match='subscription "s" is being changed'),
            subscription_tables.maintenance(other, 7, "s"),
        ):
            pass
        with subscription_tables.maintenance(other, SUBID + 1, "t"):
            pass
    with subscription_tables.maintenance(other, SUBID, "s"):
        pass


def test_a_position_is_adopted_once_and_only_by_who_holds_the_claim(session):
    stale = worker_takeover.take_over(session, SUBID, worker_takeover.APPLY)
    claim = worker_takeover.take_over(session, SUBID, worker_takeover.APPLY)
    with pytest.raises(Fenced):
        subscriptions.adopt_slot(session, stale, 0x10)
    for position in (0x10, 0x20):
        subscriptions.adopt_slot(session, claim, position)
    assert session.execute("SELECT reported_lsn = '0/10' FROM pgsub.progress").fetchall() == [(True,)]


def test_a_publisher_is_adopted_once(session):
    claim = worker_takeover.take_over(session, SUBID, worker_takeover.APPLY)
    for system in ("1", "2"):
        subscriptions.adopt_publisher(session, claim, subscriptions.Publisher(system, "app", 5, 1))
    assert subscriptions.identity(session, SUBID).system_identifier == "1"


def test_a_subscription_that_the_ledger_does_not_know_is_not_renamed(session):
    with pytest.raises(StateForbids, match="does not know this subscription"):
        subscriptions.redefine(session, SUBID + 1, "t", None)
