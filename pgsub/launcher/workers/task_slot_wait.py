"""Detects tables that wait for a task slot that never becomes free, because apply workers keep their slots.

A copy that waits for other copies is not meant, because those take turns. But Spark may have no slots beyond those of
the apply workers, for example after the loss of an executor, or when a subscription was added. Apply then continues,
and nothing else would report that a table never gets its rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pgsub.catalog.rows import TaskRow
from pgsub.catalog.times import utc_now
from pgsub.common.errors import Log, log_text
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.launcher.retry import WAITING_SECONDS
from pgsub.launcher.spark.task_slots import Slots
from pgsub.tablesync.context import Job, Submit


class TaskSlotWait:
    """The tasks of one subscription that synchronize tables, and their wait for a slot.

    :param ask: asks Spark about a job, or about all slots if the job is None. Returns None before Spark's first answer.
    """

    def __init__(self, sub: Subscription, submit: Submit, ask: Callable[[Job | None], Slots | None], log: Log) -> None:
        self._sub = sub
        self._submit = submit
        self._ask = ask
        self._log = log
        self._jobs: set[Job] = set()
        self._slots: Slots | None = None  #: Spark's last answer
        self._since: tuple[float, str] | None = None  #: since when none of the tasks could start
        self._said = False

    def submit(self, name: str, function: Callable[[Any], Any], items: Sequence[Any]) -> Job:
        """Submit a task from any thread, and watch it until it ends."""
        job = self._submit(name, function, items)
        self._jobs.add(job)
        return job

    def shown(self, task: TaskRow) -> TaskRow:
        """Return the row of apply's task, with a wait of tables added. Apply may be well while tables wait."""
        self._look()
        slots, since = self._slots, self._since
        if slots is None or since is None or time.monotonic() < since[0] + WAITING_SECONDS or task.waits_for:
            return task
        waits = f"a free task slot for its tables: Spark has {slots.registered} in all, and {slots.needed} are needed"
        more = slots.more or f"pgsub status {word(self._sub.name)} --runbook"
        self._say(waits, more)
        return replace(task, silent_since=since[1], waits_for=waits, next=more)

    def _look(self) -> None:
        """Check whether none of the tasks runs and there is no slot in which they could take turns."""
        self._jobs -= {job for job in self._jobs.copy() if job.done()}
        jobs = self._jobs.copy()
        self._slots = (self._ask(None) or self._slots) if jobs else None
        answers = [self._ask(job) for job in jobs] if self._slots is not None and self._slots.too_few else []
        if not answers or any(answer is not None and answer.runs for answer in answers):
            self._since, self._said = None, False
        elif self._since is None:
            self._since = time.monotonic(), utc_now()

    def _say(self, waits: str, more: str) -> None:
        if not self._said:
            self._said = True
            detail = "Each apply worker keeps its slot, so no table is copied before there is another one."
            text = f'subscription "{self._sub.name}" waits for {waits}'
            self._log("WARNING", log_text(text, detail=detail, hint=f"See what to do:\n{more}"))
