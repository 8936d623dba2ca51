"""The rules of durability: a target with asynchronous commit may crash at any moment."""

from __future__ import annotations

import pytest
from models.durability_model import Durability, Failure, Rules
from models.model_explorer import explore
from thorough import only_thorough, thorough

SOUND: dict[str, Rules] = {
    "all rules hold": Rules(),
    **dict(thorough([("the restart of the streams guards alone", Rules(compare_and_set=False))])),
}


@pytest.mark.long
@pytest.mark.parametrize("rules", SOUND.values(), ids=SOUND.keys())
def test_a_crash_of_the_target_loses_doubles_and_strands_nothing_when(rules: Rules) -> None:
    found = explore(Durability(rules))
    assert found.failure is None, found.trace
    assert found.good_ends > 0
    assert found.stranded == 0


@only_thorough
def test_compare_and_set_alone_loses_nothing_but_may_wait_for_ever_for_the_next_transaction() -> None:
    found = explore(Durability(Rules(lost_session_restarts_the_streams=False)))
    assert found.failure is None, found.trace
    assert found.good_ends > 0
    assert found.stranded > 0


BROKEN: dict[str, tuple[Rules, Failure]] = {
    "workers reconnect and go on where they remember to be": (
        Rules(compare_and_set=False, lost_session_restarts_the_streams=False),
        Failure.LOST,
    ),
    "commits are confirmed before they are durable": (
        Rules(feedback_follows_durable_commits=False),
        Failure.CONFIRMED_TOO_MUCH,
    ),
    "commits are confirmed before they are durable and only compare-and-set guards": (
        Rules(feedback_follows_durable_commits=False, lost_session_restarts_the_streams=False),
        Failure.CONFIRMED_TOO_MUCH,
    ),
    "a keepalive is confirmed while commits before it are not durable": (
        Rules(keepalives_wait_for_durable_commits=False),
        Failure.CONFIRMED_TOO_MUCH,
    ),
    "the sync slot is dropped when s is committed but not durable": (
        Rules(slot_outlives_a_volatile_s=False),
        Failure.SLOT_GONE,
    ),
    "the sync slot is dropped when s is not durable and only compare-and-set guards": (
        Rules(slot_outlives_a_volatile_s=False, lost_session_restarts_the_streams=False),
        Failure.SLOT_GONE,
    ),
}


@only_thorough
@pytest.mark.parametrize(("rules", "failure"), BROKEN.values(), ids=BROKEN.keys())
def test_it_is_found_out_when(rules: Rules, failure: Failure) -> None:
    found = explore(Durability(rules))
    assert found.failure is failure
    assert found.trace
