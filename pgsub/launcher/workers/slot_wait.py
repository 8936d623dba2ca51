"""Whether tables wait for a task slot that no worker leaves: apply workers keep theirs, so it may be for ever.

NOTES
A copy that waits for others to end is no matter of this: they take turns. It is where Spark has no slot beyond those of
the apply workers, as after the loss of an executor, or with a subscription that came later. Apply goes on meanwhile,
and nothing else would say that a table never gets its rows.
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


class SlotWait:
    """The tasks that synchronize the tables of one subscription, as far as they wait for a slot.

    :param submit: submits such a task.
    :param ask: asks Spark about one, or with None about all its slots; None where Spark has not answered yet.
    """

    def __init__(self, sub: Subscription, submit: Submit, ask: Callable[[Job | None], Slots | None], log: Log) -> None:
        self._sub = sub
        self._submit = submit
        self._ask = ask
        self._log = log
        self._jobs: set[Job] = set()
        self._slots: Slots | None = None  #: as Spark answered last
        self._since: tuple[float, str] | None = None  #: when none of them could begin
        self._said = False

    def submit(self, name: str, function: Callable[[Any], Any], items: Sequence[Any]) -> Job:
        """Submit a task, in any thread, and look at it until it has ended."""
        job = self._submit(name, function, items)
        self._jobs.add(job)
        return job

    def shown(self, task: TaskRow) -> TaskRow:
        """Return what ``state.db`` shows of the task of apply, which may be well while tables wait."""
        self._look()
        slots, since = self._slots, self._since
        if slots is None or since is None or time.monotonic() < since[0] + WAITING_SECONDS or task.waits_for:
            return task
        waits = f"a free task slot for its tables: Spark has {slots.registered} in all, and {slots.needed} are needed"
        more = slots.more or f"pgsub status {word(self._sub.name)} --runbook"
        self._say(waits, more)
        return replace(task, silent_since=since[1], waits_for=waits, next=more)

    def _look(self) -> None:
        """See whether none of them runs, and there is no slot in which they could take turns."""
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
