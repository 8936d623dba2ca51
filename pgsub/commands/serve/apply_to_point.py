"""Makes apply reach a position: ensures that the subscription is served, and waits, or fails if apply stops."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg

from pgsub.apply import verified_publisher
from pgsub.catalog.locks import launcher_lock
from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.status.subscription_status import serving
from pgsub.commands.status.wait import WaitOptions, wait
from pgsub.common.errors import StateForbids, TimeoutExpired
from pgsub.common.subscription import Subscription
from pgsub.common.threads import SupervisedThread
from pgsub.protocol.lsn import MAX_LSN


@contextlib.contextmanager
def served(store: StateStore, folder: Path, sub: Subscription, reporter: Reporter) -> Iterator[Callable[[], None]]:
    """Ensure that the subscription is served during the block, if necessary by a launcher of this process.

    :return: a function that raises the error that ended this launcher, or that stops apply.
    """
    now = WaitOptions(sub.name, folder, "lsn", MAX_LSN, 0.0, even_if_stopped=False)

    def applying() -> None:
        with contextlib.suppress(TimeoutExpired):  # recorded errors are raised before a timeout
            wait(now)

    if serving(store, folder, sub.subid) or launcher_lock(folder).holder() is not None:
        yield applying
        return
    # Spark is loaded only if nobody else serves the subscription.
    from pgsub.launcher.launcher import Launcher

    stop = threading.Event()

    def serve() -> None:
        with StateStore.open(folder, create=False) as own:
            Launcher(own, folder, reporter.log, names=(sub.name,)).run(stop)

    thread = SupervisedThread("verify", "verify", serve)

    def alive() -> None:
        if not thread.is_alive():
            raise thread.fatal_error or StateForbids(f'subscription "{sub.name}" is no longer served')

    def check() -> None:
        alive()
        applying()

    thread.start()
    try:
        while not serving(store, folder, sub.subid):
            alive()
            time.sleep(0.05)
        yield check
    finally:
        stop.set()
        thread.join()


def catch_up(session: psycopg.Connection, sub: Subscription, folder: Path, deadline: float) -> None:
    """Wait until apply has reached the publisher's present position.

    :param session: on the target.
    """
    position = verified_publisher.committed_position(session, sub)
    seconds = max(0.0, deadline - time.monotonic())
    wait(WaitOptions(sub.name, folder, "lsn", position, seconds, even_if_stopped=False))
