"""Whether the task of an apply worker is submitted, claimed, or alive. On a cluster these are different states.

NOTES

*Submitted*: a job of this process exists. If no slot is free, Spark keeps its task waiting, silently, without limit.

*Claimed*: the ledger says that a task has reached the target under this epoch.

*Alive*: there was a sign of life a moment ago. A sign is a heartbeat, or activity of the worker's session on the
target: an idle worker reads its control row several times per second. A running statement is a sign unless the worker
waits in it. So a worker without heartbeats may be alive, and a stopped process with a session is not.

Time is counted in looks, each of which adds at most a second. So after a launcher was suspended, its workers get their
full time again. A needless take-over is harmless because the older worker is fenced off, so it needs no proof.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import psycopg

from pgsub.catalog.rows import TaskRow
from pgsub.catalog.times import ago
from pgsub.common.errors import Log, log_text
from pgsub.common.plural import counted
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.launcher.heartbeat_receiver import HeartbeatReceiver
from pgsub.launcher.retry import WAITING_SECONDS, take_over_seconds
from pgsub.launcher.spark.driver_watch import Hang
from pgsub.launcher.spark.task_slots import Slots
from pgsub.target.ledger import worker_takeover
from pgsub.target.ledger.worker_takeover import Claim, Sign

#: Seconds without a heartbeat after which the target is asked, and seconds between such questions.
ASK_SECONDS = 1.0
#: Each successive take-over of a worker doubles its time, at most this many times.
_DOUBLINGS = 5
_STEP = 1.0
#: Seconds without a sign of life after which the wait is logged.
_LOG_SECONDS = 8.0
#: Seconds after which a living worker counts as streaming where no heartbeat arrives. A start takes less: it ends with
#: an error if another session keeps the slot.
_START_SECONDS = 30.0


class WorkerWatch:
    """The state of one apply worker's task.

    :param ask: asks Spark about the running job. Returns None before Spark's first answer.
    :param ui: returns the address of Spark's web pages.
    :param hang: returns the hang of Spark's Java process, None if it answers.
    """

    def __init__(
        self,
        sub: Subscription,
        heartbeats: HeartbeatReceiver,
        log: Log,
        ask: Callable[[], Slots | None],
        ui: Callable[[], str | None] = lambda: None,
        hang: Callable[[], Hang | None] = lambda: None,
    ) -> None:
        self._sub = sub
        self._heartbeats = heartbeats
        self._log = log
        self._ask = ask
        self._ui = ui
        self._hang = hang
        self._patience = take_over_seconds()
        self._taken_over = 0  #: number of successive take-overs
        self._reported: str | None = None  #: the wait that was logged last
        self._claim: Claim | None = None
        self._reset("none")

    def _reset(self, stage: str) -> None:
        self._stage, self._since = stage, ago(0)
        self._clock = self._alive_at = time.monotonic()
        self._heard = False  #: a heartbeat came; the first one is sent when the publisher has begun to stream
        self._quiet = 0.0  #: seconds without a sign of life
        self._queued = 0.0  #: value of ``_quiet`` when Spark last kept the task waiting for a slot
        self._asked = -ASK_SECONDS
        self._sign: Sign | None = None
        self._slots: Slots | None = None
        self._silent_since: str | None = None

    def submitted(self, claim: Claim) -> None:
        """Follow a new task."""
        self._claim = claim
        self._reset("submitted")

    def ended(self) -> None:
        """Follow nothing until the next task. The reason of the end is reported elsewhere."""
        self._claim = None
        self._reset("none")

    def look(self, session: psycopg.Connection) -> None:
        """Look for a sign of life.

        :param session: the launcher's session on the target.
        """
        clock = time.monotonic()
        self._quiet += min(clock - self._clock, _STEP)
        self._clock = clock
        claim = self._claim
        if claim is None:
            self._slots = self._ask() if self._quiet >= ASK_SECONDS else None
        elif self._heartbeats.seconds_since(claim.subid, claim.worker, claim.epoch) < ASK_SECONDS:
            if self._sign is None or not self._sign.claimed:
                self._sign = worker_takeover.sign(session, claim)  # once, to learn its host
            self._heard = True
            self._alive()
        elif self._quiet >= self._asked + ASK_SECONDS:
            self._asked = self._quiet
            self._look_closer(worker_takeover.sign(session, claim))
        self._silent_since = (self._silent_since or ago(self._quiet)) if self._waits else None
        self._report()

    def _look_closer(self, sign: Sign) -> None:
        before, self._sign = self._sign, sign
        if sign.claimed and self._stage == "submitted":
            self._stage, self._since = "claimed", ago(0)
        if sign.sessions and (sign.works or (before is not None and sign.changed != before.changed)):
            self._alive()
        else:
            self._slots = self._ask()
            if self._slots is not None and not self._slots.runs:
                self._queued = self._quiet
                if self._waits and self._stage != "submitted":  # its executor is gone and Spark has queued it again
                    self._stage, self._since = "submitted", ago(0)

    def _alive(self) -> None:
        if self._stage != "alive":
            self._stage, self._since, self._alive_at = "alive", ago(0), time.monotonic()
        self._quiet = self._asked = self._queued = 0.0
        self._taken_over = 0

    @property
    def alive(self) -> bool:
        """Whether the task has recently given a sign of life."""
        return self._stage == "alive" and not self._waits

    @property
    def streams(self) -> bool:
        """Whether the task is alive and has begun to stream: it may still wait for the slot while it starts."""
        return self.alive and (self._heard or time.monotonic() - self._alive_at >= _START_SECONDS)

    @property
    def gone(self) -> bool:
        """Whether the worker no longer has a session on the target."""
        return self._waits and self._sign is not None and not self._sign.sessions

    @property
    def _waits(self) -> bool:
        return self._quiet >= WAITING_SECONDS

    @property
    def row(self) -> TaskRow:
        """The row that ``state.db`` shows."""
        sign, hang = self._sign, self._hang()
        host, pid = (None, None) if sign is None else (sign.host, sign.pid)
        since = self._silent_since or (None if hang is None else hang.since)
        return TaskRow(self._stage, self._since, host, pid, since, self._waits_for(), self._next(), self._ui())

    def _waits_for(self) -> str | None:
        slots, sign, hang = self._slots, self._sign, self._hang()
        if hang is not None:
            return hang.waits_for
        if not self._waits:
            return None
        if self._claim is None:
            slots_there = "" if slots is None else f": {counted(slots.registered, 'task slot')} so far"
            return f"Spark to start, and for its executors{slots_there}"
        if slots is not None and not slots.runs:
            has = f"{slots.registered} in all" if slots.registered else "none yet"
            return f"a free task slot: Spark has {has}"
        if sign is None or not sign.claimed:
            return "its process on an executor, which has not reached the target"
        return f"a sign of life of PID {sign.pid} on {sign.host}"

    def _next(self) -> str | None:
        slots, hang = self._slots, self._hang()
        if hang is not None and hang.next is not None:
            return hang.next
        if not self._waits and hang is None:
            return None
        if hang is None and slots is not None and not slots.runs and slots.too_few and slots.more is not None:
            return slots.more
        return f"pgsub status {word(self._sub.name)} --runbook"

    @property
    def overdue(self) -> str | None:
        """The reason to take the worker over, None if there is none, for example if it only waits for a slot."""
        waits = self._waits_for()
        slots = self._slots
        if waits is None or self._claim is None or (slots is not None and not slots.runs):
            return None
        if self._quiet - self._queued < self._patience * 2 ** min(self._taken_over, _DOUBLINGS):
            return None
        return f"the apply worker gave no sign of life for {self._quiet - self._queued:.0f} s"

    def taken_over(self) -> None:
        """Count a take-over. The caller then calls :meth:`ended`."""
        self._taken_over += 1

    def _report(self) -> None:
        """Log the start and the end of a wait, once each."""
        waits = self._waits_for()
        name = f'logical replication apply worker for subscription "{self._sub.name}"'
        if waits is None:
            if self._reported is not None and self._stage == "alive":
                self._reported = None
                self._log("LOG", log_text(f"{name} is alive"))
            return
        if self._claim is None or self._quiet < _LOG_SECONDS:
            return  # a start takes a while, and the engine logs the wait for executors
        kind = waits.partition(":")[0]
        if kind != self._reported:
            self._reported = kind
            self._log("WARNING", log_text(f"{name} waits for {waits}", hint=f"See what to do:\n{self._next()}"))
