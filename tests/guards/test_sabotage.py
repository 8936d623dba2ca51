"""The guards that ``make sabotage`` takes away one by one."""

from __future__ import annotations

from sabotage import PROMISES, modules, mutants, where


def test_every_promise_has_a_guard_in_the_code_and_tests_that_are_there() -> None:
    found = mutants()
    assert found.keys() == PROMISES.keys() and len(found) > 30
    for files in found.values():
        for path, source in files.items():
            compile(source, str(path), "exec")
            assert source != path.read_text()
    assert all(where(test) for tests in PROMISES.values() for test in tests)
    assert all("__pycache__" not in path.parts for path in modules())
