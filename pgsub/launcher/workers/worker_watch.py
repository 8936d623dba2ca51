"""Whether the task of an apply worker is submitted, claimed, or alive: on a cluster these are three things.

NOTES
*Submitted*: a job of this process. Where no slot is free, Spark keeps its task waiting, silently and for ever.
*Claimed*: the ledger says that a task has reached the target under this epoch.
*Alive*: a sign of life was seen a moment ago. A sign is a heartbeat, or that the worker's session on the target did
something: an idle worker reads its control row several times a second. A statement that runs is a sign, too, unless
the server waits for the worker in it. So a worker is alive though every heartbeat is lost, and a stopped process is
not though its session is there.

Time is counted in looks, none of which adds more than a second: after a launcher was suspended, its workers get their
time again. A take-over is harmless where it was not needed (the older worker is fenced off), so it needs no proof.
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

#: Seconds without a heartbeat after which the target is asked, and between two such questions.
ASK_SECONDS = 1.0
#: A worker that is taken over again and again gets twice the time with each, up to that of so many doublings.
_DOUBLINGS = 5
_STEP = 1.0
#: Seconds without a sign of life that are worth a record of the log.
_LOG_SECONDS = 8.0


class WorkerWatch:
    """State of the task of one apply worker.

    :param ask: asks Spark about the job that runs now; None where Spark has not answered yet.
    :param ui: returns the address of Spark's pages.
    :param hang: returns what is known of a Spark that does not answer; None of any other.
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
        self._taken_over = 0  #: times in a row
        self._reported: str | None = None  #: what the log says that it waits for
        self._claim: Claim | None = None
        self._reset("none")

    def _reset(self, stage: str) -> None:
        self._stage, self._since = stage, ago(0)
        self._clock = time.monotonic()
        self._quiet = 0.0  #: seconds without a sign of life
        self._queued = 0.0  #: those of them after which Spark had it waiting for a slot last
        self._asked = -ASK_SECONDS
        self._sign: Sign | None = None
        self._slots: Slots | None = None
        self._silent_since: str | None = None

    def submitted(self, claim: Claim) -> None:
        """Follow a new task from now on."""
        self._claim = claim
        self._reset("submitted")

    def ended(self) -> None:
        """Follow nothing until the next task; the reason of its end is an error of its own."""
        self._claim = None
        self._reset("none")

    def look(self, session: psycopg.Connection) -> None:
        """See whether there is a sign of life.

        :param session: the launcher's, on the target.
        """
        clock = time.monotonic()
        self._quiet += min(clock - self._clock, _STEP)
        self._clock = clock
        claim = self._claim
        if claim is None:
            self._slots = self._ask() if self._quiet >= ASK_SECONDS else None
        elif self._heartbeats.seconds_since(claim.subid, claim.worker, claim.epoch) < ASK_SECONDS:
            if self._sign is None or not self._sign.claimed:
                self._sign = worker_takeover.sign(session, claim)  # once, for its host
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
                if self._waits and self._stage != "submitted":  # its executor is gone, and Spark has queued it again
                    self._stage, self._since = "submitted", ago(0)

    def _alive(self) -> None:
        if self._stage != "alive":
            self._stage, self._since = "alive", ago(0)
        self._quiet = self._asked = self._queued = 0.0
        self._taken_over = 0

    @property
    def alive(self) -> bool:
        """Whether this task has given a sign of life, and not too long ago."""
        return self._stage == "alive" and not self._waits

    @property
    def gone(self) -> bool:
        """Whether the worker has no session on the target any more."""
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
        """Why the worker is to be taken over; None as long as it is not. One that only waits for a slot never is."""
        waits = self._waits_for()
        slots = self._slots
        if waits is None or self._claim is None or (slots is not None and not slots.runs):
            return None
        if self._quiet - self._queued < self._patience * 2 ** min(self._taken_over, _DOUBLINGS):
            return None
        return f"the apply worker gave no sign of life for {self._quiet - self._queued:.0f} s"

    def taken_over(self) -> None:
        """Count a take-over; :meth:`ended` follows."""
        self._taken_over += 1

    def _report(self) -> None:
        """Log once that it waits, and once that it does not any more."""
        waits = self._waits_for()
        name = f'logical replication apply worker for subscription "{self._sub.name}"'
        if waits is None:
            if self._reported is not None and self._stage == "alive":
                self._reported = None
                self._log("LOG", log_text(f"{name} is alive"))
            return
        if self._claim is None or self._quiet < _LOG_SECONDS:
            return  # a start takes a while; the engine logs what executors it waits for
        kind = waits.partition(":")[0]
        if kind != self._reported:
            self._reported = kind
            self._log("WARNING", log_text(f"{name} waits for {waits}", hint=f"See what to do:\n{self._next()}"))
