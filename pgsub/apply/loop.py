"""The loop that both kinds of workers run: receive, assemble, apply in batches, report. Mirrors LogicalRepApplyLoop.

What differs between the apply worker and a tablesync worker is asked of a :class:`Role`. Everything that carries the
promise is here once: the lock before the decision, the compare-and-set with the data, record before report.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import psycopg
from psycopg.types.json import Jsonb

from pgsub import failpoints
from pgsub.apply import conflict
from pgsub.apply.conflict import ConflictRecord, Place
from pgsub.apply.executor import Executor
from pgsub.apply.receiver import Receiver
from pgsub.apply.relations import RelationCache
from pgsub.apply.transactions import Assembler, RemoteTransaction
from pgsub.errors import Directive, PgsubError
from pgsub.protocol import envelope
from pgsub.protocol.envelope import Keepalive
from pgsub.protocol.lsn import covered
from pgsub.protocol.messages import Relation
from pgsub.publisher.walsender import WalSender
from pgsub.pulse import Pulse, PulseSender
from pgsub.target.connect import translate
from pgsub.target.progress import Control, Progress

#: A batch ends at these; a lone small transaction is applied at once.
BATCH_BYTES, BATCH_TRANSACTIONS, BATCH_SECONDS = 16 << 20, 5000, 1.0
#: Seconds between durable reports while transactions keep coming, and between looks at the control row.
REPORT_SECONDS, CONTROL_SECONDS = 0.1, 0.2
#: An idle publisher is asked for its position this often: hand-overs and waits for a position end there too.
PING_SECONDS = 1.0
#: Bytes of WAL without a transaction after which the ledger is written for keepalives alone.
IDLE_REPORT_BYTES = 16 << 20
#: At the end of a run the launcher gets this long to record what feedback must not pass.
MIRROR_SECONDS = 2.0
#: invalid_sql_statement_name: psycopg deallocates every prepared statement of the session after a rollback that it
#: sees, the pipeline's too; they are prepared again.
_DEALLOCATED = "26000"
_KEEPALIVE = ord("k")
_HEADER = 25


class Role(Protocol):
    """What an apply worker and a tablesync worker do differently."""

    def attach(self, loop: ApplyLoop) -> None:
        """Called once, before anything else: the loop whose positions the role looks at."""

    def admits(self, relation: Relation, oid: int, finish_lsn: int) -> int | None:
        """The oid of the subscribed table if a change is taken, None to leave it; asked under the progress row's lock.

        :param oid: of the target's table that bears the relation's name.
        """

    def admit(self, transactions: Sequence[RemoteTransaction]) -> int:
        """How many of these may be decided now, under the lock; 0 makes the loop wait and ask again."""

    def refused(self) -> bool:
        """Called without the lock after :meth:`admit` gave 0; True: what waits is not this worker's any more."""

    def boundary(self, control: Control | None) -> bool:
        """Called between batches and when idle; ``control`` is fresh when given. True ends the worker well."""


@dataclass(slots=True)
class Streams:
    """Both ends of one worker: restarted together, never one alone."""

    connection: psycopg.Connection
    walsender: WalSender
    progress: Progress
    relations: RelationCache
    assembler: Assembler
    waits: bool = False  #: commits on the publisher wait for the flush position, those that send nothing too


