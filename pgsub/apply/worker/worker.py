"""The apply worker: the task of a Spark job that runs until it is asked to stop. Mirrors ApplyWorkerMain."""

from __future__ import annotations

import contextlib
import time

import psycopg

from pgsub.apply.rows.relation_cache import NEVER, local_name
from pgsub.apply.rows.table_state_filter import Decision, Filter
from pgsub.apply.rows.worker_sessions import WorkerStreams
from pgsub.apply.stream.transaction_batch import Batch
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.apply.worker import missing_partition, skip_rolled_back
from pgsub.apply.worker.barrier import ApplyBarrier
from pgsub.apply.worker.held_release import HeldRelease
from pgsub.apply.worker.loop import ApplyLoop, WorkerResult
from pgsub.apply.worker.policy import Positions
from pgsub.apply.worker.start import WorkerSpec, streams
from pgsub.common.errors import ApplyError, PgsubError, SchemaFault, StreamsMustRestart
from pgsub.protocol.lsn import covered
from pgsub.protocol.messages import Relation
from pgsub.target.ledger.progress import Control
from pgsub.target.ledger.skip import Skip
from pgsub.target.ledger.subscriptions import RelationState, table_states
from pgsub.target.ledger.tables import handover, held_tables, states

#: Seconds that apply waits at a claimed table's first change beyond the claim before it withdraws the claim.
CLAIM_PATIENCE = 5.0
#: Another session has locked the rows of the tables. Retries pause, because each attempt locks apply's row.
_LOCKED = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)
_PAUSE = 1.0


def run(spec: WorkerSpec) -> WorkerResult:
    """Apply the subscription's slot until a stop is requested, the claim is lost, or ``until_lsn`` is reached.

    :raises PgsubError: the cause of the end; the launcher acts by its directive.
    """
    try:
        with streams(spec) as opened, contextlib.closing(ApplyPolicy(opened, spec)) as policy:
            return ApplyLoop(opened, policy, spec).run()
    except ApplyError as error:
        left_out = False
        with contextlib.suppress(PgsubError):  # report the error that stopped apply
            left_out = skip_rolled_back.leaves_out(spec.subscription, error)
        if left_out:
            raise StreamsMustRestart("what stopped apply was rolled back on the publisher") from error
        if isinstance(error, SchemaFault):
            with contextlib.suppress(PgsubError, psycopg.Error):
                missing_partition.complete(spec.subscription, error)
        raise


