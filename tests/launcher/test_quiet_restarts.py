"""Restarts that are no concern of operators, until they get nowhere."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from pgsub.catalog.store import StateStore
from pgsub.common.errors import Fenced, PgsubError, StreamsMustRestart
from pgsub.common.subscription import Subscription
from pgsub.launcher import error_handling
from pgsub.launcher.error_handling import APPLY, QUIET_RESTARTS, ErrorReporter
from pgsub.launcher.recorder import Recorder

_SUB = Subscription(5, "orders", "host=p", "host=t", ("pub",), "orders")


@pytest.mark.parametrize("error", [Fenced, StreamsMustRestart])
def test_a_worker_that_is_begun_anew_again_and_again_from_one_position_is_told(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, error: type[PgsubError]
) -> None:
    log: list[str] = []
    clock = [0.0]
    monkeypatch.setattr(error_handling.time, "monotonic", lambda: clock[0])
    with StateStore.open(state_dir) as store:
        store.add_subscription(_SUB)
        with contextlib.closing(Recorder(store, lambda level, text: log.append(text))) as recorder:
            errors = ErrorReporter(store, _SUB, lambda level, text: log.append(text), recorder)

            def fails(times: int, position: int, pause: float = 5.0) -> None:
                for _ in range(times):
                    clock[0] += pause
                    errors.report(APPLY, error("the ledger is not where this worker left it"), position=position)

            fails(QUIET_RESTARTS - 1, 7)
            fails(QUIET_RESTARTS - 1, 8)  # it got on
            fails(QUIET_RESTARTS, 9, pause=600.0)  # commands of users, now and then
            assert not log and not store.errors(_SUB.subid)
            fails(QUIET_RESTARTS, 10)
            [shown] = store.errors(_SUB.subid)
            assert shown.worker == APPLY and "not where this worker left it" in shown.message
            assert len(log) == 1 and errors.place(APPLY) == 10
            errors.clear(APPLY, 11)
            assert not store.errors(_SUB.subid)
