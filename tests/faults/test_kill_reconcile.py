"""kill -9 of ``reconcile`` and crashes of both servers at every step, with writes all the time: apply does not go on
from half a slot, nothing is left over, and in the end the rows are equal."""

from __future__ import annotations

from collections.abc import Callable

import patience
import psycopg
import pytest
from fix_faults import Site, until
from fix_servers import Pair
from forked import Started

pytestmark = pytest.mark.long

Make = Callable[..., Site]

#: Steps after which the position of apply has not moved, and those after which it has.
BEFORE = ("journalled", "begun", "fenced", "rolled_back", "dropped", "created")
STEPS = (*(f"reconcile.{name}" for name in BEFORE), "refresh.before_commit", "refresh.after_commit", "reconcile.moved")
MOVED = ("refresh.after_commit", "reconcile.moved")
_SLOTS = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"


def serve(case: Site, points: dict[str, str] | None = None) -> Started:
    """A launcher that has the subscription."""
    process = case.serve(points=points)
    until(lambda: bool(case.sqlite("SELECT 1 FROM pgsub_server")), "the launcher does not serve")
    return process


def lose(case: Site) -> None:
    """Drop every slot of the subscription, with changes behind them."""

    def gone() -> bool:
        try:
            case.pubdb.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
            case.pubdb.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active")
        except psycopg.Error:
            pass  # a worker was faster
        return case.pubdb.rows(_SLOTS) == []

    until(gone, "a slot stays")
    assert case.writer is not None
    case.writer.some(10)


def reconcile(case: Site, points: dict[str, str] | None = None) -> Started:
    """The command, which leaves the comparison to a launcher."""
    return case.start("reconcile", case.name, "--yes", "--no-wait", points=points)


@pytest.mark.parametrize("prepare", [False, True], ids=["", "two-phase"])
def test_a_command_killed_at_any_step_is_gone_on_with_by_the_next(site: Make, *, prepare: bool) -> None:
    case = site()
    writer = case.make_ready("audit1", "keyed1", "counter1", prepare=prepare)
    process = serve(case)
    for step in STEPS:
        case.wait_equal()
        writer.resume()
        lose(case)
        position = case.ledger("remote_lsn")
        case.killed(reconcile(case, points={step: "kill"}))
        assert case.fired(step)
        writer.some(10)
        assert (case.ledger("remote_lsn") != position) == (step in MOVED), step
        assert set(case.pubdb.rows(_SLOTS)) <= {(case.name,)} or step in MOVED
        case.end(reconcile(case))
        case.wait_ready()
        assert case.subdb.value("SELECT count(*) FROM pgsub.subscription WHERE new_slot IS NOT NULL") == 0
    case.wait_equal()
    if prepare:
        assert case.subdb.value("SELECT two_phase FROM pgsub.subscription") == "e"
        assert case.subdb.value("SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()") == 0
    case.terminate(process)
    case.check()
    outcomes = [
        row[0] for row in case.sqlite("SELECT detail ->> 'outcome' FROM pgsub_journal WHERE action = 'reconcile'")
    ]
    assert outcomes.count("done") >= len(STEPS)


@pytest.mark.parametrize(
    "steps",
    [
        ("sync.before_slot", "sync.after_slot", "adopt.compared", "adopt.before_commit"),
        ("adopt.after_commit", "sync.after_f", "sync.before_s", "sync.after_s"),
    ],
    ids=["before the commit", "from the commit on"],
)
def test_a_launcher_killed_while_tables_are_compared_is_followed_by_one_that_goes_on(
    site: Make, steps: tuple[str, ...]
) -> None:
    case = site()
    writer = case.make_ready("audit1", "keyed1", "counter1")
    process = serve(case)
    for step in steps:
        case.wait_equal()
        writer.resume()
        case.terminate(process)
        lose(case)
        case.end(reconcile(case))
        last = case.serve(points={step: "kill:LAUNCHER"})
        case.wait_fired(step)
        case.killed(last)
        process = serve(case)
        writer.some(10)
        case.wait_ready()
    case.wait_equal()
    case.terminate(process)
    case.check()


def test_a_command_under_which_either_server_crashes_is_gone_on_with(own_pair: Callable[..., Pair], site: Make) -> None:
    pair = own_pair(target={"wal_writer_delay": "10s"})
    case = site(pair.pubdb, pair.subdb)
    writer = case.make_ready("audit1", "keyed1", "counter1")
    process = serve(case)
    for step in STEPS:
        for server in (pair.publisher, pair.target):
            case.wait_equal()
            writer.resume()
            lose(case)
            go_on = case.points.parent / "go on"
            go_on.unlink(missing_ok=True)
            (case.points / step).unlink(missing_ok=True)
            command = reconcile(case, points={step: f"pause:{go_on}"})
            case.wait_fired(step)
            case.crash(server)
            go_on.touch()
            command.wait(patience.SECONDS)
            writer.some(10)
            until(lambda: _tried_again(case), lambda: f"it does not go on\n{case.said()}")
            case.wait_ready()
    case.wait_equal()
    case.terminate(process)
    case.check()


def _tried_again(case: Site) -> bool:
    """Repeat the command until there is nothing left to do."""
    code = reconcile(case).wait(patience.SECONDS)
    assert code in (0, 3, 4, 5), case.said()
    return code in (0, 3)
