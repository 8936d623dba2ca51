"""The guards that ``make sabotage`` removes one by one."""

from __future__ import annotations

import ast

import sources
from sabotage import PROMISES, mutants, where


def test_every_promise_has_a_guard_and_existing_tests() -> None:
    found = mutants()
    assert found.keys() == PROMISES.keys() and len(found) > 30
    for files in found.values():
        for module, source in files.items():
            ast.parse(source)
            assert source != sources.modules()[module]
    assert all(where(test) for tests in PROMISES.values() for test in tests)
