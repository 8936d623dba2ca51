"""The launcher's side of the ledger: identity, take-over, states of tables and who may change them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgsub.common.errors import Fenced, PermissionMissing, StateForbids, SubscriptionExists
from pgsub.common.subscription import Subscription
from pgsub.target.ledger import publisher_record, subscriptions, worker_takeover
from pgsub.target.ledger.schema import installation, versions
from pgsub.target.ledger.tables import handover, states
from pgsub.target.ledger.worker_takeover import APPLY, Claim
from pgsub.target.session import connect as target
from pgsub.target.session import origins, transactions

if TYPE_CHECKING:
    from fix_servers import Database

SUBID = 7
Connect = Callable[..., psycopg.Connection]


def _relid(session: psycopg.Connection, name: str = "a") -> int:
    row = session.execute("SELECT %s::regclass::oid::bigint", (f"public.{name}",)).fetchone()
    assert row is not None
    return int(row[0])


def _apply_at(session: psycopg.Connection, lsn: str) -> None:
    session.execute("UPDATE pgsub.progress SET remote_lsn = %s WHERE worker = 0", (lsn,))


def _copied(session: psycopg.Connection, at: int, name: str = "a") -> Claim:
    """A table whose copy is finished, its sync worker at a position."""
    relid = _relid(session, name)
    claim = worker_takeover.take_over(session, SUBID, relid)
    attempt = states.start_copy(session, [claim], f"slot_{name}")[claim.worker]
    states.slot_position(session, [claim], at)
    with transactions.durable(session):
        assert states.finish_copy(session, claim, attempt)
    return claim


def _state(session: psycopg.Connection, name: str = "a") -> tuple[str, int | None, int | None]:
    row = next(r for r in subscriptions.relations(session, SUBID) if r.relname == name)
    return row.srsubstate, row.srsublsn, row.handover_lsn


def _version(session: psycopg.Connection) -> int:
    row = session.execute("SELECT states_version FROM pgsub.progress WHERE worker = 0").fetchone()
    assert row is not None
    return int(row[0])


def test_a_number_is_given_once(session: psycopg.Connection) -> None:
    with pytest.raises(SubscriptionExists):
        subscriptions.register(session, SUBID, "other", "test", "slot", [], slot_intent=False)


def test_identity_is_what_was_learnt_of_the_publisher(session: psycopg.Connection) -> None:
    known = subscriptions.identity(session, SUBID)
    assert (known.slot_name, known.system_identifier) == ("slot", None)
    assert session.execute("SELECT slot_intent FROM pgsub.subscription").fetchone() == (True,)
    subscriptions.slot_created(session, SUBID, subscriptions.Publisher("123", "db", 5, 2), position=0x16_0000_00FF)
    publisher_record.follow(session, [worker_takeover.take_over(session, SUBID, APPLY)], 3)
    known = subscriptions.identity(session, SUBID)
    assert (known.system_identifier, known.publisher_dbname, known.publisher_dboid) == ("123", "db", 5)
    assert (known.timeline, known.consistent_point) == (3, 0x16_0000_00FF)
    assert session.execute("SELECT reported_lsn = '16/FF' FROM pgsub.progress").fetchone() == (True,)
    with pytest.raises(StateForbids, match="does not know this subscription"):
        subscriptions.identity(session, SUBID + 1)


def test_a_timeline_is_recorded_only_while_no_other_worker_was_started(session: psycopg.Connection) -> None:
    apply = worker_takeover.take_over(session, SUBID, APPLY)
    claim = worker_takeover.take_over(session, SUBID, _relid(session))
    others = worker_takeover.take_over_others(session, [claim])
    assert [one.worker for one in others] == [APPLY] and others != [apply]
    with pytest.raises(Fenced):
        worker_takeover.take_over_others(session, [apply])
    another = worker_takeover.take_over(session, SUBID, _relid(session, "b"))
    with pytest.raises(Fenced, match="another worker was started meanwhile"):
        publisher_record.follow(session, [claim, *others], 3)
    publisher_record.follow(session, [claim, another, *others], 3)
    assert subscriptions.identity(session, SUBID).timeline == 3


def test_the_furthest_position_is_that_of_any_worker(session: psycopg.Connection) -> None:
    _apply_at(session, "0/10")
    assert publisher_record.furthest(session, SUBID) == 0x10
    relid = _relid(session)
    claim = worker_takeover.take_over(session, SUBID, relid)
    states.start_copy(session, [claim], "slot_a")
    states.slot_position(session, [claim], 0x50)
    assert publisher_record.furthest(session, SUBID) == 0x10  # what is copied is compared with another snapshot
    _copied(session, 0x30)
    assert publisher_record.furthest(session, SUBID) == 0x30
    session.execute("UPDATE pgsub.subscription_rel SET srsubstate = 's', srsublsn = '0/40'")
    assert publisher_record.furthest(session, SUBID) == 0x40


@pytest.mark.parametrize("replica", [False, True])
def test_forgetting_leaves_nothing(session: psycopg.Connection, connect: Connect, replica: bool) -> None:
    # session_replication_role = replica silences the triggers of ON DELETE CASCADE
    claim = _copied(session, 10)
    session.execute("INSERT INTO pgsub.copy_chunk VALUES (%s, %s, 1, 0)", (SUBID, claim.worker))
    session.execute("INSERT INTO pgsub.event (subid, body) VALUES (%s, '{}')", (SUBID,))
    session.execute("INSERT INTO pgsub.prepared_xact VALUES (%s, 'g')", (SUBID,))
    session.execute("INSERT INTO pgsub.prepared_pending VALUES (%s, 'g', '0/1', 5)", (SUBID,))
    subscriptions.register(session, 8, "another", "test", "slot8", [], slot_intent=False)
    subscriptions.forget(connect(replica=replica), SUBID)
    query = "SELECT relname FROM pg_attribute a JOIN pg_class c ON c.oid = attrelid WHERE attname = 'subid'"
    query += " AND relkind = 'r' AND relnamespace = 'pgsub'::regnamespace"
    tables = [name for (name,) in session.execute(query.encode())]
    assert {"prepared_pending", "prepared_xact", "copy_chunk", "event"} < set(tables)
    for table in tables:
        rows = session.execute(f"SELECT subid FROM pgsub.{table}".encode()).fetchall()
        assert rows == ([(8,)] if table in ("subscription", "control", "progress") else []), table


#: Two steps that a later version might bring; neither can be done twice.
_TABLE = "CREATE TABLE pgsub.newer (a integer);"
_COLUMN = "ALTER TABLE pgsub.subscription ADD newer integer DEFAULT 5;"


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the program that is under test two versions newer."""
    newest = installation.VERSION

    def upgrade() -> None:
        for number, step in enumerate((_TABLE, _COLUMN), newest + 1):
            monkeypatch.setitem(versions.MIGRATIONS, number, step)
            monkeypatch.setattr(installation, "VERSION", number)

    return upgrade


