"""An attempt to bring apply and a snapshot of the publisher to one point: one barrier, from its start to its release.

NOTES
The publisher's snapshot is that of a slot at its consistent point X (SnapBuildInitialSnapshot, snapbuild.c): exactly
the transactions that finished before X, whatever order they became visible in. X is known only after the slot was
created, and apply would be beyond it by then. So a barrier is put up first, at a position L that X cannot lie before.
Once apply has stopped at L, the slot is created, the barrier moves to X, and apply follows. Then the target's snapshot
is taken, and apply goes on.

The slot waits for all transactions that write at this moment, however long they take. With synchronous replication
they may in turn wait for apply. While it waits for one of them, X lies ahead, and the barrier follows the end of the
publisher's WAL, so that apply goes on. On a standby it waits until the primary logs the running transactions, up to 15
seconds unless the primary is asked to. Replayed WAL is decoded within moments, so there the barrier follows the replay
position of a moment ago. In the end it is checked that X is not behind the barrier.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import psycopg

from pgsub.apply import verified_publisher
from pgsub.common import failpoints
from pgsub.common.connections.exported_snapshot import ExportedSnapshot
from pgsub.common.errors import PgsubError, TimeoutExpired
from pgsub.common.query import leave_transaction
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.common.threads import SupervisedThread
from pgsub.protocol.lsn import format_lsn
from pgsub.publisher import connect as publisher
from pgsub.publisher.current_wal_lsn import flushed_position
from pgsub.publisher.server_errors import translating
from pgsub.publisher.slot_creation import Report
from pgsub.publisher.snapshot import SlotSnapshot
from pgsub.target.ledger.maintenance import barrier
from pgsub.target.session.connect import must_use_password

#: Bytes of WAL that apply may be behind when the slot is created. While it is further behind, the barrier follows.
NEAR_BYTES = 16 << 20
#: Maximum number of seconds to remove a barrier after a failure, while apply holds its row. Then apply removes it.
RELEASE_SECONDS = 30.0
_POLL = 0.005
_FOLLOW = 0.02
_CHECK = 0.5
#: Seconds after which a slot that is created on a standby has decoded what was replayed.
_READ_SECONDS = 0.5
_WAITS = """
SELECT pg_catalog.pg_is_in_recovery(), EXISTS (
  SELECT FROM pg_catalog.pg_locks w JOIN pg_catalog.pg_locks h USING (transactionid)
   WHERE w.pid = %s AND w.locktype = 'transactionid' AND NOT w.granted AND h.granted)
