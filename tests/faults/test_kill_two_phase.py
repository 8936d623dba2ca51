"""kill -9 and crashes between any two steps of PREPARE and COMMIT PREPARED, and of transactions applied early.

After each, both sides are equal again and nothing stays prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest
from fix_faults import Site, Writer, until

pytestmark = pytest.mark.long

if TYPE_CHECKING:
    from fix_servers import Pair

Make = Callable[..., Site]

TABLES = ("keyed1", "counter1", "audit1")
STEPS = (
    "apply.before_prepare",
    "apply.after_prepare",  # the ledger does not know of it yet
    "apply.before_target_commit",  # of the ledger, after PREPARE or after COMMIT PREPARED
    "apply.before_finish_prepared",
    "apply.after_finish_prepared",  # committed, and the ledger does not know
    "apply.after_target_commit",
)
STREAM = ("apply.stream_open", "apply.before_target_commit", "apply.after_target_commit")
_PREPARED = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
_LEFT = "SELECT (SELECT count(*) FROM pgsub.prepared_xact) + (SELECT count(*) FROM pgsub.prepared_pending)"


def _nothing_prepared(case: Site) -> bool:
    return case.subdb.value(_PREPARED) == 0 and case.subdb.value(_LEFT) == 0


def _kill_at_each(case: Site, writer: Writer, steps: Sequence[str]) -> None:
    for step in steps:
        case.wait_equal()  # also: the kill before this one was survived
        writer.resume()
        epoch = case.epoch()
        case.arm(step)
        case.wait_fired(step)
        until(lambda before=epoch: case.epoch() > before, "the launcher started no other worker")
    case.wait_equal()


def test_a_worker_killed_between_any_two_steps_of_two_phase_commit_loses_and_repeats_nothing(site: Make) -> None:
    case = site()
    writer = case.make_ready(*TABLES, prepare=True)
    case.disarm(*STEPS)
    process = case.serve(points=dict.fromkeys(STEPS, "kill"))
    _kill_at_each(case, writer, STEPS)
    until(lambda: _nothing_prepared(case), "something stayed prepared")
    case.terminate(process)
    case.check()


def test_a_worker_killed_while_it_applies_early_loses_and_repeats_nothing(site: Make) -> None:
    case = site()
    writer = case.make_ready(*TABLES)
    case.pubdb.execute(f"ALTER DATABASE {case.pubdb.name} SET debug_logical_replication_streaming = immediate")
    case.disarm(*STREAM)
    process = case.serve(points=dict.fromkeys(STREAM, "kill"))
    _kill_at_each(case, writer, STREAM)
    case.terminate(process)
    case.check()


def test_crashes_of_target_and_publisher_in_two_phase_commit_lose_and_repeat_nothing(
    own_pair: Callable[..., Pair], site: Make
) -> None:
    pair = own_pair()
    case = site(pair.pubdb, pair.subdb)
    writer = case.make_ready(*TABLES, prepare=True)
    steps = STEPS[1], STEPS[4]
    case.disarm(*steps)
    gate = case.points.parent / "gate"
    process = case.serve(points=dict.fromkeys(steps, f"pause:{gate}"))
    for step, servers in zip(steps, ((pair.target,), (pair.publisher, pair.target)), strict=True):
        case.wait_equal()
        writer.resume()
        case.arm(step)
        case.wait_fired(step)
        for server in servers:
            case.crash(server)
        epoch = case.epoch()
        gate.touch()
        until(lambda before=epoch: case.epoch() > before, "no new worker")
        gate.unlink()
        writer.some(5)
    case.wait_equal()
    until(lambda: _nothing_prepared(case), "something stayed prepared")
    case.terminate(process)
    case.check()