@pytest.mark.parametrize("older", [False, True])
def test_the_ledger_may_be_installed_or_upgraded_by_several_at_once(
    connect: Connect, later: Callable[[], None], older: bool
) -> None:
    sessions = [connect() for _ in range(4)]
    if older:
        installation.install(sessions[0])
    later()
    together = threading.Barrier(len(sessions))  # all have seen that there is something to do
    failures: list[BaseException] = []

    def install(one: psycopg.Connection) -> None:
        try:
            installation.install(one, together.wait)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=install, args=(one,)) for one in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert installation.installed_version(sessions[0]) == installation.VERSION
    assert sessions[0].execute("SELECT count(*) FROM pgsub.ledger_version").fetchone() == (installation.VERSION,)


def test_a_ledger_of_a_newer_program_is_left_alone(session: psycopg.Connection) -> None:
    session.execute("INSERT INTO pgsub.ledger_version (version) VALUES (%s)", (installation.VERSION + 1,))
    with pytest.raises(StateForbids, match="the ledger on the target has version"):
        installation.install(session)


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_older_ledger_is_upgraded_with_what_it_holds_and_for_the_roles_that_were_granted_it(
    subdb: Database, later: Callable[[], None], by_hand: bool
) -> None:
    role = f"granted {subdb.name}"
    subdb.execute(f'CREATE ROLE "{role}" LOGIN')
    try:
        with target.connect(subdb.conninfo, "test") as owner:
            installation.install(owner)
        subdb.execute(f'GRANT USAGE ON SCHEMA pgsub TO "{role}"')
        subdb.execute(f'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA pgsub TO "{role}"')
        subdb.execute(f"INSERT INTO pgsub.subscription (subid, subname, state_store) VALUES ({SUBID}, 's', 'test')")
        later()
        with target.connect(subdb.server.conninfo(subdb.name, role), "test") as session:
            with pytest.raises(PermissionMissing, match="could not upgrade the ledger") as caught:
                installation.install(session)
            if by_hand:
                subdb.execute((caught.value.hint or "").partition("or run:\n")[2])
            else:
                with target.connect(subdb.conninfo, "test") as owner:
                    installation.install(owner)
            installation.check(session)
            installation.install(session)
            session.execute("INSERT INTO pgsub.newer VALUES (1)")
        assert subdb.value("SELECT newer FROM pgsub.subscription") == 5
    finally:
        subdb.execute(f'DROP OWNED BY "{role}"; DROP ROLE "{role}"')


