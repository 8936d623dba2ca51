"""The rules of the switchover: runs of the command die, begin anew and change their mind at any step."""

from __future__ import annotations

import pytest
from models.model_explorer import explore
from models.switchover_model import Failure, Rules, Switchover


@pytest.mark.long
def test_no_order_of_steps_makes_both_sides_writable_or_loses_or_strands_anything() -> None:
    found = explore(Switchover(Rules()))
    assert found.failure is None, found.trace
    assert found.good_ends > 0
    assert found.stranded == 0


BROKEN: dict[str, tuple[Rules, Failure]] = {
    "a release does not exclude that the right is given": (
        Rules(giving_excludes_release=False),
        Failure.BOTH_WRITABLE,
    ),
    "the taking side takes what was not given": (Rules(taken_only_when_given=False), Failure.BOTH_WRITABLE),
    "what was given is released at once": (Rules(declined_before_release=False), Failure.BOTH_WRITABLE),
    "a side that has declined takes": (Rules(declined_is_final=False), Failure.BOTH_WRITABLE),
    "sessions from before the fence stay": (Rules(old_sessions_end=False), Failure.BOTH_WRITABLE),
    "sessions from before the fence of the taking side stay": (
        Rules(old_sessions_end_there=False),
        Failure.GIVEN_TWICE,
    ),
    "apply is not waited for": (Rules(drained=False), Failure.LOST),
    "sequences are read before the fence": (Rules(sequences_behind_the_fence=False), Failure.GIVEN_TWICE),
    "a sequence is set to an older value": (Rules(sequences_never_go_backward=False), Failure.GIVEN_TWICE),
    "the slot goes to where the taking side is by then": (
        Rules(slot_position_is_recorded=False),
        Failure.NO_WAY_BACK,
    ),
    "the slot's position is recorded before all is applied": (
        Rules(slot_position_after_drain=False),
        Failure.SENT_BACK,
    ),
    "a server that answers is taken for gone": (Rules(gone_does_not_answer=False), Failure.BOTH_WRITABLE),
}


@pytest.mark.long
@pytest.mark.parametrize(("rules", "failure"), BROKEN.values(), ids=BROKEN.keys())
def test_it_is_found_out_when(rules: Rules, failure: Failure) -> None:
    found = explore(Switchover(rules))
    assert found.failure is failure, (found.failure, found.trace)
    assert found.trace


@pytest.mark.long
@pytest.mark.parametrize("rules", [Rules(ends_without_giving=False), Rules(released_without_taking=False)])
def test_where_a_server_dies_for_good_it_could_not_be_ended_without(rules: Rules) -> None:
    found = explore(Switchover(rules))
    assert found.failure is None, found.trace
    assert found.stranded > 0
