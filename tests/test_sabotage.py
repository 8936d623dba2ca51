"""The list of guards that ``make sabotage`` takes away one by one."""

from __future__ import annotations

from sabotage import GUARDS, ROOT


def test_every_guard_stands_where_the_list_says_and_has_tests_that_are_there() -> None:
    wrong = []
    for guard in GUARDS:
        text = (ROOT / guard.module).read_text()
        for old, new in guard.edits:
            if text.count(old) != 1 or old == new:
                wrong.append(f"{guard.name}: not once in {guard.module}: {old}")
            text = text.replace(old, new)
        for path, _, function in (test.partition("::") for test in guard.tests):
            there = (ROOT / path).exists() and (not function or f"def {function}(" in (ROOT / path).read_text())
            wrong += [] if there else [f"{guard.name}: no {path}::{function}"]
    assert not wrong and len({guard.name for guard in GUARDS}) == len(GUARDS) > 100