def test_every_table_of_the_ledger_has_a_primary_key(session: psycopg.Connection) -> None:
    rows = session.execute(
        "SELECT relname FROM pg_class c WHERE relnamespace = 'pgsub'::regnamespace AND relkind = 'r'"
        " AND NOT EXISTS (SELECT FROM pg_index WHERE indrelid = c.oid AND indisprimary)"
    )
    assert rows.fetchall() == []


def _of(subid: int) -> Subscription:
    return Subscription(subid, "s", "", "", (), None)


def test_without_create_on_the_database_the_statement_is_shown(subdb: Database) -> None:
    role = f"nobody_{subdb.name}"
    subdb.execute(f"CREATE ROLE {role} LOGIN")
    try:
        with target.connect(subdb.server.conninfo(subdb.name, role), "test") as session:
            for refused in (installation.check, installation.install):
                with pytest.raises(PermissionMissing) as caught:
                    refused(session)
                assert f'CREATE SCHEMA pgsub AUTHORIZATION "{role}";' in (caught.value.hint or "")
            subdb.execute(f"CREATE SCHEMA pgsub AUTHORIZATION {role}")
            installation.check(session)
            installation.install(session)
            assert origins.attach(session, _of(SUBID)) is None  # works without
    finally:
        subdb.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_take_over_ends_older_sessions_of_its_worker_and_no_others(
    session: psycopg.Connection, connect: Connect
) -> None:
    relid = _relid(session)
    for worker in (APPLY, relid):
        for _ in range(2):
            worker_takeover.take_over(session, SUBID, worker)
    names = {
        "apply": f"pgsub {SUBID} apply 2",
        "apply of another": f"pgsub {SUBID}1 apply 2",
        "sync": f"pgsub {SUBID} sync:{relid} 2",
        "copy": f"pgsub {SUBID} copy:{relid} 1",
        "copy of another": f"pgsub {SUBID} copy:{relid}0 1",
        "launcher": f"pgsub {SUBID} launcher 0",
        "newer": f"pgsub {SUBID} apply 9",
    }
    opened = {role: connect(name) for role, name in names.items()}

    def alive() -> set[str]:
        found = session.execute("SELECT application_name FROM pg_stat_activity WHERE application_name LIKE 'pgsub %'")
        present = {name for (name,) in found.fetchall()}
        return {role for role in opened if names[role] in present}

    assert worker_takeover.take_over(session, SUBID, APPLY).epoch == 3
    assert alive() == set(names) - {"apply"}
    assert worker_takeover.take_over(session, SUBID, relid).epoch == 3
    assert alive() == set(names) - {"apply", "sync", "copy"}


def test_a_take_over_clears_the_claim_and_the_stop_flag(session: psycopg.Connection) -> None:
    worker_takeover.take_over(session, SUBID, APPLY)
    worker_takeover.ask_to_stop(session, SUBID)
    session.execute("UPDATE pgsub.control SET claimed_by = gen_random_uuid()")
    claim = worker_takeover.take_over(session, SUBID, APPLY)
    row = session.execute("SELECT epoch, token::text, claimed_by, stop FROM pgsub.control").fetchone()
    assert row == (claim.epoch, claim.token, None, False)


