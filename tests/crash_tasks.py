"""What a child process of the crash table runs: a synchronization with all its workers, without Spark."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pgsub.common.errors import PgsubError
from pgsub.common.subscription import Subscription
from pgsub.tablesync.context import SyncContext
from pgsub.tablesync.coordinator import TableSync


def synchronize(spec: tuple[Subscription, tuple[int, ...]]) -> dict[int, PgsubError]:
    """Synchronize tables together.

    :param spec: the subscription and the tables' oids.
    :return: errors of single tables.
    """
    subscription, relids = spec
    with ThreadPoolExecutor(8) as pool:

        def submit(name: str, function: Any, items: Any) -> Future[list[Any]]:
            return pool.submit(lambda: [function(item) for item in items])

        return TableSync(SyncContext(subscription, "1", submit, threading.Event()), *relids).run()
