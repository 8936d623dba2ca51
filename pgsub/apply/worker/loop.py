"""The main loop of both kinds of workers: receive, assemble, apply in batches, report. Mirrors LogicalRepApplyLoop.

:class:`~pgsub.apply.worker.policy.WorkerPolicy` has the differences between an apply worker and a tablesync worker.
:mod:`pgsub.apply.worker.committer` commits transactions on the target. :mod:`pgsub.apply.worker.feedback` reports them.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from functools import partial

import psycopg

from pgsub.apply.conflicts.unique_violation import complete_errors
from pgsub.apply.parallel.leader import ParallelLeader
from pgsub.apply.parallel.worker import ParallelWorker
from pgsub.apply.rows.worker_sessions import WorkerStreams
from pgsub.apply.stream.receiver import Receiver
from pgsub.apply.stream.transaction_batch import Batch, TransactionRun
from pgsub.apply.stream.transactions import Kind, RemoteTransaction
from pgsub.apply.worker import batch_size
from pgsub.apply.worker.committer import Committer
from pgsub.apply.worker.feedback import Feedback
from pgsub.apply.worker.policy import WorkerPolicy
from pgsub.apply.worker.start import WorkerSpec
from pgsub.apply.writers.pool import Writers
from pgsub.common import failpoints
from pgsub.common.errors import StreamsMustRestart
from pgsub.common.worker_heartbeat import Heartbeat, HeartbeatSender
from pgsub.protocol.frames import Frames
from pgsub.protocol.lsn import covered
from pgsub.protocol.walsender_messages import Keepalive
from pgsub.target.ledger import worker_takeover
from pgsub.target.ledger.progress import Control
from pgsub.target.session.connect import translate

#: Seconds between reads of the control row.
CONTROL_SECONDS = 0.2
#: Seconds between requests for an idle publisher's position, which also ends hand-overs and waits for a position.
PING_SECONDS = 1.0
#: Seconds between both while somebody waits for apply.
HURRY_SECONDS = 0.02
#: Seconds between checks for the launcher's answer, for which the apply position waits.
ANSWER_SECONDS = 0.005
#: Minimum seconds between records that a publication is missing, which a publisher could say again and again.
NOTICE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """The outcome of a worker (``stopped``, ``reached`` or ``done``) and its positions."""

    outcome: str
    remote_lsn: int
    position: int


class ApplyLoop:
    """One run of one worker.

    :param streams: target session that has the claim, and publisher stream that starts at the ledger's position.
    :param spec: its ``until_lsn`` ends the run once everything before it is applied, and nothing after; 0 for no end.
    :param state: state of a tablesync worker, for display.
    """

    def __init__(self, streams: WorkerStreams, policy: WorkerPolicy, spec: WorkerSpec, *, state: str = "") -> None:
        self._streams = streams
        self._policy = policy
        self._subscription, claim = spec.subscription, spec.claim
        untagged = spec.applies and not streams.session.progress.tagged
        self._heartbeat = Heartbeat(claim.subid, claim.worker, epoch=claim.epoch, state=state, untagged=untagged)
        self._sender = HeartbeatSender(spec.heartbeat)
        self._transactional = spec.subscription.apply_mode == "transactional"  #: one target commit per transaction
        self._until = spec.until_lsn
        self._progress = streams.session.progress
        self._leader = ParallelLeader(
            streams.parallel_workers,
            streams.open_session,
            should_apply=policy.filter_for_streaming,
            before_block=self._apply_batch,
            set_based=streams.set_based,
        )
        streams.assembler.watch = self._leader
        self._writers = Writers(
            streams.writers,
            streams.session,
            streams.open_writer,
            should_apply=lambda: None if self._leader.busy else policy.filter_for_streaming(),
            beat=self._beat,
            single=self._transactional,
            set_based=streams.set_based,
        )
        self._committer = Committer(
            streams.session,
            policy,
            stop_streaming=self._leader.stop_streaming,
            beat=self._beat,
            writers=self._writers if self._writers.wanted else None,
            transactional=self._transactional,
            set_based=streams.set_based,
        )
        self._receiver = Receiver(
            streams.walsender,
            self._progress.remote_lsn,
            min(self._progress.reported_lsn, max(self._progress.remote_lsn, streams.confirmed)),
            streams.timing,
            lambda: (self.position, self._committer.changes, [one.changes for one in self._leader.busy]),
        )
        self._batch = Batch()
        self._batch_since = 0.0
        self._later_keepalive: Keepalive | None = None  #: the last one received after the batch
        self._done = False  #: a transaction beyond ``until`` was discarded
        self._ending = False  #: the policy refused a transaction: nothing after it may be applied or acknowledged
        self._next_control = self._next_ping = self._next_notice = 0.0
        self._wanted = 0  #: a position that somebody waits for in the ledger
        streams.assembler.on_message = self._committer.take_message
        hears = spec.heartbeat is not None and claim.worker == worker_takeover.APPLY
        shown_lsn = partial(self._sender.shown_lsn, self._heartbeat) if hears else None
        self._feedback = Feedback(streams, self._receiver, self._committer.ledger_commit, shown_lsn)
        self._began_at = self._progress.remote_lsn
        self.position = self._progress.remote_lsn  #: includes idle stretches
        self._position_ts = 0  #: the publisher's time at that position, from which lag is measured

    @property
    def remote_lsn(self) -> int:
        """End LSN of the last committed transaction."""
        return self._committer.remote_lsn

    def run(self) -> WorkerResult:
        """Run until a stop is requested or the policy is done.

        :raises PgsubError: located if possible, with the details of a conflict.
        """
        with complete_errors(self._streams.session.connection, self._subscription):
            return WorkerResult(self._run(), self.remote_lsn, self.position)

    def _run(self) -> str:
        self._receiver.start()
        try:
            self._policy.attach(self)  # queries the target, which may fail
            while (outcome := self._between()) is None:
                # guard: nothing beyond the bound of a run is applied or acknowledged
                if self._done:  # the next worker gets what comes now; this one continues for its policy only
                    time.sleep(self._patience())
                    continue
                frames = self._receiver.take(self._patience())
                self._burst(frames)
                if self._batch and (self._done or self._full() or self._gathered(frames is None)):
                    self._apply_batch()
            self._feedback.finish(self.position)
            return outcome
        except psycopg.Error as error:
            raise translate(error, "apply changes to the target") from None
        finally:
            with contextlib.suppress(Exception):
                self._beat(now=True)  # its counts would be lost otherwise
            with contextlib.suppress(Exception):
                self._writers.close()
            with contextlib.suppress(Exception):
                self._leader.close()
            with contextlib.suppress(Exception):
                self._receiver.close()

    def _patience(self) -> float:
        """Return for how many seconds to wait for the next message."""
        if self._batch or self._policy.hurries():
            return batch_size.CLOSE_SECONDS
        if self._feedback.waits:
            return ANSWER_SECONDS
        return HURRY_SECONDS if self._hurries else 0.1

    # receiving

    def _burst(self, frames: Frames | None) -> None:
        # guard: a publication that is dropped and made again is told
        if time.monotonic() >= self._next_notice and self._streams.walsender.take_skipped_publication():
            self._next_notice = time.monotonic() + NOTICE_SECONDS
            position = max(self.position, self._receiver.flushed)
            self._committer.take_skipped_publication(self._subscription.subid, position)
        for received in self._streams.assembler.take(frames) if frames is not None else ():
            # guard: nothing behind a batch that was given up is applied
            if self._ending:  # set by :meth:`_apply_batch` inside the assembler, before a stream block
                break
            if isinstance(received, Keepalive):
                self._keepalive(received)
            elif isinstance(received, TransactionRun):
                self._take_run(received)
            else:
                self._take(received)
            if self._done or self._ending:
                break
        else:
            self._streams.assembler.pause()
        if not self._ending:  # otherwise the next worker receives them again
            self._committer.record_messages()

    def _keepalive(self, keepalive: Keepalive) -> None:
        """Handle a position without a transaction: it counts once everything before it is applied."""
        self._later_keepalive = keepalive
        self._feedback.requested |= keepalive.reply_requested
        if self._batch or self._ending:
            return
        self._later_keepalive = None
        if keepalive.wal_end >= self.position:
            self.position, self._position_ts = keepalive.wal_end, keepalive.send_ts
        self._feedback.applied(self.position, self.remote_lsn)

    def _take_run(self, run: TransactionRun) -> None:
        """Add a whole run, or its transactions one by one if a bound may lie inside it."""
        lsns = run.finish_lsns
        if covered(int(lsns[0]), self.remote_lsn) or (self._until and not covered(int(lsns[-1]), self._until)):
            for transaction in run.transactions():
                if not (self._done or self._ending):
                    self._take(transaction)
            return
        self._add(run)

    def _take(self, transaction: RemoteTransaction) -> None:
        streamed = transaction.in_stream
        if self._until and not covered(transaction.finish_lsn, self._until):
            self._done = True
        # guard: no position covers a PREPARE, without "transaction.kind is not Kind.PREPARE and "
        elif transaction.kind is not Kind.PREPARE and covered(transaction.finish_lsn, self.remote_lsn):
            # received again after a restart and already applied, but its relation descriptions are not sent again
            self._apply_batch()
            self._streams.session.relations.learn_all(transaction)
            transaction.release()
        elif (streamed and self._leader.worker_of(transaction.xid)) or transaction.kind is not Kind.COMMIT:
            self._apply_batch()  # the transaction's parallel worker gives way, too, if this ends in a deadlock
            if not self._ending:
                self._batch.add(transaction)
                self._apply_batch(self._leader.worker_of(transaction.xid) if streamed else None)
        else:
            self._add(transaction)
        if streamed:
            self._leader.end(transaction.xid)

    def _add(self, item: RemoteTransaction | TransactionRun) -> None:
        if not self._batch:
            self._batch_since = time.monotonic()
        self._batch.add(item)
        self._later_keepalive = None  # the transaction has a later position
        if self._full():
            self._apply_batch()

    def _full(self) -> bool:
        single = self._transactional and not self._writers.several
        return single or batch_size.full(self._batch, self._batch_since)

    def _gathered(self, quiet: bool) -> bool:
        receiver = self._receiver
        return receiver.idle() and batch_size.gathered(self._batch, self._batch_since, receiver, quiet)

    # applying

    def _apply_batch(self, parallel: ParallelWorker | None = None) -> None:
        batch, self._batch = self._batch, Batch()
        if batch:
            self._committer.record_messages()  # before the ledger passes them
        while batch:
            done = self._committer.apply(batch, parallel)
            parallel = None  # its transaction can be committed only once
            applied, batch = batch.cut(done)
            if done:
                self._applied(applied)
            elif self._policy.refused() or self._read_control().stop:
                batch, self._ending = Batch(), True  # not begun here: the next worker receives it again
            self._writers.rest()
            self._beat()
        if self._later_keepalive is not None:
            self._keepalive(self._later_keepalive)

    def _applied(self, batch: Batch) -> None:
        last = batch.last
        if last.end_lsn >= self.position:
            self.position, self._position_ts = last.end_lsn, last.commit_ts
        self._feedback.applied(self.position, self.remote_lsn)
        failpoints.point("apply.after_target_commit")
        batch.release()

    # between batches

    def _between(self) -> str | None:
        clock = time.monotonic()
        control = None
        if (clock >= self._next_control and self._receiver.idle()) or clock >= self._next_control + 1:
            control = self._read_control()
            self._feedback.requested |= self._progress.reported_lsn < control.wanted_lsn <= self.position
        if self._feedback.report_if_due(clock, self.position, self.remote_lsn):
            self._beat(now=True)
        if self._feedback.waits:
            self._feedback.applied(self.position, self.remote_lsn)
        if self._policy.boundary(control):
            return "done"
        # A new connection receives only the descriptions of changed tables. Without progress it would get as many
        # again.
        if self._streams.assembler.crowded and not self._batch and self.remote_lsn > self._began_at:
            raise StreamsMustRestart("the publisher has described tables enough for one connection")
        # a refused batch lies before the transaction beyond ``until``
        reached = not self._ending if self._done else self._until and self.position >= self._until
        if reached and not self._policy.unfinished():
            return "reached"
        if clock >= self._next_ping and self._receiver.idle():
            self._next_ping = clock + (HURRY_SECONDS if self._hurries else PING_SECONDS)
            self._receiver.ping()
        self._writers.rest()
        self._beat()
        return "stopped" if self._ending or (control is not None and control.stop) else None

    def _read_control(self) -> Control:
        control = self._progress.control()
        self._wanted = control.wanted_lsn
        self._next_control = time.monotonic() + (HURRY_SECONDS if self._hurries else CONTROL_SECONDS)
        return control

    @property
    def _hurries(self) -> bool:
        """Whether somebody waits for apply, or for a position in the ledger."""
        return self._policy.hurries() or self._progress.reported_lsn < self._wanted

    def _beat(self, *, now: bool = False) -> None:
        heartbeat, receiver = self._heartbeat, self._receiver
        heartbeat.received_lsn = receiver.received
        heartbeat.last_msg_send_time, heartbeat.last_msg_receipt_time = receiver.last_send_ts, receiver.last_receipt_ts
        heartbeat.latest_end_lsn, heartbeat.latest_end_time = receiver.latest_end_lsn, self._position_ts
        heartbeat.position, heartbeat.reported_lsn = self.position, self._progress.reported_lsn
        heartbeat.parallel = len(self._leader.busy) + self._writers.open
        heartbeat.sessions, heartbeat.sessions_why = 1 + self._writers.open, self._writers.why
        for name, count in (self._committer.counters + self._writers.counters).items():
            setattr(heartbeat, name, count)
        self._sender.send(heartbeat, now=now)