def test_a_copy_starts_from_i_and_d_only(session: psycopg.Connection) -> None:
    relid = _relid(session)
    claim = worker_takeover.take_over(session, SUBID, relid)
    assert states.start_copy(session, [claim], "one")[claim.worker] == 1
    assert states.start_copy(session, [claim], "two")[claim.worker] == 2
    row = session.execute("SELECT srsubstate::text, sync_slot FROM pgsub.subscription_rel WHERE srrelid = %s", (relid,))
    assert row.fetchone() == ("d", "two")
    for state in "fsr":
        session.execute("UPDATE pgsub.subscription_rel SET srsubstate = %s WHERE srrelid = %s", (state, relid))
        with pytest.raises(Fenced):
            states.start_copy(session, [claim], "three")[claim.worker]


def test_a_copy_is_finished_when_every_chunk_of_the_attempt_is_done(session: psycopg.Connection) -> None:
    relid = _relid(session)
    claim = worker_takeover.take_over(session, SUBID, relid)
    states.start_copy(session, [claim], "slot")[claim.worker]
    attempt = states.start_copy(session, [claim], "slot")[claim.worker]
    insert = "INSERT INTO pgsub.copy_chunk (subid, srrelid, attempt, chunk, xid) VALUES (%s, %s, %s, %s, %s)"
    session.execute(insert, (SUBID, relid, attempt - 1, 0, None))  # of an older attempt: does not count
    session.execute(insert, (SUBID, relid, attempt, 0, "5"))
    session.execute(insert, (SUBID, relid, attempt, 1, None))
    with transactions.durable(session):
        assert not states.finish_copy(session, claim, attempt)
    session.execute("UPDATE pgsub.copy_chunk SET xid = '6' WHERE xid IS NULL")
    with transactions.durable(session):
        assert not states.finish_copy(session, claim, attempt - 1)
        assert states.finish_copy(session, claim, attempt)
    assert _state(session)[0] == "f"
    assert _version(session) == 0  # nothing that apply decides by has changed


def test_s_is_committed_at_once_where_apply_is_not_ahead(session: psycopg.Connection) -> None:
    claim = _copied(session, 100)
    _apply_at(session, "0/64")
    assert handover.try_syncdone(session, [claim], 100).done
    assert _state(session) == ("s", 100, None)
    assert _version(session) == 1


def test_without_a_claim_s_waits_where_apply_is_ahead(session: psycopg.Connection) -> None:
    claim = _copied(session, 100)
    _apply_at(session, "0/65")
    outcome = handover.try_syncdone(session, [claim], 100)
    assert not outcome.done and outcome.handover_lsn is None
    assert _state(session)[0] == "f" and _version(session) == 0


def test_a_claim_fixes_where_the_table_changes_hands(session: psycopg.Connection) -> None:
    claim = _copied(session, 100)
    _apply_at(session, "0/C8")
    assert handover.claim_handover(session, [claim], 150) == 200
    _apply_at(session, "0/12C")  # apply goes on with what the claim covers, and with other tables
    assert handover.claim_handover(session, [claim], 180) == 200  # it stands
    assert not handover.try_syncdone(session, [claim], 199).done
    assert handover.try_syncdone(session, [claim], 200).done
    assert _state(session) == ("s", 200, None)


def test_a_claim_may_lie_with_the_sync_worker(session: psycopg.Connection) -> None:
    claim = _copied(session, 100)
    _apply_at(session, "0/10")
    assert handover.claim_handover(session, [claim], 100) == 100


def test_a_claim_taken_back_is_not_redeemed(session: psycopg.Connection) -> None:
    claim = _copied(session, 100)
    _apply_at(session, "0/C8")
    handover.claim_handover(session, [claim], 100)
    version = _version(session)
    handover.withdraw_claims(session, SUBID, [claim.worker])
    assert _version(session) == version + 1
    _apply_at(session, "0/12C")
    assert not handover.try_syncdone(session, [claim], 200).done
    assert handover.claim_handover(session, [claim], 200) == 300


def test_taking_a_claim_back_too_late_changes_nothing(session: psycopg.Connection) -> None:
    claim = _copied(session, 100)
    assert handover.try_syncdone(session, [claim], 100).done
    handover.withdraw_claims(session, SUBID, [claim.worker])
    assert _state(session) == ("s", 100, None)
    with pytest.raises(Fenced):
        handover.try_syncdone(session, [claim], 100)


