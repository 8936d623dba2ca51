"""The Spark driver of a launcher: opened once, when the first job is submitted, and again after its JVM died."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pgsub.apply.worker import worker
from pgsub.common.subscription import Subscription
from pgsub.common.threads import SupervisedThread
from pgsub.spark import gateway, jobs, session, settings
from pgsub.tablesync import sync_worker
from pgsub.tablesync.copy import task

#: Their functions are submitted.
_MODULES = tuple(module.__name__ for module in (worker, task, sync_worker))

#: Task slots to spare on a local Spark for subscriptions that come later; there a slot is a thread and costs nothing.
SPARE_SLOTS = 48


class Engine:
    """Submits jobs from any thread.

    :param state_dir: where Spark's log and pid file go.
    :param master: a Spark master, None for a local one.
    :param conf: Spark settings of the user, which win over pgsub's own.
    :param subscriptions: that will be served: a long task pins a slot, and with too few a copy would wait for ever.
    """

    def __init__(
        self, state_dir: Path, master: str | None, conf: Mapping[str, str], subscriptions: Sequence[Subscription]
    ) -> None:
        self._state_dir = state_dir
        self._master = master
        self._conf = dict(conf)
        self._slots = sum(slots_of(sub) for sub in subscriptions)
        self._total: int | None = None  #: slots of the open context
        self._lock = threading.Lock()
        self._context: Any = None
        self._submitter: jobs.Submitter | None = None

    def driver_host(self) -> str:
        """Where executors reach this process: loopback for a local Spark, else as Spark itself is told to be."""
        chosen = self._user_settings()
        if _is_local(chosen):
            return "127.0.0.1"
        return chosen.get("spark.driver.host") or socket.gethostbyname(socket.gethostname())

    def _user_settings(self) -> dict[str, str]:
        submitted = {**self._conf, **({"spark.master": self._master} if self._master else {})}
        return settings.user_settings(submitted, gateway.spark_home())

    def warm_up(self) -> None:
        """Open the context in the background: a JVM takes seconds, the first look at the servers less."""
        SupervisedThread(
            "spark_start", "spark start", self._open
        ).start()  # whatever ends it, the first job meets it again

    def _open(self) -> jobs.Submitter:
        with self._lock:
            if self._submitter is not None and not session.alive(self._context):
                session.close_context(self._context)
                self._submitter = None
            if self._submitter is None:
                # a master that the user sized is only asked for what is needed now
                slots = self._slots + (0 if "spark.master" in self._user_settings() else SPARE_SLOTS)
                self._context = session.open_context(self._master, slots, self._state_dir, self._conf, _MODULES)
                self._total = slots
                self._submitter = jobs.Submitter(self._context)
            return self._submitter

    def missing(self, served: Sequence[Subscription]) -> int:
        """How many task slots these subscriptions may want beyond those that Spark was opened with."""
        return 0 if self._total is None else max(0, sum(map(slots_of, served)) - self._total)

    def submit(self, name: str, function: Callable[[Any], Any], items: Sequence[Any]) -> jobs.Job[Any, Any]:
        """Run ``function`` on each item as a task of one job.

        :raises PgsubError: Spark could not be started.
        """
        return self._open().submit(name, function, items, len(items))

    def rotate_log(self) -> None:
        """Keep Spark's log below its limit."""
        gateway.rotate(self._state_dir)

    def close(self) -> None:
        """Stop Spark."""
        with self._lock:
            if self._submitter is not None:
                session.close_context(self._context)
                self._submitter = None


def slots_of(sub: Subscription) -> int:
    """Tasks that one subscription runs at once at most: apply, and the chunks of every table that synchronizes."""
    return 1 + sub.max_sync_workers * sub.copy_workers


def _is_local(chosen: Mapping[str, str]) -> bool:
    return settings.is_local(chosen.get("spark.master", "local")) and "PYSPARK_GATEWAY_PORT" not in os.environ
