"""The rules of change sets: set-based execution never differs from what the server's apply worker would do."""

from __future__ import annotations

import pytest
from models.change_set_model import Rules
from models.change_set_trials import Difference, compare
from thorough import only_thorough

BATCHES = 20_000


def test_with_all_rules_a_change_set_never_differs_from_serial_execution() -> None:
    found = compare(Rules(), unique=False, batches=BATCHES)
    assert found.set_based > BATCHES // 3
    assert found.fallbacks > 0
    assert found.differences == {}, found.examples


D = Difference
BROKEN: dict[str, tuple[Rules, set[Difference]]] = {
    "no rule holds": (
        Rules(False, False, False, False),
        set(Difference),
    ),
    "only key changes are executed serially": (
        Rules(True, False, False, False),
        {D.RECORDS, D.LOCAL_COLUMN, D.HIDES_CONFLICT, D.ROWS},
    ),
    "rows are replaced but absence and missing rows are not checked": (
        Rules(True, True, False, False),
        {D.RECORDS, D.HIDES_CONFLICT},
    ),
    "missing rows are only recorded": (Rules(missing_rows_are_serial=False), {D.RECORDS}),
    "a row that comes and goes is not checked to have been absent": (
        Rules(absent_rows_are_checked=False),
        {D.HIDES_CONFLICT},
    ),
    "an insert after a delete is an update": (Rules(delete_then_insert_replaces=False), {D.LOCAL_COLUMN}),
    "a key change is a delete and an insert": (
        Rules(key_changes_are_serial=False),
        {D.TOAST_LOST, D.LOCAL_COLUMN},
    ),
}


@only_thorough
@pytest.mark.parametrize(("rules", "differences"), BROKEN.values(), ids=BROKEN.keys())
def test_it_is_found_out_when(rules: Rules, differences: set[Difference]) -> None:
    found = compare(rules, unique=False, batches=BATCHES)
    assert set(found.differences) == differences
    for target, operations in found.examples.values():
        assert target
        assert len(operations) >= 2


@only_thorough
def test_a_secondary_unique_index_hides_only_conflicts_of_values_that_came_and_went() -> None:
    found = compare(Rules(), unique=True, batches=2 * BATCHES)
    assert set(found.differences) == {Difference.HIDES_CONFLICT}
    assert set(found.hidden) == {"unique"}