def test_ready_is_what_apply_has_passed(session: psycopg.Connection) -> None:
    for name, at in (("a", 100), ("b", 200)):
        assert handover.try_syncdone(session, [_copied(session, at, name)], at).done
    states.set_ready(session, SUBID, 100)
    assert (_state(session, "a"), _state(session, "b")) == (("r", 100, None), ("s", 200, None))
    states.set_ready(session, SUBID, 500)
    assert _state(session, "b") == ("r", 200, None)


def test_a_fenced_sync_worker_changes_no_state(session: psycopg.Connection) -> None:
    claim = _copied(session, 100)
    worker_takeover.take_over(session, SUBID, claim.worker)
    for change in (
        lambda: handover.try_syncdone(session, [claim], 100),
        lambda: handover.claim_handover(session, [claim], 100),
        lambda: states.slot_position(session, [claim], 500),
        lambda: states.start_copy(session, [claim], "slot")[claim.worker],
    ):
        with pytest.raises(Fenced):
            change()
    assert _state(session) == ("f", None, None)


def test_nobody_waits_long_for_applys_row(session: psycopg.Connection, connect: Connect) -> None:
    claim, apply = _copied(session, 100), connect()
    apply.execute("BEGIN")
    apply.execute("SELECT FROM pgsub.progress WHERE worker = 0 FOR UPDATE")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        handover.try_syncdone(session, [claim], 100)
    apply.execute("ROLLBACK")
    assert handover.try_syncdone(session, [claim], 100).done


def _end(session: psycopg.Connection, one: psycopg.Connection) -> None:
    """Close a session and wait until the server has ended it: it lets go of its origin then."""
    pid = one.info.backend_pid
    one.close()
    while session.execute("SELECT FROM pg_catalog.pg_stat_activity WHERE pid = %s", (pid,)).fetchone() is not None:
        pass


def test_origins_of_a_pool_are_one_a_session(session: psycopg.Connection, connect: Connect) -> None:
    subscriptions.register(session, SUBID + 1, "other", "test", "other", [], slot_intent=True)
    sessions = [connect() for _ in range(3)]
    assert [origins.attach(one, _of(SUBID)) for one in sessions] == ["pgsub_7", "pgsub_7_1", "pgsub_7_2"]
    assert origins.attach(connect(), _of(SUBID + 1)) == "pgsub_8"
    _end(session, sessions[1])
    assert origins.attach(connect(), _of(SUBID)) == "pgsub_7_1"


def test_origins_are_dropped_with_their_subscription_only(session: psycopg.Connection, connect: Connect) -> None:
    subscriptions.register(session, 71, "other", "test", "other", [], slot_intent=True)
    for subid in (SUBID, SUBID, 71):
        one = connect()
        origins.attach(one, _of(subid))
        one.execute("SELECT pg_replication_origin_session_reset()")
    other = connect()
    origins.attach(other, _of(SUBID))
    _end(session, other)
    origins.drop_all(session, SUBID)
    rows = session.execute("SELECT roname FROM pg_replication_origin WHERE roname LIKE 'pgsub_7%'").fetchall()
    assert rows == [("pgsub_71",)]


def test_who_changes_several_tables_at_once_takes_them_in_the_order_of_their_oids(
    session: psycopg.Connection, connect: Connect
) -> None:
    first, second = sorted((_relid(session), _relid(session, "b")))
    session.execute("UPDATE pgsub.subscription_rel SET relname = relname WHERE srrelid = %s", (first,))
    other = connect()
    other.execute("SET enable_indexscan = off; SET enable_bitmapscan = off")  # the second one now comes first
    changing = threading.Thread(target=handover.withdraw_claims, args=(other, SUBID, [first, second]))
    locked = "SELECT FROM pgsub.subscription_rel WHERE srrelid = %s FOR UPDATE NOWAIT"
    waits = "SELECT count(*) > 0 FROM pg_locks WHERE pid = %s AND NOT granted"
    with session.transaction():
        session.execute(locked, (first,))
        changing.start()
        while session.execute(waits, (other.info.backend_pid,)).fetchone() == (False,):
            assert changing.is_alive()
        session.execute(locked, (second,))  # a deadlock, if the other held it
    changing.join()
