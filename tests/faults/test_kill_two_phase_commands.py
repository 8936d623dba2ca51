"""kill -9 of the commands that change two_phase: the slot is never two-phase without the ledger, and nothing stays
prepared. And the way there, with transactions that are prepared all the time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fix_faults import Site

pytestmark = pytest.mark.long

Make = Callable[[], Site]

_SLOT = "SELECT two_phase FROM pg_replication_slots WHERE slot_name = %s"
_LEDGER = "SELECT two_phase::text FROM pgsub.subscription"
_STORED = "SELECT subtwophasestate FROM pg_subscription"
_PREPARED = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"


def _made(case: Site) -> Site:
    """A subscription with two_phase from the start that nobody serves and nobody writes for."""
    case.make("audit1").stop()
    case.writer = None
    case.end(case.create("--two-phase", "--no-copy-data", "--no-wait"))
    return case


def _state(case: Site) -> tuple[object, ...]:
    return case.pubdb.value(_SLOT, case.name), case.subdb.value(_LEDGER), case.sqlite(_STORED)[0][0]


@pytest.mark.parametrize("point", ["create.after_ledger", "create.after_slot"])
def test_a_create_that_was_killed_leaves_no_two_phase_slot_that_the_ledger_does_not_know(
    site: Make, point: str
) -> None:
    case = site()
    case.make("audit1").stop()
    words = ("--two-phase", "--no-copy-data", "--no-wait")
    case.killed(case.create(*words, points={point: "kill"}))
    assert case.fired(point)
    assert case.subdb.value(_LEDGER) == "e"
    case.end(case.create(*words))
    assert _state(case) == (True, "e", "e")
    assert case.pubdb.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 1


def test_an_alter_that_was_killed_at_any_step_is_finished_by_the_next_one(site: Make) -> None:
    case = _made(site())
    case.end(case.start("disable", case.name))
    words = ("alter", case.name, "--no-two-phase")
    case.killed(case.start(*words, points={"alter.after_slot": "kill"}))
    assert _state(case) == (False, "e", "e")  # e: it may be, and the next start would make it so
    case.killed(case.start(*words, points={"alter.after_ledger": "kill"}))
    assert _state(case) == (False, "d", "e")
    case.end(case.start(*words))
    assert _state(case) == (False, "d", "d")
    case.disarm("alter.after_ledger")
    case.arm("alter.after_ledger")
    words = ("alter", case.name, "--two-phase")
    case.killed(case.start(*words, points={"alter.after_ledger": "kill"}))
    assert _state(case) == (False, "p", "d")
    case.end(case.start(*words))
    assert _state(case) == (False, "p", "p")


def test_a_drop_that_was_killed_half_way_is_finished_by_the_next_one(site: Make) -> None:
    case = _made(site())
    gid = f"pgsub_{case.subdb.value('SELECT subid FROM pgsub.subscription')}_1_16B3748"
    with case.subdb.connect() as session:
        session.execute("BEGIN; INSERT INTO audit1 VALUES (1, 'x')")
        session.execute("INSERT INTO pgsub.prepared_xact SELECT subid, %s FROM pgsub.subscription", (gid,))
        session.execute(f"PREPARE TRANSACTION '{gid}'".encode())
    case.killed(case.start("drop", case.name, "--yes", points={"drop.after_slots": "kill"}))
    assert case.fired("drop.after_slots")
    assert case.subdb.value(_PREPARED) == 1 and case.subdb.value(_LEDGER) == "e"
    assert case.pubdb.value(_SLOT, case.name) is None
    case.end(case.start("drop", case.name, "--yes"))
    assert f'rolled back prepared transaction "{gid}"' in case.said()
    assert case.subdb.value(_PREPARED) == 0 and case.subdb.value("SELECT count(*) FROM audit1") == 0
    assert case.subdb.value("SELECT count(*) FROM pgsub.subscription") == 0 and case.sqlite(_STORED) == []


def test_tables_that_are_prepared_for_all_the_time_lose_nothing_on_the_way_to_two_phase(site: Make) -> None:
    case = site()
    writer = case.make("keyed1", "counter1", "audit1", prepare=True)
    case.end(case.create("--two-phase"))
    assert _state(case) == (True, "e", "e") and "pending" not in case.said()  # it ends no sooner
    writer.some(20)
    writer.rest()
    case.end(case.run())
    case.check()
    assert case.subdb.value(_PREPARED) == 0
