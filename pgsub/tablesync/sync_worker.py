"""The tablesync worker after its copy: streams its own slot until the table changes hands. Mirrors tablesync.c.

NOTES
A table changes hands at one position: this worker applies what finishes before it, apply what finishes at it or later.
The server agrees on the position through shared memory, where the sync worker waits (``w``) until apply has set it.
Here only the ledger is shared, and either worker may be gone at any time.

S is the position before which this worker has applied everything, A that of apply. While apply is far ahead the worker
chases it. If A <= S the table is handed over at S at once. Otherwise the worker claims H = max(A, S) under apply's
lock. Apply keeps off the table's changes from H on, and waits at the first of them. The worker applies up to H, nothing
beyond, and commits ``s`` with srsublsn = H. It holds that

- H never lies before A: apply decides and moves A under the lock that the claim is made under (``states.changing``);
- no change is applied twice or lost: ``covered`` (finish LSN < position) is the one comparison on both sides;
- neither waits for ever: apply takes a claim back after some time, and this worker finds that out before it commits.

It breaks if this worker applies a transaction beyond a standing claim, or if apply decides by states that are older
than its lock. An older attempt's claim stands and is kept.
"""

from __future__ import annotations

import time

import psycopg

from pgsub.apply.rows.relation_cache import local_name
from pgsub.apply.rows.table_state_filter import Decision, Filter
from pgsub.apply.rows.worker_sessions import WorkerStreams
from pgsub.apply.stream.batch import Batch
from pgsub.apply.worker.loop import ApplyLoop, WorkerResult
from pgsub.apply.worker.policy import Positions, WorkerPolicy
from pgsub.apply.worker.start import WorkerSpec, streams
from pgsub.common import failpoints
from pgsub.protocol.lsn import covered
from pgsub.protocol.messages import Relation
from pgsub.target.ledger import subscriptions
from pgsub.target.ledger.progress import Control
from pgsub.target.ledger.skip import Skip
from pgsub.target.ledger.tables import handover, states

#: Chase freely while apply is further ahead than this, and for so many attempts; then claim.
NEAR_BYTES = 16 << 20
CHASES = 20
_ATTEMPT_SECONDS = 0.1


def run(spec: WorkerSpec) -> WorkerResult:
    """Apply this table's changes from its slot until ``s`` is committed.

    :return: outcome ``done`` when the table changed hands, ``stopped`` when asked to stop.
    """
    with streams(spec) as opened:
        return ApplyLoop(opened, SyncPolicy(opened, spec), spec, state=states.CATCHUP).run()


class SyncPolicy(WorkerPolicy):
    """The policy of one table's worker: only this table, and with a claim only what the claim covers."""

    def __init__(self, opened: WorkerStreams, spec: WorkerSpec) -> None:
        assert spec.relation is not None
        self._streams = opened
        self._claim = spec.claim
        self._relation = spec.relation
        self._handover: int | None = None
        self._reached = False  #: a transaction beyond the claim came: everything before it is applied
        self._attempts = 0
        self._lost = 0  #: claims that were taken back: then it chases longer before the next one
        self._start = 0  #: where the copy left it
        self._next_attempt = 0.0
        self._done = False

    def attach(self, loop: Positions) -> None:
        """See :class:`~pgsub.apply.worker.policy.WorkerPolicy`; an older attempt's claim still stands and is kept."""
        self._loop = loop
        self._start = loop.remote_lsn
        self._handover = self._standing()

    def admit(self, batch: Batch) -> int:
        """Admit nothing beyond the claim."""
        if self._handover is None:
            return len(batch)
        for number, transaction in enumerate(batch.transactions()):
            if not covered(transaction.finish_lsn, self._handover):
                self._reached = True
                return number
        return len(batch)

    def should_apply(self, relation: Relation, oid: int | None, finish_lsn: int) -> Decision | None:
        """Take changes of this table, or of its name: those of another table of that name will be refused, not lost."""
        ours = oid == self._claim.worker or local_name(relation) == self._relation
        return Decision(self._claim.worker) if ours else None

    def skip(self) -> Skip | None:
        """Return the skip that the ledger has."""
        return self._streams.session.progress.skip

    def holds(self) -> bool:
        """Return False: only a table that is apply's can be held."""
        return False

    def unfinished(self) -> bool:
        """Return False: see :meth:`boundary`."""
        return False

    def filter_for_streaming(self) -> tuple[int, Filter] | None:
        """Return None: what lies beyond the claim must not be begun, and that takes the finish LSN to know."""
        return None

    def refused(self) -> bool:
        """Hand over at the claim, beyond which a transaction waits, or learn that it was taken back."""
        self._attempt()
        if not self._done:
            time.sleep(0.02)
        return self._done

    def boundary(self, control: Control | None) -> bool:
        """Try to hand over; True once ``s`` is committed."""
        if self._done:
            return True
        clock = time.monotonic()
        if clock < self._next_attempt:
            return False
        self._next_attempt = clock + _ATTEMPT_SECONDS
        self._attempt()
        return self._done

    @property
    def _position(self) -> int:
        """S: everything before is applied here; with a claim never beyond it."""
        if self._handover is None:
            return self._loop.position
        reached = self._handover if self._reached else min(self._loop.position, self._handover)
        return max(self._start, reached)  # a claim from before the copy lies before what came with it

    def _attempt(self) -> None:
        self._attempts += 1
        connection, position = self._streams.session.connection, self._position
        apply_lsn = subscriptions.apply_position(connection, self._claim.subid)
        if self._handover is None and apply_lsn > position:
            if apply_lsn - position > NEAR_BYTES and self._attempts < CHASES << min(self._lost, 8):
                return
        elif self._handover is not None and position < self._handover:
            self._recheck()
            return
        try:
            self._hand_over(apply_lsn, position)
        except psycopg.errors.LockNotAvailable:
            return  # apply holds its row in a long transaction; the stream is served meanwhile

    def _hand_over(self, apply_lsn: int, position: int) -> None:
        connection = self._streams.session.connection
        if self._handover is None and apply_lsn > position:
            self._handover = handover.claim_handover(connection, self._claim, position)
            failpoints.point("sync.after_claim")
            return
        failpoints.point("sync.before_s")
        outcome = handover.try_syncdone(connection, self._claim, position)
        self._done = outcome.done
        if not outcome.done and outcome.handover_lsn != self._handover:
            self._forget_claim(outcome.handover_lsn)

    def _standing(self) -> int | None:
        """Read the claim that the ledger has."""
        rows = subscriptions.relations(self._streams.session.connection, self._claim.subid)
        return next((r.handover_lsn for r in rows if r.srrelid == self._claim.worker), None)

    def _recheck(self) -> None:
        """Apply may have taken the claim back while this worker was on its way."""
        standing = self._standing()
        if standing != self._handover:
            self._forget_claim(standing)

    def _forget_claim(self, standing: int | None) -> None:
        self._handover, self._reached, self._attempts, self._lost = standing, False, 0, self._lost + 1