class ApplyLoop:
    """One run of one worker.

    :param streams: target session with the claim taken, publisher stream started at the ledger's position.
    :param role: see :class:`Role`.
    :param pulse: filled in and sent as the loop goes.
    :param transactional: one target commit per remote transaction.
    :param until_lsn: end when everything before it is applied, nothing after; 0 for no end.
    """

    def __init__(
        self,
        streams: Streams,
        role: Role,
        pulse: Pulse,
        sender: PulseSender,
        *,
        transactional: bool = False,
        until_lsn: int = 0,
    ) -> None:
        self._streams = streams
        self._role = role
        self._pulse = pulse
        self._sender = sender
        self._transactional = transactional
        self._until = until_lsn
        self._progress = streams.progress
        self._executor = Executor(streams.connection, pulse.subid, streams.relations)
        self._receiver = Receiver(streams.walsender, self._progress.remote_lsn, self._progress.reported_lsn)
        self._batch: list[RemoteTransaction] = []
        self._batch_bytes = 0
        self._batch_since = 0.0
        self._done = False
        self._ending = False  #: something received was given up: nothing after it may be applied or acknowledged
        self._events = True  #: an earlier worker may have left some
        self._next_report = self._next_control = self._next_ping = 0.0
        self.remote_lsn = self._progress.remote_lsn  #: end LSN of the last committed transaction
        self.position = self._progress.remote_lsn  #: idle stretches included
        self._position_ts = 0  #: the publisher's clock when that was its newest: what a lag is measured from
        role.attach(self)

    def run(self) -> str:
        """Until asked to stop or the role is done.

        :return: ``stopped``, ``reached`` (until_lsn) or ``done``.
        :raises PgsubError: located where it can be.
        """
        self._receiver.start()
        try:
            while True:
                self._burst(self._receiver.take(0.05 if self._batch else 0.1))
                if self._batch and (self._done or self._receiver.idle() or self._full()):
                    self._apply_batch()
                outcome = self._between()
                if outcome:
                    self._finish()
                    return outcome
        except psycopg.Error as error:
            raise translate(error, "apply changes to the target") from None
        finally:
            with contextlib.suppress(Exception):
                self._receiver.close()

    # receiving

    def _burst(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            if self._done or self._ending:
                return
            if frame[0] == _KEEPALIVE:
                self._keepalive(frame)
                continue
            if len(frame) <= _HEADER or frame[0] != 0x77:
                envelope.parse(frame)
            transaction = self._streams.assembler.feed(frame[_HEADER:])
            if transaction is not None:
                self._take(transaction)

    def _keepalive(self, frame: bytes) -> None:
        keepalive = envelope.parse(frame)
        if not isinstance(keepalive, Keepalive) or self._streams.assembler.in_transaction:
            return
        if self._batch:
            self._apply_batch()
        if self._ending:
            return
        if keepalive.wal_end >= self.position:
            self.position, self._position_ts = keepalive.wal_end, keepalive.send_ts
        self._receiver.progress(applied=self.position)

    def _take(self, transaction: RemoteTransaction) -> None:
        if self._until and not covered(transaction.finish_lsn, self._until):
            self._done = True
            return
        if covered(transaction.finish_lsn, self.remote_lsn):
            # sent again after a restart: applied before, but what it says of relations is not said again
            if self._batch:
                self._apply_batch()
            self._executor.skim(transaction)
            transaction.release()
            return
        if not self._batch:
            self._batch_since = time.monotonic()
        self._batch.append(transaction)
        self._batch_bytes += transaction.size
        if self._full():
            self._apply_batch()

    def _full(self) -> bool:
        return (
            self._transactional
            or self._batch_bytes >= BATCH_BYTES
            or len(self._batch) >= BATCH_TRANSACTIONS
            or time.monotonic() - self._batch_since >= BATCH_SECONDS
        )

    # applying

    def _apply_batch(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        while batch:
            done = self._apply(batch)
            for transaction in batch[:done]:
                transaction.release()
            batch = batch[done:]
            if not done and (self._role.refused() or self._look().stop):
                batch, self._ending = [], True  # not begun here: whoever is next gets it sent again
            self._beat()

    def _apply(self, batch: Sequence[RemoteTransaction]) -> int:
        """One target transaction for as many as the role admits; on a fault one by one, naming the culprit."""
        relations = self._streams.relations
        before = relations.snapshot()
        for first in (True, False):
            try:
                return self._commit(batch)
            except PgsubError as error:
                if not self._rolled_back() or error.directive is not Directive.FAULT:
                    raise
                relations.restore(before)
                if not first or error.sqlstate != _DEALLOCATED:
                    break
        return self._serially(batch)

    def _serially(self, batch: Sequence[RemoteTransaction]) -> int:
        for number, transaction in enumerate(batch):
            self._executor.copies = False
            try:
                if not self._commit([transaction]):
                    return number
            except PgsubError:
                self._rolled_back()
                raise
            finally:
                self._executor.copies = True
            transaction.release()
        return len(batch)

    def _commit(self, batch: Sequence[RemoteTransaction]) -> int:
        connection, progress = self._streams.connection, self._progress
        connection.execute("BEGIN")
        progress.lock(self.remote_lsn)
        count = self._role.admit(batch)
        if count == 0:
            connection.execute("ROLLBACK")
            return 0
        failpoints.point("apply.batch_open")
        conflicts = self._executor.run(batch[:count], self._role.admits)
        last = batch[count - 1]
        self._record(conflicts)
        progress.advance(self.remote_lsn, last.end_lsn, last.commit_ts)
        failpoints.point("apply.before_target_commit")
        self._end_commit(last)
        self.remote_lsn = last.end_lsn
        if last.end_lsn >= self.position:
            self.position, self._position_ts = last.end_lsn, last.commit_ts
        self._pulse.transactions += count
        self._receiver.progress(applied=self.position)
        failpoints.point("apply.after_target_commit")
        return count

    def _end_commit(self, last: RemoteTransaction) -> None:
        try:
            self._streams.connection.execute("COMMIT")
            failpoints.point("apply.commit_reply_lost")
        except psycopg.Error as error:  # a deferred constraint, or the reply is lost and only the ledger knows
            place = Place(last, "COMMIT") if error.sqlstate else None
            raise conflict.fault(self._pulse.subid, error, place) from None

    def _record(self, conflicts: Sequence[ConflictRecord]) -> None:
        if not conflicts:
            return
        self._events = True
        rows = [(subid, Jsonb(body)) for subid, body in conflict.events(conflicts, self._pulse.subid)]
        with self._streams.connection.cursor() as cursor:
            cursor.executemany("INSERT INTO pgsub.event (subid, body) VALUES (%s, %s)", rows)

    def _rolled_back(self) -> bool:
        """Whether the session is there and out of its transaction; if not, what broke it is known already."""
        try:
            self._streams.connection.execute("ROLLBACK")
        except psycopg.Error:
            return False
        return True

    # between batches

    def _between(self) -> str | None:
        clock = time.monotonic()
        control = None
        if (clock >= self._next_control and self._receiver.idle()) or clock >= self._next_control + 1:
            control = self._look()
        self._report_if_due(clock)
        if self._role.boundary(control):
            return "done"
        if self._done or (self._until and self.position >= self._until):
            return "reached"
        if clock >= self._next_ping and self._receiver.idle():
            self._next_ping = clock + PING_SECONDS
            self._receiver.ping()
        self._beat()
        return "stopped" if self._ending or (control is not None and control.stop) else None

    def _look(self) -> Control:
        self._next_control = time.monotonic() + CONTROL_SECONDS
        return self._progress.control()

    def _report_if_due(self, clock: float) -> None:
        behind = self.remote_lsn > self._progress.reported_lsn
        unreported = self.position - max(self._progress.reported_lsn, self.remote_lsn)
        idle = unreported >= (1 if self._streams.waits else IDLE_REPORT_BYTES)
        if clock >= self._next_report and (behind or idle):
            self._report()

    def _report(self) -> None:
        """Record before report: the ledger's synchronous commit first, then the flush position of the feedback."""
        self._next_report = time.monotonic() + REPORT_SECONDS
        if self._events and self._progress.unmirrored_events():
            return
        self._events = False
        position = self.position
        self._progress.report(position)
        failpoints.point("apply.after_reported_lsn")
        self._receiver.progress(flushed=position)

    def _finish(self) -> None:
        deadline = time.monotonic() + MIRROR_SECONDS
        while self._events and self._progress.unmirrored_events() and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.position > self._progress.reported_lsn:
            self._report()
        self._beat(now=True)

    def _beat(self, *, now: bool = False) -> None:
        pulse, receiver = self._pulse, self._receiver
        pulse.received_lsn = receiver.received
        pulse.last_msg_send_time, pulse.last_msg_receipt_time = receiver.last_send_ts, receiver.last_receipt_ts
        pulse.latest_end_lsn, pulse.latest_end_time = receiver.told, self._position_ts
        pulse.position, pulse.changes = self.position, self._executor.changes
        self._sender.send(pulse, now=now)
