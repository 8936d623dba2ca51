"""``pgsub run``: the launcher in the foreground."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pgsub.catalog.locks import launcher_lock, lock_held
from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.serve import disabled
from pgsub.common.errors import PgsubError, StateForbids, log_text
from pgsub.common.threads import SignalEvent, SupervisedThread

if TYPE_CHECKING:
    from pgsub.launcher.launcher import Ended


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of ``run``."""

    names: tuple[str, ...]
    state_dir: Path
    until_caught_up: bool = False
    until_lsn: int | None = None
    timeout: float | None = None
    master: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)


def run(options: RunOptions, *, reporter: Reporter) -> None:
    """Serve subscriptions until stopped, or until the goal is reached.

    :raises StateForbids: a bounded run left out a disabled subscription
        (:func:`~pgsub.commands.serve.disabled.check_end`).
    :raises LockHeld: another launcher serves this state store, or a named subscription.
    :raises TimeoutExpired: the goal was not reached in time.
    :raises PgsubError: the error that stopped a bounded run.
    """
    bounded = options.until_caught_up or bool(options.until_lsn)
    waits = not options.names and not bounded
    with contextlib.ExitStack() as stack:
        # Commands that need a subscription create nothing in a folder whose name may be mistyped.
        store = stack.enter_context(StateStore.open(options.state_dir, create=waits, readable=True))
        store.check()
        _check_chosen(store, options.names, bounded, reporter)
        if waits:
            lock = launcher_lock(options.state_dir)
            if not lock.acquire():
                raise lock_held(lock, "this state folder")
            stack.callback(lock.release)
        # Imported late: importers of this module need not load Spark, and the lock should be visible soon.
        from pgsub.launcher.launcher import Launcher
        from pgsub.launcher.run_until import Goal

        stop = stack.enter_context(stopping_by_signal(reporter))
        launcher = Launcher(
            store,
            options.state_dir,
            reporter.log,
            names=options.names,
            goal=Goal(options.until_caught_up, options.until_lsn or 0, everything=True),
            master=options.master,
            conf=options.conf,
        )
        ended = launcher.run(stop, options.timeout)
        raise_first(ended)
        if bounded and not stop.is_set():
            disabled.check_end(store, options.names, {one.name for one in ended}, reporter)


def _check_chosen(store: StateStore, names: tuple[str, ...], bounded: bool, reporter: Reporter) -> None:
    """Check first that there is something to serve."""
    for name in names:
        store.subscription(name)
    if not names:
        _check_not_empty(store, bounded, reporter)
    if bounded:
        disabled.check(store, names)


def _check_not_empty(store: StateStore, bounded: bool, reporter: Reporter) -> None:
    """Report an empty state folder, whose name may be mistyped.

    :raises StateForbids: the run is bounded, and would reach nothing.
    """
    if store.subscriptions():
        return
    message = f'no subscription exists in state folder "{store.path.parent}"'
    if bounded:
        raise StateForbids(message, hint="Name another folder, or create a subscription.\npgsub create --help")
    reporter.log("LOG", log_text(f"{message}; waiting for one to be created"))


def raise_first(ended: list[Ended]) -> None:
    """Raise the first error that stopped a subscription."""
    for one in ended:
        if one.error is not None:
            raise one.error
        if one.outcome == "failed":
            raise PgsubError(f'subscription "{one.name}" could not be served')


@contextlib.contextmanager
def stopping_by_signal(reporter: Reporter) -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets. The second ends the process at once.

    Ending at once is safe: uncommitted changes are rolled back on the target and sent again. If standard error is a
    terminal, SIGHUP means that the terminal was closed, and stops the run. Otherwise it is only logged, because a moved
    log file is recreated at the next record in any case.
    """
    event = SignalEvent()
    if threading.current_thread() is not threading.main_thread():
        yield event  # programs that call from a thread handle signals themselves
        return

    def notice(text: str) -> None:
        # A handler may interrupt a write to the same stream, so another thread writes, if one can be started.
        with contextlib.suppress(RuntimeError):
            SupervisedThread("notice", "notice", partial(reporter.notice, text)).start()

    def handler(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            os._exit(128 + number)
        event.set()
        notice("stopping; a second signal ends the process at once")

    def hangup(number: int, frame: FrameType | None) -> None:
        if terminal:  # shells and terminals may both send it
            event.set()
        else:
            notice("received SIGHUP; a log file that was moved is created again")

    terminal = sys.stderr is not None and sys.stderr.isatty()
    handlers = {signal.SIGINT: handler, signal.SIGTERM: handler}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        handlers[signal.SIGHUP] = hangup
    previous = {number: signal.signal(number, chosen) for number, chosen in handlers.items()}
    try:
        yield event
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