class ApplyPolicy:
    """The apply worker's policy: should_apply_changes_for_rel, with the table states that hold under the lock."""

    def __init__(self, opened: WorkerStreams, spec: WorkerSpec) -> None:
        self._streams, self._session = opened, opened.session
        self._subid = spec.subscription.subid
        self._states: dict[int, RelationState] = {}
        self._names: dict[tuple[str, str], RelationState] = {}  #: by the names under which the tables were subscribed
        self._version = -1
        self._claims: list[RelationState] = []
        self._next_ready = 0.0
        self._flips = False  #: two_phase is pending and can be enabled
        self._first_done: int | None = None  #: the lowest srsublsn of a table in state s
        self._refused_since: float | None = None
        self._waiting_for: list[int] = []  #: claimed tables that the first waiting transaction changes
        self._held: dict[int, bool] = {}  #: held tables, with whether they are being released
        self._keeps: set[int] = set()  #: tables whose changes are kept while the lock is held
        self._release = HeldRelease(opened, spec)
        self._barrier = ApplyBarrier(opened.session, spec.claim)

    def close(self) -> None:
        """Close the session for held changes."""
        self._release.close()

    def attach(self, loop: Positions) -> None:
        """See :class:`~pgsub.apply.worker.policy.WorkerPolicy`."""
        self._loop = loop
        self._take(self._session.progress.states_version)

    def admit(self, batch: Batch) -> int:
        """Refresh the states if their version changed, and stop before a change to a claimed table."""
        # guard: changes are decided by the current table states
        if self._session.progress.states_version != self._version:
            self._take(self._session.progress.states_version)
        if self._held:
            self._refresh_kept()
        described: dict[int, set[tuple[str, str]]] = {}
        self._waiting_for = []
        for number, transaction in enumerate(batch.transactions() if self._claims else ()):
            for relation in transaction.described():
                described.setdefault(relation.relid, set()).add(local_name(relation))
            oids = self._tables(transaction, described)
            lsn = transaction.decision_lsn
            beyond = (s for s in self._claims if s.handover_lsn is not None and not covered(lsn, s.handover_lsn))
            self._waiting_for = [s.srrelid for s in beyond if s.srrelid in oids]
            # guard: apply waits at a table that a sync worker has claimed
            if self._waiting_for:
                return number
        self._refused_since = None
        # guard: nothing beyond a barrier is committed, without "self._barrier.admit(batch) if self._barrier else "
        return self._barrier.admit(batch) if self._barrier else len(batch)

    def admit_end(self, transaction: RemoteTransaction) -> bool:
        """Read the version again, because the end of a prepared transaction is decided without the lock."""
        progress = self._session.progress
        progress.read()
        if progress.states_version != self._version:
            self._take(progress.states_version)
        self._waiting_for = []
        return self._barrier.covers(transaction.finish_lsn)

    def hurries(self) -> bool:
        """See :class:`~pgsub.apply.worker.policy.WorkerPolicy`."""
        return bool(self._barrier)

    def _refresh_kept(self) -> None:
        """Find the tables whose changes are kept. Newer changes of a table being released queue behind kept ones."""
        connection, released = self._session.connection, self._released
        self._keeps = self._held.keys() - released
        if released:
            # guard: newer changes of a held table wait behind older ones
            self._keeps |= held_tables.with_changes(connection, self._subid, released)

    def skip(self) -> Skip | None:
        """Return the skip, unless apply has passed its LSN: then it is for kept changes of a held table."""
        progress = self._session.progress
        skip = progress.skip
        of_held = skip is not None and bool(self._held) and not skip.waits and skip.lsn < progress.remote_lsn
        return None if of_held else skip

    def holds(self) -> bool:
        """See :class:`~pgsub.apply.worker.policy.WorkerPolicy`."""
        return bool(self._keeps)

    def unfinished(self) -> bool:
        """Return whether a table that is being released has visible kept changes."""
        released = self._released
        return bool(released) and bool(held_tables.with_changes(self._session.connection, self._subid, released))

    @property
    def _released(self) -> set[int]:
        return {relid for relid, releasing in self._held.items() if releasing}

    def _tables(self, transaction: RemoteTransaction, described: dict[int, set[tuple[str, str]]]) -> set[int]:
        """Find the oids of the tables that a transaction changes, by descriptions of this batch or an earlier one."""
        names: set[tuple[str, str]] = set()
        relations = self._session.relations
        for relid in transaction.relids():
            names |= described.get(relid, set())
            known = relations.described(relid)
            if known is not None:
                names.add(local_name(known))
        return relations.oids(names)

    def should_apply(self, relation: Relation, oid: int | None, finish_lsn: int) -> Decision | None:
        """Apply changes of ``r`` tables, and of ``s`` tables unless srsublsn covers them; sync workers apply the rest.

        If an unsubscribed table has taken a subscribed one's name, return the latter's oid, which will be refused.
        """
        state = self._states.get(oid or NEVER) or self._names.get(local_name(relation))
        if state is None or state.srsubstate not in "rs" or oid == NEVER:
            return None
        if state.srsublsn is not None and covered(finish_lsn, state.srsublsn):
            return None
        return Decision(state.srrelid, held=state.srrelid in self._keeps)

    def filter_for_streaming(self) -> tuple[int, Filter] | None:
        """Return a filter if every table is ready (pa_can_start), none is held and there is no barrier.

        Otherwise the decision needs an LSN, and this returns None.
        """
        states, names = self._states, self._names
        if self._held or self._barrier or any(state.srsubstate != "r" for state in states.values()):
            return None

        def should_apply(relation: Relation, oid: int | None, finish_lsn: int) -> Decision | None:
            state = states.get(oid or NEVER) or names.get(local_name(relation))
            return None if state is None or oid == NEVER else Decision(state.srrelid)

        return self._version, should_apply

    def refused(self) -> bool:
        """Wait a moment at a barrier or for sync workers; after :data:`CLAIM_PATIENCE` withdraw their claims.

        Only a batch without a claimed table resets the time, so that table after table cannot delay apply.
        """
        clock = time.monotonic()
        self._refused_since = self._refused_since or clock
        if not self._waiting_for:
            self._barrier.stand()
        if clock - self._refused_since > CLAIM_PATIENCE and self._waiting_for:
            with contextlib.suppress(*_LOCKED):  # a hand-over is being decided, or a slot is being dropped
                handover.withdraw_claims(self._session.connection, self._subid, self._waiting_for)
        time.sleep(0.02)
        return False

    def boundary(self, control: Control | None) -> bool:
        """Set tables whose srsublsn apply has passed to ``r``."""
        if control is not None and control.states_version != self._version:
            self._take(control.states_version)
        if self._flips:
            return True  # the next start asks for two_phase
        self._barrier.stand_at(self._loop.position)
        if not self._barrier and self._release.step(self._loop.remote_lsn):
            self._read_again()
        position, clock = self._loop.position, time.monotonic()
        if self._first_done is not None and self._first_done <= position and clock >= self._next_ready:
            try:
                states.set_ready(self._session.connection, self._subid, position)
            except _LOCKED:
                self._next_ready = clock + _PAUSE
            else:
                self._read_again()
        return False

    def _read_again(self) -> None:
        self._session.progress.read()
        self._take(self._session.progress.states_version)

    def _take(self, version: int) -> None:
        """Read the table states, and derive what every batch needs from them."""
        self._states = table_states(self._session.connection, self._subid)
        self._held = held_tables.held(self._session.connection, self._subid)
        self._keeps = set(self._held)
        self._barrier.read()
        self._release.tables(self._released, version)
        self._version = version
        self._session.relations.forget_names()
        rows = self._states.values()
        self._flips = self._streams.pending and bool(rows) and all(s.srsubstate == "r" for s in rows)
        self._names = {(s.schemaname, s.relname): s for s in rows}
        self._claims = [s for s in rows if s.srsubstate in "df" and s.handover_lsn is not None]
        done = [s.srsublsn for s in rows if s.srsubstate == "s" and s.srsublsn is not None]
        self._first_done = min(done, default=None)