"""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Point:
    """Both snapshots. They can be imported during the block that yields them.

    :ivar lsn: both contain what finished before it, and nothing else.
    :ivar publisher: the publisher's snapshot; ``target``: the target's.
    :ivar pause: seconds for which apply stood still.
    """

    lsn: int
    publisher: ExportedSnapshot
    target: ExportedSnapshot
    pause: float


class GivenUp(Exception):
    """Failure of one attempt, because apply went on or the barrier was too far ahead. Another attempt may succeed."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One point at which apply waits.

    :ivar lsn: the target contains what finished before it, and nothing else.
    :ivar publisher: the publisher's snapshot at this point.
    :ivar barrier: the barrier's token, for :func:`pgsub.target.ledger.maintenance.barrier.take`.
    """

    lsn: int
    publisher: ExportedSnapshot
    barrier: str


class Attempt:
    """One barrier, from its start to its release."""

    def __init__(
        self,
        session: psycopg.Connection,
        source: publisher.Connection,
        sub: Subscription,
        deadline: float,
        seconds: float,
        check: Callable[[], object],
        report: Report,
    ) -> None:
        self._session = session
        self._source = source
        self._sub = sub
        self._deadline = deadline
        self._seconds = seconds
        self._check = check
        self._report = report
        self._next_check = time.monotonic() + _CHECK
        self._token: str | None = None
        self._lsn = 0  #: the barrier's position

    def run(self, holder: psycopg.Connection) -> tuple[Point, SlotSnapshot]:
        """Take both snapshots and let apply go on.

        :raises GivenUp: no point was found.
        """
        snapshot = self._snapshot()
        try:
            point, stood = self._at(snapshot)
            began = time.monotonic()
            holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            exported = ExportedSnapshot.of(holder)
            failpoints.point("point.taken")
            # guard: apply is stopped until the target's snapshot is taken
            if not self.release():
                raise self._gone()
            pause = stood + time.monotonic() - began
            snapshot.drop()
        except BaseException:
            snapshot.close()
            leave_transaction(holder)
            raise
        return Point(point, snapshot.exported, exported, pause), snapshot

    def stand(self, work: Callable[[Standing], Result | None]) -> Result:
        """Do work while apply waits at the point.

        :raises GivenUp: no point was found, or apply had gone on.
        """
        with self._snapshot() as snapshot:
            point, _ = self._at(snapshot)
            assert self._token is not None
            found = work(Standing(point, snapshot.exported, self._token))
        if found is None:
            raise self._gone()
        self._token = None
        return found

    def _at(self, snapshot: SlotSnapshot) -> tuple[int, float]:
        """Bring apply to the snapshot's point; return the point, and how long apply had waited before."""
        point = snapshot.consistent_point
        # guard: the publisher's snapshot is taken at the barrier
        if point < self._lsn:
            raise GivenUp(f"The snapshot is of {format_lsn(point)}, and apply may be at {format_lsn(self._lsn)}.")
        self._move(point)
        stood = self._reach()
        failpoints.point("point.standing")
        return point, stood

    def release(self) -> bool:
        """Let apply go on; return False if it has already done so by itself."""
        token, self._token = self._token, None
        if token is None:
            return False
        return self._patiently(partial(barrier.remove, self._session, self._sub.subid, token))

    def abandon(self) -> None:
        """Remove the barrier, even after the deadline, because nobody needs apply to wait any more."""
        self._deadline, self._check = time.monotonic() + RELEASE_SECONDS, lambda: None
        # the original failure is the one to report
        with contextlib.suppress(psycopg.Error, PgsubError):
            self.release()

    def _near(self) -> None:
        """Put up the barrier, and wait until apply has stopped at it, not far from the end of the publisher's WAL."""
        self._lsn = self._flushed()
        put = partial(barrier.put, self._session, self._sub.subid, self._lsn, self._seconds)
        self._token = self._patiently(put)
        failpoints.point("point.barrier_put")
        while True:
            self._reach()
            position = self._flushed()
            if position - self._lsn <= NEAR_BYTES:
                return
            self._check_time()  # apply may reach every barrier at once and never be near
            self._move(position)

    def _snapshot(self) -> SlotSnapshot:
        """Put up the barrier and create a temporary slot. The barrier follows the WAL while the slot waits."""
        name = f"pgsub_{self._sub.subid}_verify_{secrets.token_hex(4)}"
        with contextlib.ExitStack() as stack:

            def opened(pid: int) -> None:
                self._near()
                stack.enter_context(self._following(pid))

            return SlotSnapshot.open(
                self._sub.connection,
                name,
                self._sub.name,
                verify=lambda replication: verified_publisher.verify(self._session, replication, self._sub.subid),
                must_use_password=must_use_password(self._session, self._sub),
                report=self._report,
                temporary=True,
                deadline=self._deadline,
                on_open=opened,
            )

    @contextlib.contextmanager
    def _following(self, pid: int) -> Iterator[None]:
        done = threading.Event()
        follower = SupervisedThread("barrier", "barrier", partial(self._follow, pid, done))
        follower.start()
        try:
            yield
        finally:
            done.set()
            follower.join()
        if follower.fatal_error is not None:
            raise follower.fatal_error

    def _follow(self, pid: int, done: threading.Event) -> None:
        """Move the barrier while the slot waits for a transaction, because its snapshot follows the end of that one."""
        replayed: deque[tuple[float, int]] = deque()
        while not done.wait(_FOLLOW):
            position = self._flushed()
            with translating(self._source, "read the locks of the publisher"):
                standby, waits = self._source.execute(_WAITS, (pid,)).fetchone() or (False, False)
            if standby:
                replayed.append((time.monotonic() + _READ_SECONDS, position))
                waits, position = False, 0
                while replayed and replayed[0][0] <= time.monotonic():
                    waits, position = True, replayed.popleft()[1]
            if waits and position > self._lsn:
                with contextlib.suppress(psycopg.Error, GivenUp):  # the owner of the attempt will get the error too
                    self._move(position, once=True)

    def _flushed(self) -> int:
        with translating(self._source, "read the WAL position of the publisher"):
            return flushed_position(self._source)

    def _move(self, lsn: int, *, once: bool = False) -> None:
        assert self._token is not None
        self._lsn = lsn  # even if the outcome of the move is unknown
        move = partial(barrier.move, self._session, self._sub.subid, self._token, lsn)
        if not (move() if once else self._patiently(move)):
            raise self._gone()

    def _reach(self) -> float:
        """Wait until apply has stopped at the barrier; return how long it had waited before."""
        while True:
            found = barrier.read(self._session, self._sub.subid)
            if found is None or found.token != self._token:
                raise self._gone()
            if found.reached:
                return found.stood
            self._check_time()
            time.sleep(_POLL)

    def _patiently(self, change: Callable[[], Result]) -> Result:
        """Change the barrier. Apply holds its row while it commits a batch."""
        while True:
            try:
                return change()
            except psycopg.errors.LockNotAvailable:
                self._check_time()

    def _check_time(self) -> None:
        clock = time.monotonic()
        if clock >= self._next_check:
            self._check()
            self._next_check = time.monotonic() + _CHECK
        if clock >= self._deadline:
            raise TimeoutExpired(
                f'timeout while bringing subscription "{self._sub.name}" to one point',
                detail=f"Apply has not reached {format_lsn(self._lsn)}.",
                hint=f"See where it stands:\npgsub status {word(self._sub.name)}",
            )

    def _gone(self) -> GivenUp:
        return GivenUp(
            f"Apply paused for {self._seconds:g} seconds and continued by itself, or another command stops it."
        )
