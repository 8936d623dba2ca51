"""The rules of several writers: sessions die at any point, tasks run twice, table states change meanwhile."""

from __future__ import annotations

import pytest
from models.model_explorer import explore
from models.writers_model import Failure, Rules, Writers
from thorough import only_thorough

pytestmark = pytest.mark.long


def test_no_order_of_steps_shows_a_state_that_the_publisher_never_had_or_strands_anything() -> None:
    found = explore(Writers(Rules()))
    assert found.failure is None, found.trace
    assert found.good_ends > 0
    assert found.stranded == 0


BROKEN: dict[str, tuple[Rules, Failure]] = {
    "a unit commits wherever the ledger is": (Rules(compared_and_set=False), Failure.NEVER_WAS),
    "the epoch is not looked at": (Rules(fenced=False), Failure.FENCED),
    "table states may have changed": (Rules(states_compared=False), Failure.NEVER_WAS),
    "a missing row is skipped before its turn": (Rules(deviations_fail=False), Failure.NEVER_WAS),
    "a trigger may fire early": (Rules(barriers_stand_alone=False), Failure.NEVER_WAS),
    "a fault is named where it shows first": (Rules(named_by_replay=False), Failure.WRONG_BLAME),
}


@pytest.mark.parametrize(("rules", "failure"), BROKEN.values(), ids=BROKEN.keys())
def test_it_is_found_out_when(rules: Rules, failure: Failure) -> None:
    found = explore(Writers(rules))
    assert found.failure is failure, (found.failure, found.trace)
    assert found.trace


@pytest.mark.parametrize("rules", [Rules(order_awaited_on_target=False), Rules(holder_up_awaited_on_target=False)])
def test_units_that_wait_off_the_target_wait_for_ever_in_a_deadlock_that_no_server_sees(rules: Rules) -> None:
    found = explore(Writers(rules))
    assert found.failure is None, found.trace
    assert found.stranded > 0


@only_thorough
def test_keys_only_spare_work_because_the_target_finds_a_dependency_too() -> None:
    found = explore(Writers(Rules(dependents_wait=False)))
    assert found.failure is None, found.trace
    assert found.stranded == 0
