"""The Spark driver of a launcher: opened once, when the first job is submitted, and again after its JVM died."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pgsub.spark import jobs, session

#: Jobs of one subscription at most: apply, and for each synchronizing table its chunks.
SLOTS = 14


class Engine:
    """Submits jobs from any thread.

    :param state_dir: where Spark's log and pid file go.
    :param master: a Spark master, None for a local one.
    :param conf: Spark settings of the user, which win over pgsub's own.
    """

    def __init__(self, state_dir: Path, master: str | None, conf: Mapping[str, str]) -> None:
        self._state_dir = state_dir
        self._master = master
        self._conf = dict(conf)
        self._lock = threading.Lock()
        self._context: Any = None
        self._submitter: jobs.Submitter | None = None

    def warm_up(self) -> None:
        """Open the context in the background: a JVM takes seconds, the first look at the servers less."""
        threading.Thread(target=self._try_open, name="spark start", daemon=True).start()

    def _try_open(self) -> None:
        try:
            self._open()
        except Exception:
            pass

    def _open(self) -> jobs.Submitter:
        with self._lock:
            if self._submitter is not None and not session.alive(self._context):
                session.close_context(self._context)
                self._submitter = None
            if self._submitter is None:
                self._context = session.open_context(self._master, SLOTS, self._state_dir, self._conf)
                self._submitter = jobs.Submitter(self._context)
            return self._submitter

    def submit(self, name: str, function: Callable[[Any], Any], items: Sequence[Any]) -> jobs.Job[Any, Any]:
        """Run ``function`` on each item as a task of one job.

        :raises PgsubError: Spark could not be started.
        """
        return self._open().submit(name, function, items, len(items))

    def close(self) -> None:
        """Stop Spark."""
        with self._lock:
            if self._submitter is not None:
                session.close_context(self._context)
                self._submitter = None
