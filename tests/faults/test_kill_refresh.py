"""kill -9 of ``refresh`` and ``alter`` at every step, with writes all the time: the old tables or the new ones, never
half of them, and no slot that the ledger does not name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fix_faults import Site, until
from forked import Started

pytestmark = pytest.mark.long

Make = Callable[[], Site]

STEPS = ("refresh.after_fence", "refresh.after_release", "refresh.before_commit", "refresh.after_commit")
_SLOTS = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"


def publish(case: Site, name: str, rows: int = 300) -> None:
    """A new table on both sides with rows on the publisher, in the publication."""
    for database in (case.pubdb, case.subdb):
        database.execute(f"CREATE TABLE {name} (id bigint PRIMARY KEY, n int, pad text)")
    case.pubdb.execute(f"INSERT INTO {name} SELECT g, 0, repeat('y', 100) FROM generate_series(1, {rows}) g")
    case.pubdb.execute(f"ALTER PUBLICATION p ADD TABLE {name}")


def half_done(case: Site, name: str) -> None:
    """What a synchronization leaves that was killed after its copy: rows, state ``f`` and a slot."""
    publish(case, name)
    case.end(case.start("refresh", case.name, "--no-wait"))
    relid = case.subdb.value("SELECT %s::regclass::oid::bigint", name)
    slot = case.subdb.value("SELECT format('pgsub_%%s_sync_%%s', subid, %s::text) FROM pgsub.subscription", relid)
    case.pubdb.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
    case.subdb.execute(
        f"BEGIN; INSERT INTO {name} SELECT g, 0, repeat('y', 100) FROM generate_series(1, 300) g;"
        "INSERT INTO pgsub.copy_chunk (subid, srrelid, attempt, chunk, rows_done, bytes_done, xid)"
        f" SELECT subid, {relid}, 1, 0, 300, 1, pg_current_xact_id() FROM pgsub.subscription;"
        f"UPDATE pgsub.subscription_rel SET srsubstate = 'f', attempt = 1, sync_slot = '{slot}'"
        f" WHERE srrelid = {relid}; COMMIT"
    )


def serve(case: Site, points: dict[str, str] | None = None) -> Started:
    """A launcher that has the subscription."""
    process = case.serve(points=points)
    until(lambda: bool(case.sqlite("SELECT 1 FROM pgsub_server")), "the launcher does not serve")
    return process


def tables(case: Site) -> dict[str, str]:
    """srsubstate by table, from the ledger."""
    return dict(case.subdb.rows("SELECT relname, srsubstate::text FROM pgsub.subscription_rel"))


def check_slots(case: Site) -> None:
    """Every slot is the subscription's or named in the ledger, and no table in ``f`` is without."""
    named = {case.name} | {slot for (slot,) in case.subdb.rows("SELECT sync_slot FROM pgsub.subscription_rel")}
    there = {slot for (slot,) in case.pubdb.rows(_SLOTS)}
    assert there <= named, (there, named)
    for (slot,) in case.subdb.rows("SELECT sync_slot FROM pgsub.subscription_rel WHERE srsubstate = 'f'"):
        assert slot in there


def test_a_refresh_killed_at_any_step_leaves_the_old_tables_or_the_new_and_no_unknown_slot(site: Make) -> None:
    case = site()
    case.make_ready("audit1", "keyed1")
    seen = []
    for number, step in enumerate(STEPS):
        old, new = f"old{number}", f"new{number}"
        half_done(case, old)
        case.pubdb.execute(f"ALTER PUBLICATION p DROP TABLE {old}")
        publish(case, new)
        case.tables.append(new)
        case.subdb.execute("INSERT INTO audit1 VALUES (-1, 'goes with the TRUNCATE')")
        before = tables(case)
        words = ("refresh", case.name, "--resync", "public.audit1", "--yes", "--no-wait")
        case.killed(case.start(*words, points={step: "kill"}))
        assert case.fired(step)
        after, kept = tables(case), case.subdb.value("SELECT count(*) > 0 FROM audit1")
        seen.append(after.get(old))
        if step == "refresh.after_commit":
            assert after == {**{k: v for k, v in before.items() if k != old}, new: "i", "audit1": "i"} and not kept
        else:
            assert {**after, old: "f"} == before and kept
        check_slots(case)
        if step == "refresh.after_release":  # it is wanted again: its rows are removed, and copied anew
            case.pubdb.execute(f"ALTER PUBLICATION p ADD TABLE {old}")
            case.tables.append(old)
        case.end(case.start(*words))
        assert (old in tables(case)) == (step == "refresh.after_release") and tables(case)[new] == "i"
        check_slots(case)
    assert seen == ["f", "d", "d", None]
    assert case.pubdb.rows(_SLOTS) == [(case.name,)]
    assert case.writer is not None
    case.writer.rest()
    case.end(case.run())
    case.check()


