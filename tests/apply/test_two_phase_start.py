"""When apply asks the publisher for a two-phase slot: once every table is ``r``, never before, and never by halves.

Mirrors t/021_twophase.pl's checks of subtwophasestate.
"""

from __future__ import annotations

import pytest

from pgsub.common.errors import StateForbids, TargetUnavailable, WrongSystem
from pgsub.target.ledger import two_phase_state

_TABLES = "CREATE TABLE a (id int PRIMARY KEY, v text); CREATE TABLE b (id int PRIMARY KEY, v text)"
_SLOT = "SELECT two_phase FROM pg_replication_slots WHERE slot_name = %s"


def _slot(it) -> bool:
    return bool(it.pubdb.value(_SLOT, it.sub.slot_name))


def _state(it) -> str:
    return two_phase_state.state(it.session, it.subid)


def _result(task) -> str:
    return str(task.result()[0].outcome)


@pytest.mark.publishers(long=True)
@pytest.mark.since(15)
def test_the_worker_ends_when_the_last_table_is_ready_and_the_next_one_enables_it(pair) -> None:
    it = pair(_TABLES, pub="INSERT INTO a VALUES (1, 'copied'), (2, 'copied')", state="i", two_phase="p")
    it.sync("a")
    first = it.start()
    it.until("SELECT srsubstate = 'r' FROM pgsub.subscription_rel WHERE relname = 'a'", task=first)
    assert not _slot(it) and _state(it) == "p" and not first.done()
    it.sync("b")
    assert _result(first) == "done"
    assert not _slot(it) and _state(it) == "p"
    second = it.start()
    it.pubdb.wait(_SLOT, it.sub.slot_name)
    assert _state(it) == "e"
    it.pubdb.execute("UPDATE a SET v = 'streamed' WHERE id = 2")
    it.until("SELECT v = 'streamed' FROM a WHERE id = 2", task=second)
    assert it.stop(second).outcome == "stopped"
    it.apply("INSERT INTO b VALUES (1, 'after')")
    it.same("a", "b")
    assert _slot(it)


def test_a_bounded_run_gets_there_all_the_same(pair) -> None:
    it = pair(_TABLES, state="i", two_phase="p")
    it.sync("a", "b")
    it.pubdb.execute("INSERT INTO a VALUES (1, 'x')")
    outcomes = [it.catch_up().outcome]
    while outcomes[-1] == "done":
        outcomes.append(it.catch_up().outcome)
    assert outcomes[-1] == "reached" and len(outcomes) <= 2
    it.same("a")


def test_the_slot_becomes_two_phase_behind_every_table(pair) -> None:
    """Else what was prepared before a table's srsublsn would come with that prepare_lsn, as if covered by the copy."""
    it = pair(_TABLES, two_phase="p")
    it.pubdb.execute("SELECT pg_logical_emit_message(true, 'x', repeat('x', 100000))")
    behind = it.pubdb.value("SELECT pg_current_wal_flush_lsn()")
    it.session.execute("UPDATE pgsub.subscription_rel SET srsublsn = %s WHERE relname = 'b'", (behind,))
    before = "SELECT confirmed_flush_lsn < %s::pg_lsn FROM pg_replication_slots WHERE slot_name = %s"
    assert it.pubdb.value(before, behind, it.sub.slot_name) is True
    task = it.start()
    it.pubdb.wait(_SLOT, it.sub.slot_name)
    at = "SELECT two_phase_at = %s::pg_lsn FROM pg_replication_slots WHERE slot_name = %s"
    assert it.pubdb.value(at, behind, it.sub.slot_name) is True
    it.stop(task)


