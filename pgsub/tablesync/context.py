"""The launcher's part in a synchronization: how jobs are submitted, when to stop, where to report."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pgsub.common.errors import LogText
from pgsub.common.subscription import Subscription
from pgsub.common.worker_heartbeat import HeartbeatAddress


class Job(Protocol):
    """A submitted job."""

    def done(self) -> bool:
        """Return whether it has ended."""

    def result(self, timeout: float | None = None) -> list[Any]:
        """Return results in the order of the items, or raise the exception of the task."""

    def cancel(self) -> None:
        """End it soon."""


Submit = Callable[[str, Callable[[Any], Any], Sequence[Any]], Job]


@dataclass(slots=True)
class SyncContext:
    """The context that is the same for every table of a subscription.

    :ivar system_identifier: of the target, for the slots' names.
    :ivar stopping: set when the launcher stops.
    :ivar patience: seconds without a sign of life after which a task is given up.
    """

    subscription: Subscription
    system_identifier: str
    submit: Submit
    stopping: threading.Event
    heartbeat: HeartbeatAddress | None = None
    spool_dir: str | None = None
    log: Callable[[str, LogText], None] = lambda level, text: None
    patience: float = math.inf
