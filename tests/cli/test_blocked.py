"""A subscription that does not get on: the state blocked, what waits behind it, and the steps that lead out."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pgsub.catalog.rows import ConflictRow, ErrorRow, SlotRow, WorkerRow
from pgsub.catalog.times import ago
from pgsub.cli.pages import PAGES
from pgsub.common.errors import ApplyError, PgsubError, PublisherUnavailable, SchemaFault, SlotLost, TargetUnavailable

MESSAGE = 'conflict detected on relation "My.s.t": conflict=insert_exists'
CONFLICT = ConflictRow(
    *(5, "orders", "insert_exists", "My.s", "t", "stopped"),
    key="(id)=(1)",
    finish_lsn=0x14C0378,
    local_conflicts=[
        {
            "index": "t_pkey",
            "key": '(id, "Day")=(1, O\'Hara)',
            "key_columns": ["id", "Day"],
            "row": {"id": "1", "Day": "O'Hara", "v": None},
        },
        {"index": "t_day", "key": "…", "key_columns": ["Day"], "row": {"id": "1", "Day": "O'Hara", "v": None}},
        {"index": "t_lower", "key": "(lower(v))=(x)", "row": {"id": "2", "Day": "y", "v": "X"}},
    ],
)


@pytest.fixture
def failed(store):
    """Let apply end with an error, so many times at one position."""

    def fail(error: PgsubError, times: int = 1, position: int | None = 0x14C0000, worker: str = "apply") -> None:
        for _ in range(times):
            store.record_error(5, ErrorRow.of(error, worker, position))

    return fail


def _conflict() -> ApplyError:
    error = ApplyError(MESSAGE, detail="Key already exists.", sqlstate="23505")
    error.relation, error.finish_lsn, error.xid, error.conflict = "My.s.t", "0/14C0378", 733, "insert_exists"
    return error


@pytest.fixture
def orders(pgsub, valid):
    """The subscription object of "orders"."""
    return lambda: valid("status", pgsub("status", "orders", "--json").stdout)["subscriptions"][0]


@pytest.mark.long
def test_it_is_blocked_after_two_restarts_from_one_position_with_nothing_applied(store, served, failed, orders):
    failed(_conflict(), 2)
    assert (orders()["state"], orders()["blocked"]) == ("error", None)
    failed(TargetUnavailable("deadlock detected", sqlstate="40P01"))  # whatever it ends with
    found = orders()
    assert (found["state"], found["blocked"]["restarts"], found["blocked"]["reason"]) == (
        "blocked",
        2,
        "deadlock detected",
    )
    failed(_conflict(), position=0x14C0001)
    assert orders()["state"] == "error"  # something was applied meanwhile
    store.alter(5, enabled=False)
    failed(_conflict(), 3)
    assert (orders()["state"], orders()["blocked"]) == ("disabled", None)


@pytest.mark.parametrize(
    "error", [PublisherUnavailable("gone"), TargetUnavailable("lost"), TargetUnavailable("going", sqlstate="57P01")]
)
def test_servers_that_are_not_there_block_nothing(served, failed, orders, error):
    failed(error, 5)
    assert orders()["state"] == "error"


@pytest.mark.long
def test_who_is_blocked_sees_what_waits_and_how_long_it_may(store, served, failed, orders, pgsub):
    failed(_conflict(), 3)
    conflict = store.add_conflict(CONFLICT)
    slot = SlotRow(
        "orders",
        retained_bytes=3 << 20,
        current_lsn=0x14C0000 + (2 << 20),
        safe_wal_size=7200,
        taken_at="2026-01-01T00:00:00Z",
    )
    store.put_slot(5, slot)
    found = orders()["blocked"]
    since = store.errors(5)[0].first_at
    assert found == {
        **{"since": since, "restarts": 2, "position": "0/14C0000", "finish_lsn": "0/14C0378", "reason": MESSAGE},
        **{"waiting_transactions": None, "waiting_at_least": False},
        **{"waiting_bytes": 2 << 20, "retained_bytes": 3 << 20, "slot_lost_in": None},
        "next": f"pgsub conflicts show orders {conflict}",
    }
    store.put_slot(5, replace(slot, confirmed_flush_lsn=0x14C0000 + (1 << 20)))
    assert (orders()["blocked"]["position"], orders()["blocked"]["waiting_bytes"]) == ("0/15C0000", 1 << 20)
    for rate, left in ((2, 3600), (0, None)):
        store.put_slot(5, SlotRow("orders", safe_wal_size=7200, wal_bytes_per_second=rate))
        assert orders()["blocked"]["slot_lost_in"] == left
    store.put_slot(5, SlotRow("orders", safe_wal_size=-1, wal_bytes_per_second=2))
    assert (orders()["blocked"]["slot_lost_in"], orders()["blocked"]["waiting_bytes"]) == (0, None)
    store.put_slot(5, SlotRow("orders", safe_wal_size=7200, wal_bytes_per_second=2, retained_bytes=3 << 20))
    shown = _shown(pgsub)
    assert (shown["retained"], shown["slot_lost_in"], shown["reason"]) == ("3072 kB", "1 h 0 min", MESSAGE)
    assert pgsub("status", "orders", "--check").returncode == 6
    for more, said in (
        (False, "7 transactions behind it, 2048 kB"),
        (True, "at least 7 transactions behind it, 2048 kB"),
    ):
        store.put_slot(5, replace(slot, waiting_transactions=7, waiting_at_least=more))
        assert (_shown(pgsub)["waiting"], orders()["blocked"]["waiting_at_least"]) == (said, more)


def test_apply_that_waits_for_what_the_subscription_itself_has_prepared_is_blocked(
    store, served, failed, orders, pgsub, valid
):
    gid, since = "pgsub_5_734_1A2B", ago(3)
    lock = f"a lock that the subscription's prepared transaction {gid} holds"
    waiting = WorkerRow("apply", 4711, silent_since=since, waits_for=lock)
    store.put_workers(5, [waiting])
    store.put_slot(5, SlotRow("orders", confirmed_flush_lsn=0x10, current_lsn=0x30))
    for _ in range(2):
        found = orders()
        names = ("since", "restarts", "position", "waiting_bytes", "reason", "next")
        assert [found["blocked"][name] for name in names] == [
            *(since, 0, "0/10", 0x20, f"apply waits for {lock}", "pgsub status orders --runbook")
        ]
        checked = pgsub("status", "orders", "--check")
        assert (found["state"], checked.returncode) == ("blocked", 8) and lock in checked.stderr
        assert "--runbook" in checked.stderr and _shown(pgsub)["reason"] == f"apply waits for {lock}"
        failed(PublisherUnavailable("gone"))  # earlier
    statements = [line for *_, lines in _steps(pgsub, valid) for line in lines]
    assert f"COMMIT PREPARED '{gid}';" in statements and f"ROLLBACK PREPARED '{gid}';" in statements
    store.put_workers(5, [replace(waiting, waits_for=f"a lock that PID 7 holds (app, x): {lock}")])
    assert orders()["state"] == "error"


def _shown(pgsub):
    shown = dict(line.split(" | ", 1) for line in pgsub("status", "orders").stdout.splitlines() if " | " in line)
    return {name.strip(): text for name, text in shown.items()}


def _steps(pgsub, valid):
    document = valid("status", pgsub("status", "orders", "--runbook", "--json").stdout)
    return [(one["text"], one["commands"], one["statements"]) for one in document["runbook"]]


def test_the_runbook_of_a_conflict_names_rows_and_positions(store, served, failed, pgsub, valid, monkeypatch):
    monkeypatch.setitem(PAGES, "skip-lsn", PAGES["status"])
    failed(_conflict(), 3)
    store.add_conflict(CONFLICT)
    what, compare, change, preview, skip, hold, see = _steps(pgsub, valid)
    assert what[0].startswith("Apply stopped, 3 times since 2") and MESSAGE in what[0]
    assert compare[1] == ["pgsub conflicts show orders 1"]
    assert change[2] == ["""DELETE FROM "My.s"."t" WHERE "id" = '1' AND "Day" = 'O''Hara';"""]
    assert preview[1] == [
        "pgsub skip-lsn orders 0/14C0378 --rows conflicting --preview",
        "pgsub skip-lsn orders 0/14C0378 --preview",
    ]
    assert skip[1] == ["pgsub skip-lsn orders 0/14C0378 --rows conflicting", "pgsub skip-lsn orders 0/14C0378"]
    assert hold[1] == ["pgsub alter orders --hold My.s.t"]
    assert see[1] == ["pgsub wait orders --for caught-up --timeout 1m"]
    text = pgsub("status", "orders", "--runbook").stdout
    assert text.startswith("1. Apply stopped") and "\n       pgsub conflicts show orders 1\n" in text
    store.put_origin(5, 0x14C0379, None)  # what is left of it is kept for a table that is released: nobody sends it
    assert _steps(pgsub, valid) == [what, compare, change, skip, hold, see]


def test_the_next_command_is_told_before_it_is_blocked_and_when_it_is_disabled_too(store, served, failed, pgsub):
    failed(_conflict())
    store.add_conflict(CONFLICT)
    assert _shown(pgsub)["next"] == "pgsub conflicts show orders 1"
    store.alter(5, enabled=False)
    assert _shown(pgsub)["next"] == "pgsub status orders --runbook"


@pytest.mark.long
def test_the_runbook_of_other_faults_has_their_hints(store, failed, pgsub, valid):
    ddl = 'ALTER TABLE "public"."t" ADD COLUMN "v" text;'
    failed(SchemaFault("column missing", hint=f"Run this on the target; apply continues by itself:\n{ddl}"))
    failed(ApplyError("check failed", hint="Change the row."), worker="table synchronization 9")
    store.alter(5, enabled=False)
    steps = _steps(pgsub, valid)
    assert ("Run this on the target; apply continues by itself:", [], [ddl]) in steps
    assert ("Change the row.", [], []) in steps and any("table synchronization 9 stopped" in text for text, *_ in steps)
    assert ["pgsub enable orders"] in [commands for _, commands, _ in steps]
    store.clear_error(5)
    failed(SlotLost("slot is gone", hint="Look.\npgsub status orders"))
    assert _steps(pgsub, valid)[1:] == [("Look.", ["pgsub status orders"], [])]
    store.clear_error(5)
    failed(SlotLost("slot is gone"))
    look, again = _steps(pgsub, valid)[1:]
    assert look[1] == ["pgsub reconcile orders --dry-run"]
    assert again[0].startswith("Create another slot") and again[1] == ["pgsub reconcile orders"]


def test_the_runbook_of_a_subscription_without_tables_names_its_publications(store, pgsub):
    store.alter(7, enabled=True)
    shown = pgsub("status", "bills", "--runbook").stdout
    assert 'check on the publisher that "pub" exists and publishes a table' in shown
    assert "pgsub refresh bills" in shown
    store.record_error(7, ErrorRow("publications", "PublicationMissing", 'publication "pub" does not exist'))
    shown = pgsub("status", "bills", "--runbook").stdout
    assert re.search(r"1\. Since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC: ", shown)
    assert "if its name is mistyped" in shown and "pgsub alter bills --set-publication NAME\n" in shown
    assert "verify" not in shown


def test_without_trouble_there_is_nothing_to_do_and_the_runbook_is_of_one_subscription(served, pgsub, valid):
    assert _steps(pgsub, valid) == []
    assert pgsub("status", "orders", "--runbook").stdout == 'Nothing is to be done: subscription "orders" is running.\n'
    assert pgsub("status", "--runbook").returncode == 2
    assert pgsub("status", "orders", "--runbook", "--check").returncode == 2


def test_no_value_of_a_key_chooses_the_columns_of_a_statement_to_paste(store, served, failed, pgsub, valid):
    there = {"index": "t_v", "key": '(v)=(x"status")=()', "row": {"id": "1", "v": 'x"status")=(', "status": "active"}}
    failed(_conflict(), 3)
    store.add_conflict(replace(CONFLICT, local_conflicts=[there]))
    assert [statements for *_, statements in _steps(pgsub, valid) if statements] == []
    store.add_conflict(replace(CONFLICT, local_conflicts=[{**there, "key_columns": ["v"]}]))
    pasted = """DELETE FROM "My.s"."t" WHERE "v" = 'x"status")=(';"""
    assert [statements for *_, statements in _steps(pgsub, valid) if statements] == [[pasted]]


@pytest.mark.long
def test_no_row_in_the_way_of_a_copy_is_named_by_the_text_of_an_error(store, failed, pgsub, valid):
    worker = f"table synchronization {store.relations(5)[0].srrelid}"
    detail = 'Key (v)=(x) already exists. Key ("status")=(active) already exists.'
    failed(ApplyError("duplicate key", detail=detail, sqlstate="23505"), worker=worker)
    assert [statements for *_, statements in _steps(pgsub, valid) if statements] == []
    store.add_conflict(replace(CONFLICT, finish_lsn=0, worker=worker))
    pasted = """DELETE FROM "My.s"."t" WHERE "id" = '1' AND "Day" = 'O''Hara';"""
    assert [statements for *_, statements in _steps(pgsub, valid) if statements] == [[pasted]]