def test_what_is_prepared_while_it_is_pending_and_committed_once_it_is_enabled_is_not_lost(pair) -> None:
    """Before it was enabled it was not sent; then it comes with a prepare_lsn that a table's srsublsn lies behind."""
    it = pair(_TABLES, state="i", two_phase="p")
    it.sync("a", "b")
    with it.pubdb.connect() as other:
        other.execute("BEGIN; INSERT INTO a VALUES (1, 'early'); INSERT INTO b VALUES (1, 'early')")
        other.execute("PREPARE TRANSACTION 'early'")
        it.pubdb.execute("INSERT INTO a VALUES (2, 'plain')")
        behind = it.pubdb.value("SELECT pg_current_wal_flush_lsn()")
        it.session.execute("UPDATE pgsub.subscription_rel SET srsublsn = %s WHERE relname = 'b'", (behind,))
        assert _result(it.start()) == "done"
        it.apply()
        late = "SELECT two_phase_at >= %s::pg_lsn FROM pg_replication_slots WHERE slot_name = %s"
        assert _slot(it) and it.pubdb.value(late, behind, it.sub.slot_name) is True
        other.execute("BEGIN; INSERT INTO a VALUES (3, 'late'); PREPARE TRANSACTION 'late'")
        it.apply()
        prepared = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
        assert it.subdb.value(prepared) == 1 and len(two_phase_state.pending(it.session, it.subid)) == 1
        other.execute("COMMIT PREPARED 'early'")
        it.apply("INSERT INTO b VALUES (4, 'plain')")
        it.same("b")
        other.execute("COMMIT PREPARED 'late'")
        it.apply()
    it.same("a", "b")
    assert it.subdb.value("SELECT count(*) FROM a") == 3 and it.subdb.value(prepared) == 0


def test_a_worker_that_dies_between_ledger_and_slot_is_followed_by_one_that_makes_it_two_phase(
    pair, at, reached
) -> None:
    it = pair(_TABLES, two_phase="p")
    at("apply.after_two_phase=error")
    with pytest.raises(TargetUnavailable, match="failpoint"):
        it.catch_up()
    assert _state(it) == "e" and not _slot(it)
    reached("apply.after_two_phase")
    it.apply("INSERT INTO a VALUES (1, 'x')")
    assert _slot(it)
    it.same("a")


@pytest.mark.parametrize("state", ["d", "e"])
def test_a_publisher_that_is_not_where_a_table_changed_hands_is_refused(pair, state) -> None:
    """A standby that lagged when it was promoted: its next changes would be taken for some that came with the copy."""
    it = pair(_TABLES, two_phase=state)
    ahead = it.pubdb.value("SELECT pg_current_wal_flush_lsn() + 100000000")
    it.session.execute("UPDATE pgsub.subscription_rel SET srsublsn = %s WHERE relname = 'b'", (ahead,))
    with pytest.raises(WrongSystem, match="the publisher is behind the subscription"):
        it.catch_up()
    assert not _slot(it)


def test_a_slot_that_is_two_phase_without_the_subscription_is_refused_with_the_remedy(pair) -> None:
    it = pair(_TABLES)
    with it.pubdb.connect() as other:
        slot = it.sub.slot_name
        other.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
        other.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput', false, true)", (slot,))
    it.session.execute(
        "UPDATE pgsub.progress SET reported_lsn = %s WHERE worker = 0",
        (it.pubdb.value("SELECT pg_current_wal_lsn()"),),
    )
    with pytest.raises(StateForbids, match="is two-phase, but the subscription is not") as caught:
        it.catch_up()
    assert f"pgsub alter {it.sub.name} --two-phase" in (caught.value.hint or "")
    two_phase_state.ask_for(it.session, it.subid)
    it.apply("INSERT INTO a VALUES (1, 'x')")
    it.same("a")


def test_a_slot_that_is_two_phase_too_early_is_refused(pair) -> None:
    it = pair(_TABLES, state="i", two_phase="p")
    with it.pubdb.connect() as other:
        slot = it.sub.slot_name
        other.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
        other.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput', false, true)", (slot,))
    it.session.execute(
        "UPDATE pgsub.progress SET reported_lsn = %s WHERE worker = 0",
        (it.pubdb.value("SELECT pg_current_wal_lsn()"),),
    )
    with pytest.raises(StateForbids, match="is two-phase before every table is ready"):
        it.catch_up()