def test_a_refresh_killed_while_a_launcher_copies_the_table_leaves_no_slot_behind(site: Make) -> None:
    case = site()
    case.make_ready("audit1", "keyed1")
    process = serve(case)
    busy = "SELECT count(*) FROM pgsub.subscription_rel WHERE relname = %s AND sync_slot IS NOT NULL"
    for number, step in enumerate(STEPS):
        name = f"held{number}"
        publish(case, name)
        with case.subdb.connect() as other:  # keeps the copy from its table
            other.execute(f"BEGIN; LOCK TABLE {name} IN SHARE MODE")
            case.end(case.start("refresh", case.name, "--no-wait"))
            case.subdb.wait(busy, name, value=1)
            case.pubdb.execute(f"ALTER PUBLICATION p DROP TABLE {name}")
            case.killed(case.start("refresh", case.name, "--no-wait", points={step: "kill"}))
            assert (name in tables(case)) == (step != "refresh.after_commit")
            case.end(case.start("refresh", case.name, "--no-wait"))
        assert set(tables(case)) == {"audit1", "keyed1"}
        until(lambda: case.pubdb.rows(_SLOTS) == [(case.name,)], lambda: f"slots: {case.pubdb.rows(_SLOTS)}")
    case.wait_equal()
    case.terminate(process)
    case.check()


@pytest.mark.parametrize("step", ["alter.after_ledger", "alter.after_definition"])
def test_an_alter_killed_half_way_is_finished_by_the_next_command(site: Make, step: str) -> None:
    case = site()
    case.make_ready("audit1")
    for database in (case.pubdb, case.subdb):
        database.execute("CREATE TABLE keyed1 (id bigint PRIMARY KEY)")
    case.pubdb.execute("CREATE PUBLICATION q FOR TABLE keyed1")
    words = ("alter", case.name, "--add-publication", "q", "--no-wait")
    case.killed(case.start(*words, points={step: "kill"}))
    assert case.fired(step)
    assert tables(case) == {"audit1": "r"}
    done = step == "alter.after_definition"
    assert case.sqlite("SELECT subpublications FROM pg_subscription") == [('["p", "q"]' if done else '["p"]',)]
    case.end(case.start("refresh", case.name, "--no-wait") if done else case.start(*words))
    assert tables(case) == {"audit1": "r", "keyed1": "i"}
    assert case.sqlite("SELECT subpublications FROM pg_subscription") == [('["p", "q"]',)]


def test_a_slot_that_comes_to_be_while_its_table_is_removed_is_dropped_by_its_maker(site: Make) -> None:
    case = site()
    case.make_ready("audit1")
    go = case.points.parent / "go"
    process = serve(case, {"sync.before_slot": f"pause:{go}"})
    publish(case, "late")
    case.end(case.start("refresh", case.name, "--no-wait"))
    case.wait_fired("sync.before_slot")
    case.pubdb.execute("ALTER PUBLICATION p DROP TABLE late")
    case.end(case.start("refresh", case.name, "--no-wait"))
    assert set(tables(case)) == {"audit1"}
    with case.pubdb.connect() as long:  # holds the creation up, so that the slot can be seen
        long.execute("BEGIN; SELECT txid_current()")
        go.touch()
        case.pubdb.wait("SELECT count(*) FROM pg_replication_slots WHERE slot_name ~ '_sync_'", value=1)
    # now the launcher learns that it was fenced, and takes the slot away again
    until(lambda: case.pubdb.rows(_SLOTS) == [(case.name,)], lambda: f"slots: {case.pubdb.rows(_SLOTS)}")
    case.wait_equal()
    case.terminate(process)
    case.check()


def test_a_refresh_drops_the_slots_that_the_ledger_names_and_none_that_is_only_called_alike(site: Make) -> None:
    case = site()
    case.make_ready("audit1")
    system = case.subdb.value("SELECT system_identifier::text FROM pg_control_system()")
    subid = case.subdb.value("SELECT subid FROM pgsub.subscription")
    others = {f"pgsub_{subid}_sync_17_1", f"pgsub_{subid + 1}_sync_17_{system}", f"pgsub_{subid}_sync_17_{system}"}
    for slot in others:
        case.pubdb.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
    half_done(case, "old1")
    assert len(case.pubdb.rows(_SLOTS)) == 5
    case.pubdb.execute("ALTER PUBLICATION p DROP TABLE old1")
    case.end(case.start("refresh", case.name, "--no-wait"))
    assert {slot for (slot,) in case.pubdb.rows(_SLOTS)} == {case.name, *others}


def test_a_table_whose_slot_waits_for_a_long_transaction_is_removed_at_once(site: Make) -> None:
    case = site()
    case.make_ready("audit1")
    process = serve(case)
    with case.pubdb.connect() as long:
        long.execute("BEGIN; SELECT txid_current()")
        publish(case, "waits")
        case.end(case.start("refresh", case.name, "--no-wait"))
        creating = "SELECT count(*) FROM pg_replication_slots WHERE slot_name ~ '_sync_' AND active"
        case.pubdb.wait(creating, value=1)
        case.pubdb.execute("ALTER PUBLICATION p DROP TABLE waits")
        case.end(case.start("refresh", case.name, "--no-wait"))
        assert set(tables(case)) == {"audit1"}
        assert case.pubdb.rows(_SLOTS) == [(case.name,)]
    case.wait_equal()
    case.terminate(process)
    case.check()
