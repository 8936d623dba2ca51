"""The rules by which a subscription gets another slot, in every interleaving with crashes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models.model_explorer import explore
from models.reconcile_model import Failure, Reconcile, Rules

SOUND = {
    "a table was replicated": Rules(),
    "a table was being copied": Rules(copying=True),
    "the publisher went back in time": Rules(goes_back=True),
    "the publisher went back in time while a table was being copied": Rules(goes_back=True, copying=True),
}


@pytest.mark.long
@pytest.mark.parametrize("rules", SOUND.values(), ids=SOUND.keys())
def test_the_target_ends_with_the_publishers_rows_when(rules: Rules) -> None:
    found = explore(Reconcile(rules))
    assert found.failure is None, found.trace
    assert found.good_ends > 0
    assert found.stranded == 0


BROKEN = {
    "nothing says beforehand that a slot is made": Rules(says_so_before=False, goes_back=True),
    "apply starts while a slot is made": Rules(apply_heeds_it=False, goes_back=True),
    "a command that fails says no more that an earlier one may have made a slot": Rules(
        keeps_saying_so=False, goes_back=True
    ),
    "an apply worker of the old slot lives on": Rules(fences_apply=False, goes_back=True),
    "the position moves before the tables": Rules(moves_in_one_commit=False),
    "the tables are chosen by what they were when the command began": Rules(looks_in_the_commit=False, copying=True),
    "a task of an older sync worker lives on": Rules(ends_older_tasks=False, copying=True),
}


@pytest.mark.parametrize("rules", BROKEN.values(), ids=BROKEN.keys())
def test_it_is_found_out_when(rules: Rules) -> None:
    found = explore(Reconcile(rules))
    assert found.failure is Failure.DIFFERS
    assert found.trace
    whole = replace(Rules(), goes_back=rules.goes_back, copying=rules.copying)
    assert whole in SOUND.values()
