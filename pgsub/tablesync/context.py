"""The launcher's part in a synchronization: it submits jobs, stops them, and receives reports."""

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
        """Return whether the job has ended."""

    def result(self, timeout: float | None = None) -> list[Any]:
        """Return results in the order of the items, or raise the task's exception."""

    def cancel(self) -> None:
        """Cancel the job; it ends soon."""


Submit = Callable[[str, Callable[[Any], Any], Sequence[Any]], Job]


@dataclass(slots=True)
class SyncContext:
    """The context that all tables of a subscription share.

    :ivar system_identifier: the target's, for names of slots.
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
