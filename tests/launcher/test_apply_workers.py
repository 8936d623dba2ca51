"""``alter --apply-workers`` while a launcher serves the subscription, in the middle of what waits to be applied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from counted import SESSIONS, Counted
from fix_faults import Site, until

pytestmark = pytest.mark.long


def test_more_and_fewer_sessions_apply_as_soon_as_that_is_asked_for_and_nothing_comes_twice(
    site: Callable[[], Site],
) -> None:
    case = site()
    counted = Counted(case, "--apply-mode", "transactional")
    process = case.serve()
    counted.write(50)
    counted.applied()
    for number in ("4", "1", "4", "2"):
        epoch, seen = case.epoch(), 0
        counted.write(60)
        case.end(case.start("alter", case.name, "--apply-workers", number))
        until(lambda before=epoch: case.epoch() > before, "no worker with the new number")
        while seen < int(number) or counted.waiting():
            if not counted.waiting():
                counted.write(150)
            seen = max(seen, len(case.subdb.rows(SESSIONS)))
            assert seen <= int(number)
    case.terminate(process)
    counted.check()


def test_the_log_and_the_state_store_say_how_many_sessions_apply_by_default_and_why(site: Callable[[], Site]) -> None:
    case = site()
    counted = Counted(case, "--apply-mode", "transactional")
    assert case.sqlite("SELECT pgsub_apply_workers FROM pg_subscription") == [("auto",)]
    process = case.run("--timeout", "200s")
    query = "SELECT sessions, sessions_why FROM pgsub_worker WHERE worker_type = 'apply'"
    shown: set[tuple[int, str]] = set()

    def grown() -> bool:
        if counted.waiting() < 1000:
            counted.write(500)
        shown.update(case.sqlite(query))
        return any(sessions and sessions > 1 for sessions, _ in shown)

    until(grown, case.said)
    counted.applied()
    assert "sessions of the target apply subscription" in case.output.read_text(errors="replace")
    case.terminate(process)
    [(_, why)] = [one for one in shown if one[0] == 2]
    assert "with more transactions at hand" in why
    counted.check()
