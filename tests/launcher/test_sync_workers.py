"""The tablesync workers' book-keeping in the launcher: whose error is told, and whose is not any more."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import patience
import pytest
from fix_program import until

from pgsub.catalog.store import StateStore
from pgsub.common.errors import PgsubError, TargetSchemaError, WorkerDied
from pgsub.common.subscription import Subscription
from pgsub.launcher.error_handling import ErrorReporter
from pgsub.launcher.heartbeat_receiver import HeartbeatReceiver
from pgsub.launcher.recorder import Recorder
from pgsub.launcher.service import Shared
from pgsub.launcher.spark.driver import Engine
from pgsub.launcher.workers import sync_workers
from pgsub.launcher.workers.sync_workers import SyncWorkers
from pgsub.tablesync.context import SyncContext
from pgsub.target.ledger.subscriptions import RelationState

_SUB = Subscription(5, "orders", "host=p", "host=t", ("pub",), "orders")


class Failing:
    """Synchronizations that end with an error when they are let."""

    let = threading.Event()
    patiences: ClassVar[list[float]] = []
    error: ClassVar[type[PgsubError]] = TargetSchemaError

    def __init__(self, context: SyncContext, *relids: int) -> None:
        self._relids = relids
        self.patiences.append(context.patience)

    def run(self) -> dict[int, PgsubError]:
        """As of :class:`TableSync`."""
        assert self.let.wait(patience.SECONDS)
        raise self.error(f"of {self._relids}")


def _tick(side: SyncWorkers, state: str, when: Callable[[set[int]], bool] = lambda alive: True) -> None:
    alive = side.alive
    while not when(alive):
        alive = side.alive
    side.tick([RelationState(1, "public", "a", state)], alive)


@pytest.mark.parametrize(("seen", "told"), [("d", True), ("i", False)], ids=["same copy", "set back by a refresh"])
def test_the_error_of_a_copy_that_a_refresh_has_made_void_is_not_told(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, seen: str, told: bool
) -> None:
    monkeypatch.setattr(sync_workers, "TableSync", Failing)
    monkeypatch.setattr(Failing, "let", threading.Event())
    with StateStore.open(state_dir) as store, contextlib.closing(HeartbeatReceiver()) as heartbeats:
        store.add_subscription(_SUB)
        context = SyncContext(_SUB, "1", lambda *job: pytest.fail("no job"), threading.Event())
        recorder = Recorder(store, lambda level, text: None)
        side = SyncWorkers(context, heartbeats, ErrorReporter(store, _SUB, lambda level, text: None, recorder))
        _tick(side, "d")
        _tick(side, seen)  # it runs still
        assert side.alive == {1}
        Failing.let.set()
        _tick(side, seen, lambda alive: not alive)
        assert [row.worker for row in store.errors(_SUB.subid)] == ["table synchronization 1"] * told


def test_an_attempt_behind_a_failed_one_has_more_time_to_show_that_it_is_alive(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_workers, "TableSync", Failing)
    monkeypatch.setattr(Failing, "patiences", [])
    monkeypatch.setattr(Failing, "error", WorkerDied)
    Failing.let.set()
    with StateStore.open(state_dir) as store, contextlib.closing(HeartbeatReceiver()) as heartbeats:
        store.add_subscription(_SUB)
        context = SyncContext(_SUB, "1", lambda *job: pytest.fail("no job"), threading.Event(), patience=60.0)
        recorder = Recorder(store, lambda level, text: None)
        errors = ErrorReporter(store, _SUB, lambda level, text: None, recorder)
        side = SyncWorkers(context, heartbeats, errors, interval=0.001)
        until(lambda: _tick(side, "d") or len(Failing.patiences) > 6)
    assert Failing.patiences[:7] == [60.0, 120.0, 240.0, 480.0, 960.0, 960.0, 960.0]


def test_no_copy_starts_by_a_definition_that_has_changed_since(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_workers, "TableSync", Failing)
    monkeypatch.setattr(Failing, "let", threading.Event())
    quiet = lambda level, text: None  # noqa: E731
    with StateStore.open(state_dir) as store, contextlib.closing(HeartbeatReceiver()) as heartbeats:
        store.add_subscription(_SUB)
        with contextlib.closing(Recorder(store, quiet)) as recorder:
            errors = ErrorReporter(store, _SUB, quiet, recorder)
            shared = Shared(store, recorder, Engine(state_dir, None, {}, lambda: []), heartbeats, quiet)
            context = SyncContext(_SUB, "1", lambda *job: pytest.fail("no job"), threading.Event())
            side = SyncWorkers(context, heartbeats, errors, current=lambda: shared.is_current(_SUB))
            store.alter(_SUB.subid, publications=("pub", "second"))
            _tick(side, "i")  # the command that altered it has gone on, or was killed: the table may be of either
            assert side.alive == set()
            store.alter(_SUB.subid, publications=("pub",), disable_on_error=True)
            _tick(side, "i")
            assert side.alive == {1}
            Failing.let.set()
