"""The sync worker after its copy: it streams its own slot until the table is handed over. Mirrors tablesync.c.

NOTES
A table is handed over at one position. This worker applies transactions that finish before it, and apply all others.
The server agrees on the position through shared memory, where the sync worker waits (``w``) until apply has set it.
Here only the ledger is shared, and either worker may be gone at any time.

S is the position before which this worker has applied everything, A the same for apply. While apply is far ahead, the
worker follows it. If A <= S, the table is handed over at S at once. Otherwise the worker claims H = max(A, S) under
apply's lock. Apply leaves out the table's changes from H on, and waits at the first of them. The worker applies up to
H and nothing beyond, and commits ``s`` with srsublsn = H. It holds that

- H never lies before A: apply decides and moves A under the lock that the claim is made under (``states.changing``);
- no change is applied twice or lost: both sides use the same comparison, ``covered`` (finish LSN < position);
- neither waits for ever: apply withdraws a claim after some time, and this worker notices before it commits.

It breaks if this worker applies a transaction beyond an existing claim, or if apply decides by states that are older
than its lock. A claim of an earlier attempt remains valid and is kept.

Tables that were copied together catch up together: one worker streams their shared slot, and their progress moves in
the same commits. They are claimed at one position. Apply may withdraw the claims of some of them. Those of the others
bind the worker as before. It ends as soon as any table is handed over, and the rest catch up in the next attempt.
"""

from __future__ import annotations

import time

import psycopg

from pgsub.apply.rows.relation_cache import local_name
from pgsub.apply.rows.table_state_filter import Decision, Filter
from pgsub.apply.rows.worker_sessions import WorkerStreams
from pgsub.apply.stream.transaction_batch import Batch
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

#: Follow without a claim while apply is further ahead than this, for at most this many attempts.
NEAR_BYTES = 16 << 20
CHASES = 20
_ATTEMPT_SECONDS = 0.1


def run(spec: WorkerSpec) -> WorkerResult:
    """Apply the tables' changes from their slot until ``s`` is committed for some of them.

    :return: outcome ``done`` after the hand-over, ``stopped`` after a stop request.
    """
    with streams(spec) as opened:
        return ApplyLoop(opened, SyncPolicy(opened, spec), spec, state=states.CATCHUP).run()


class SyncPolicy(WorkerPolicy):
    """The policy of a sync worker: apply only its tables, and with a claim only what the claim covers."""

    def __init__(self, opened: WorkerStreams, spec: WorkerSpec) -> None:
        self._streams = opened
        self._claims = list(spec.tables.values())
        self._relids = {claim.worker for claim in self._claims}
        self._names = {name: claim.worker for name, claim in spec.tables.items()}
        self._handover: int | None = None
        self._reached = False  #: a transaction beyond the claim arrived, so everything before it is applied
        self._attempts = 0
        self._lost = 0  #: number of withdrawn claims: the more, the longer it follows before the next claim
        self._start = 0  #: position of the copy
        self._next_attempt = 0.0
        self._done = False

    def attach(self, loop: Positions) -> None:
        """See :class:`~pgsub.apply.worker.policy.WorkerPolicy`. A claim of an earlier attempt is kept."""
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
        """Take changes by a table's OID or name. Those of another table of that name are refused later, not lost."""
        ours = oid if oid in self._relids else self._names.get(local_name(relation))
        return None if ours is None else Decision(ours)

    def skip(self) -> Skip | None:
        """Return the skip in the ledger."""
        return self._streams.session.progress.skip

    def unfinished(self) -> bool:
        """Return False: see :meth:`boundary`."""
        return False

    def filter_for_streaming(self) -> tuple[int, Filter] | None:
        """Return None: nothing beyond the claim may begin, and the finish LSN is not known before the end."""
        return None

    def refused(self) -> bool:
        """Hand over at the claim, beyond which a transaction waits, or notice that the claim was withdrawn."""
        self._attempt()
        if not self._done:
            time.sleep(0.02)
        return self._done

    def boundary(self, control: Control | None) -> bool:
        """Try to hand over; return True once ``s`` is committed."""
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
        """S: everything before it is applied here. With a claim it never lies beyond the claim."""
        if self._handover is None:
            return self._loop.position
        reached = self._handover if self._reached else min(self._loop.position, self._handover)
        return max(self._start, reached)  # a claim from before the copy lies before the copy's position

    def _attempt(self) -> None:
        self._attempts += 1
        connection, position = self._streams.session.connection, self._position
        apply_lsn = subscriptions.apply_position(connection, self._claims[0].subid)
        if self._handover is None and apply_lsn > position:
            if apply_lsn - position > NEAR_BYTES and self._attempts < CHASES << min(self._lost, 8):
                return
        elif self._handover is not None and position < self._handover:
            standing = self._standing()
            if standing != self._handover:  # apply has withdrawn the claim before this worker reached it
                self._forget_claim(standing)
            return
        try:
            self._hand_over(apply_lsn, position)
        except psycopg.errors.LockNotAvailable:
            return  # apply holds its row in a long transaction; the stream goes on meanwhile

    def _hand_over(self, apply_lsn: int, position: int) -> None:
        connection = self._streams.session.connection
        if self._handover is None and apply_lsn > position:
            self._handover = handover.claim_handover(connection, self._claims, position)
            failpoints.point("sync.after_claim")
            return
        failpoints.point("sync.before_s")
        outcome = handover.try_syncdone(connection, self._claims, position)
        self._done = bool(outcome.done)
        if not self._done and outcome.handover_lsn != self._handover:
            self._forget_claim(outcome.handover_lsn)

    def _standing(self) -> int | None:
        """Read the claim from the ledger."""
        return handover.standing(self._streams.session.connection, self._claims)

    def _forget_claim(self, standing: int | None) -> None:
        self._handover, self._reached, self._attempts, self._lost = standing, False, 0, self._lost + 1
