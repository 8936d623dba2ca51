"""two_phase in the ledger: who may enable it, when, and from which position; and what keeps tables to copy away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import psycopg
import pytest

from pgsub.common.errors import Fenced, PermissionMissing, StateForbids
from pgsub.target.ledger import prepared_xacts, subscriptions, two_phase_state, worker_takeover
from pgsub.target.ledger.prepared_xacts import Found
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.ledger.tables import states, subscription_tables
from pgsub.target.ledger.tables.subscription_tables import Change
from pgsub.target.ledger.worker_takeover import APPLY
from pgsub.target.session import ledger_privileges, transactions

SUBID = 7
Connect = Callable[..., psycopg.Connection]


@pytest.fixture
def pending(session: psycopg.Connection) -> psycopg.Connection:
    """Subscription 7 with two_phase pending."""
    two_phase_state.ask_for(session, SUBID)
    return session


def _all(session: psycopg.Connection, state: str) -> None:
    session.execute("UPDATE pgsub.subscription_rel SET srsubstate = %s", (state,))


def _prepare(session: psycopg.Connection, gid: str) -> None:
    """What apply leaves of a PREPARE."""
    session.execute("BEGIN")
    session.execute("INSERT INTO pgsub.prepared_xact VALUES (%s, %s)", (SUBID, gid))
    session.execute(f"PREPARE TRANSACTION '{gid}'".encode())


@pytest.fixture
def prepare(connect: Connect) -> Iterator[Callable[..., None]]:
    """Prepares transactions that are gone after the test, for they keep the database from being dropped."""
    session, gids = connect(), []

    def make(gid: str, by: psycopg.Connection | None = None) -> None:
        _prepare(by or session, gid)
        gids.append(gid)

    yield make
    for gid in gids:
        if session.execute("SELECT FROM pg_prepared_xacts WHERE gid = %s", (gid,)).fetchone() is not None:
            session.execute(f"ROLLBACK PREPARED '{gid}'".encode())


def test_it_is_enabled_once_every_table_is_ready_and_not_before(pending: psycopg.Connection) -> None:
    claim = worker_takeover.take_over(pending, SUBID, APPLY)
    assert two_phase_state.enable_if_ready(pending, claim)[0] is False
    pending.execute("UPDATE pgsub.subscription_rel SET srsubstate = 'r' WHERE relname = 'a'")
    for state in "idfs":
        pending.execute("UPDATE pgsub.subscription_rel SET srsubstate = %s WHERE relname = 'b'", (state,))
        assert two_phase_state.enable_if_ready(pending, claim)[0] is False
        assert two_phase_state.state(pending, SUBID) == "p"
    _all(pending, "r")
    assert two_phase_state.enable_if_ready(pending, claim)[0] is True
    assert two_phase_state.state(pending, SUBID) == "e"
    assert two_phase_state.enable_if_ready(pending, claim)[0] is True


def test_without_a_table_it_stays_pending_and_what_was_not_asked_for_is_not_enabled(
    session: psycopg.Connection,
) -> None:
    claim = worker_takeover.take_over(session, SUBID, APPLY)
    _all(session, "r")
    assert two_phase_state.enable_if_ready(session, claim)[0] is False
    assert two_phase_state.state(session, SUBID) == "d"
    two_phase_state.ask_for(session, SUBID)
    session.execute("DELETE FROM pgsub.subscription_rel")
    assert two_phase_state.enable_if_ready(session, claim)[0] is False
    assert two_phase_state.state(session, SUBID) == "p"


def test_the_stream_begins_behind_every_table(pending: psycopg.Connection) -> None:
    claim = worker_takeover.take_over(pending, SUBID, APPLY)
    _all(pending, "r")
    assert two_phase_state.enable_if_ready(pending, claim) == (True, 0)
    pending.execute("UPDATE pgsub.progress SET remote_lsn = '0/10', reported_lsn = '0/8'")
    assert two_phase_state.enable_if_ready(pending, claim) == (True, 0x10)
    pending.execute("UPDATE pgsub.progress SET reported_lsn = '0/20'")  # it may be of a history that was left
    assert two_phase_state.enable_if_ready(pending, claim) == (True, 0x10)
    pending.execute("UPDATE pgsub.subscription_rel SET srsublsn = '0/30' WHERE relname = 'a'")
    assert two_phase_state.enable_if_ready(pending, claim) == (True, 0x30)
    other = RelationState(99, "public", "c", "r", srsublsn=0x99)
    subscriptions.register(pending, 8, "another", "test", "slot8", [other], slot_intent=False)
    assert two_phase_state.enable_if_ready(pending, claim) == (True, 0x30)


def test_a_fenced_worker_enables_nothing(pending: psycopg.Connection) -> None:
    claim = worker_takeover.take_over(pending, SUBID, APPLY)
    _all(pending, "r")
    worker_takeover.take_over(pending, SUBID, APPLY)
    with pytest.raises(Fenced):
        two_phase_state.enable_if_ready(pending, claim)
    assert two_phase_state.state(pending, SUBID) == "p"


def test_a_refresh_that_adds_a_table_to_copy_comes_before_it_is_enabled_or_is_refused(
    pending: psycopg.Connection, connect: Connect
) -> None:
    claim = worker_takeover.take_over(pending, SUBID, APPLY)
    _all(pending, "r")
    worker, other = connect(), connect()
    found: list[bool] = []
    added = Change(add=[RelationState(99, "public", "c", "i")])
    with states.changing(other, SUBID):
        subscription_tables.change(other, SUBID, added)
        thread = threading.Thread(target=lambda: found.append(two_phase_state.enable_if_ready(worker, claim)[0]))
        thread.start()
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
        while pending.execute(waiting, (worker.info.backend_pid,)).fetchone() != (1,):
            assert thread.is_alive()
    thread.join()
    assert found == [False] and two_phase_state.state(pending, SUBID) == "p"
    pending.execute("DELETE FROM pgsub.subscription_rel WHERE srrelid = 99")
    assert two_phase_state.enable_if_ready(pending, claim)[0]
    for change in (added, Change(again=[claim.worker])):
        with pytest.raises(StateForbids, match="is not allowed when two_phase is enabled"), states.changing(other, 7):
            subscription_tables.change(other, SUBID, change)
    with states.changing(other, SUBID):
        subscription_tables.change(other, SUBID, Change(add=[RelationState(99, "public", "c", "r")]))
    assert len(subscriptions.relations(pending, SUBID)) == 3


def test_it_is_not_disabled_while_something_is_prepared(
    pending: psycopg.Connection, prepare: Callable[..., None]
) -> None:
    subscriptions.register(pending, 71, "another", "test", "slot71", [], slot_intent=False)
    prepare("pgsub_71_600_0")
    prepare("pgsub_7_600_10")
    pending.execute("INSERT INTO pgsub.prepared_pending VALUES (7, 'pgsub_7_601_20', '0/20', 601)")
    with pytest.raises(StateForbids, match="cannot disable") as caught:
        two_phase_state.disable(pending, SUBID)
    assert caught.value.detail == "Prepared on the target:\npgsub_7_600_10\npgsub_7_601_20"
    two_phase_state.roll_back(pending, two_phase_state.prepared(pending, SUBID))
    with pytest.raises(StateForbids, match="cannot disable"):
        two_phase_state.disable(pending, SUBID)
    pending.execute("DELETE FROM pgsub.prepared_pending")
    two_phase_state.disable(pending, SUBID)
    assert two_phase_state.state(pending, SUBID) == "d"
    assert [one.gid for one in two_phase_state.prepared(pending, 71)] == ["pgsub_71_600_0"]


@pytest.mark.parametrize("replica", [True, False])
def test_a_prepared_transaction_keeps_nobody_from_the_ledger(
    pending: psycopg.Connection, connect: Connect, prepare: Callable[..., None], replica: bool
) -> None:
    # where foreign keys are checked, the marker holds the subscription's key until it is decided
    prepare("pgsub_7_600_10", connect(replica=replica))
    _all(pending, "r")
    claim = worker_takeover.take_over(pending, SUBID, APPLY)
    with transactions.durable(pending):
        transactions.lock_timeout(pending)
        assert two_phase_state.state(pending, SUBID, lock=True) == "p"
    assert two_phase_state.enable_if_ready(pending, claim)[0]
    with states.changing(pending, SUBID):
        subscription_tables.change(pending, SUBID, Change(add=[RelationState(99, "public", "c", "r")]))
    two_phase_state.roll_back(pending, two_phase_state.prepared(pending, SUBID))
    subscriptions.forget(pending, SUBID)


def test_only_who_prepared_a_transaction_may_finish_it_and_is_told_so(
    pending: psycopg.Connection, connect: Connect, prepare: Callable[..., None], subdb
) -> None:
    role = f"other_{subdb.name}"
    subdb.execute(f"CREATE ROLE {role} LOGIN; {ledger_privileges.grants(role)}")
    try:
        prepare("pgsub_7_600_10")
        with subdb.connect(role) as session:
            found = two_phase_state.prepared(session, SUBID)
            assert [(one.gid, one.owner, one.ours) for one in found] == [("pgsub_7_600_10", "postgres", False)]
            with pytest.raises(PermissionMissing) as caught:
                two_phase_state.check_finishable(found)
            assert "ROLLBACK PREPARED 'pgsub_7_600_10';" in (caught.value.hint or "")
        ours = two_phase_state.prepared(pending, SUBID)
        two_phase_state.check_finishable(ours)
        two_phase_state.roll_back(pending, ours)
        two_phase_state.roll_back(pending, ours)  # gone meanwhile
        assert two_phase_state.prepared(pending, SUBID) == []
    finally:
        subdb.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_what_a_stranger_prepared_under_a_name_of_the_subscription_is_not_taken_for_its_own(
    pending: psycopg.Connection, prepare: Callable[..., None], subdb
) -> None:
    role, gid = f"other_{subdb.name}", "pgsub_7_600_10"
    subdb.execute(f"CREATE ROLE {role} LOGIN")
    try:
        with subdb.connect(role) as session:
            session.execute("BEGIN")
            session.execute(f"PREPARE TRANSACTION '{gid}'".encode())
            assert two_phase_state.prepared(pending, SUBID) == []
            assert prepared_xacts.PreparedTransactions(pending, SUBID).find(gid) == Found(False, False, False)
            two_phase_state.disable(pending, SUBID)  # not held up by it
            [found] = prepared_xacts.all_prepared(pending, SUBID)
            assert (found.gid, found.owner, found.genuine) == (gid, role, False)
            session.execute(f"ROLLBACK PREPARED '{gid}'".encode())
        prepare(gid)
        [ours] = two_phase_state.prepared(pending, SUBID)
        assert ours.genuine and prepared_xacts.PreparedTransactions(pending, SUBID).find(gid).prepared
    finally:
        subdb.execute(f"DROP ROLE {role}")
