"""One table's synchronization as the launcher sees it: snapshot held here, copy and catch-up as jobs.

Mirrors LogicalRepSyncTableStart (tablesync.c), cut where work leaves for Spark. The holder of the slot's snapshot
must live as long as the copy, so it lives here; tasks import the snapshot.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import psycopg

from pgsub import failpoints
from pgsub.apply.start import WorkerSpec
from pgsub.errors import Directive, Fenced, PgsubError, StateForbids
from pgsub.publisher import connect as publisher
from pgsub.publisher import slots
from pgsub.publisher.snapshot import SlotSnapshot
from pgsub.publisher.tables import describe_table
from pgsub.pulse import PulseAddress
from pgsub.subscription import Subscription
from pgsub.tablesync import catchup, cleanup, copy, plan
from pgsub.tablesync.copy import ChunkResult, ChunkSpec
from pgsub.tablesync.plan import Chunk, CopyPlan
from pgsub.target import connect as target
from pgsub.target import ledger, states
from pgsub.target.connect import SessionName
from pgsub.target.ledger import Claim, RelationState
from pgsub.target.relation import TargetRelation, describe, missing

_POLL = 0.02
#: Tries of one chunk while the snapshot lives.
CHUNK_TRIES = 5


class Job(Protocol):
    """A submitted job."""

    def done(self) -> bool:
        """Whether it has ended."""

    def result(self, timeout: float | None = None) -> list[Any]:
        """Results in the order of the items, or the exception of the task."""

    def cancel(self) -> None:
        """End it soon."""


Submit = Callable[[str, Callable[[Any], Any], Sequence[Any]], Job]


@dataclass(slots=True)
class SyncContext:
    """What the launcher lends to the synchronization of one table."""

    subscription: Subscription
    system_identifier: str  #: of the target, for the slot's name
    submit: Submit
    stopping: threading.Event
    pulse: PulseAddress | None = None
    spool_dir: str | None = None
    log: Callable[[str, str], None] = lambda level, text: None


class TableSync:
    """Brings one table from whatever state it is in to ``s``; called again after an error.

    :param context: see :class:`SyncContext`.
    :param relid: oid of the target's table.
    """

    def __init__(self, context: SyncContext, relid: int) -> None:
        self._context = context
        self._sub = context.subscription
        self._relid = relid
        self.jobs: list[Job] = []

    def run(self) -> None:
        """Until ``s`` is committed and the sync slot dropped, or the launcher stops.

        :raises PgsubError: the launcher retries by its directive.
        """
        name = SessionName(self._sub.subid, "launcher", 0)
        with contextlib.closing(target.connect(self._sub.target, name)) as session:
            try:
                claim = ledger.take_over(session, self._sub.subid, self._relid)
                self._advance(session, claim)
            except psycopg.Error as error:
                raise target.translate(error, "synchronize a table") from None

    def _state(self, session: psycopg.Connection) -> RelationState:
        for row in ledger.relations(session, self._sub.subid):
            if row.srrelid == self._relid:
                return row
        raise Fenced("the table was removed from the subscription")

    def _advance(self, session: psycopg.Connection, claim: Claim) -> None:
        state = self._state(session)
        if state.srsubstate in "id":
            self._copy(session, claim, state)
            state = self._state(session)
        if state.srsubstate == "f" and not self._context.stopping.is_set():
            failpoints.point("sync.after_f")
            self._catch_up(session, claim, state)
            state = self._state(session)
        if state.srsubstate in "sr":
            failpoints.point("sync.after_s")
            self._drop_slot(session, state)
            self._context.log(
                "LOG",
                f'logical replication table synchronization worker for subscription "{self._sub.name}",'
                f' table "{state.relname}" has finished',
            )

    # copy

    def _copy(self, session: psycopg.Connection, claim: Claim, state: RelationState) -> None:
        found = describe(session, state.schemaname, state.relname, replica=target.is_replica(session))
        if found is None or found.oid != self._relid:
            raise missing(state.schemaname, state.relname)
        if found.row_security and not _owner_bypasses(session):
            raise StateForbids(f'role cannot replicate into relation with row-level security enabled: "{found.name}"')
        self._context.log(
            "LOG",
            f'logical replication table synchronization worker for subscription "{self._sub.name}",'
            f' table "{state.relname}" has started',
        )
        self._drop_leftover(session, state)
        cleanup.remove_rows(session, claim, found)
        slot = slots.sync_slot_name(self._sub.subid, self._relid, self._context.system_identifier)
        attempt = states.start_copy(session, claim, slot, None)
        failpoints.point("sync.before_slot")
        with SlotSnapshot.open(self._sub.connection, slot, slot, self._sub.failover) as snapshot:
            states.slot_position(session, claim, snapshot.consistent_point)
            failpoints.point("sync.after_slot")
            made = self._plan(session, state, found, attempt)
            self._run_chunks(made, claim, attempt, snapshot, state)
        if made.mode == "chunked":
            with ledger.durable(session):
                if not states.finish_copy(session, claim, attempt):
                    raise Fenced("a chunk of the copy is not on the target")

    def _drop_leftover(self, session: psycopg.Connection, state: RelationState) -> None:
        if state.sync_slot is None:
            return
        with contextlib.closing(publisher.connect(self._sub.connection, application_name=state.sync_slot)) as source:
            slots.drop_slot(source, state.sync_slot)

    def _plan(self, session: psycopg.Connection, state: RelationState, found: TargetRelation, attempt: int) -> CopyPlan:
        sub = self._sub
        with contextlib.closing(publisher.connect(sub.connection, application_name=sub.name)) as source:
            remote = describe_table(source, state.schemaname, state.relname, sub.publications)
            version = source.info.server_version
        reason = plan.atomic_reason(sub, remote, found, replica=target.is_replica(session))
        with ledger.durable(session):
            if reason is None and not plan.empty_under_lock(session, found):
                reason = "the target table is not empty"
            mode = "chunked" if reason is None else "atomic"
            made = plan.make(sub, remote, found, mode=mode, reason=reason or "", publisher_version=version)
            session.execute(
                "UPDATE pgsub.subscription_rel SET copy_mode = %s WHERE subid = %s AND srrelid = %s",
                (mode, sub.subid, self._relid),
            )
            with session.cursor() as cursor:
                cursor.executemany(
                    "INSERT INTO pgsub.copy_chunk (subid, srrelid, attempt, chunk, bytes_total, rows_total)"
                    " VALUES (%s, %s, %s, %s, %s, %s)",
                    [(sub.subid, self._relid, attempt, c.number, c.bytes, c.rows) for c in made.chunks],
                )
        return made

    def _run_chunks(
        self, made: CopyPlan, claim: Claim, attempt: int, snapshot: SlotSnapshot, state: RelationState
    ) -> None:
        """At most ``copy_workers`` chunks at once; one that fails for a moment is tried again alone."""
        waiting = list(reversed(made.chunks))
        running: list[tuple[Job, Chunk]] = []
        tries: dict[int, int] = {}
        relation = (state.schemaname, state.relname)
        try:
            while waiting or running:
                if self._context.stopping.is_set():
                    raise Fenced("asked to stop")
                while waiting and len(running) < self._sub.copy_workers:
                    chunk = waiting.pop()
                    spec = ChunkSpec(
                        self._sub,
                        claim,
                        attempt,
                        made.mode == "atomic",
                        chunk,
                        made.copy_in,
                        snapshot.snapshot_name,
                        snapshot.slot_name,
                        relation,
                        self._context.pulse,
                    )
                    running.append(
                        (self._context.submit(f"copy {state.relname} {chunk.number}", copy.run, [spec]), chunk)
                    )
                time.sleep(_POLL)
                running = self._settle(running, waiting, tries, snapshot)
        finally:
            for job, _ in running:
                job.cancel()

    def _settle(
        self,
        running: list[tuple[Job, Chunk]],
        waiting: list[Chunk],
        tries: dict[int, int],
        snapshot: SlotSnapshot,
    ) -> list[tuple[Job, Chunk]]:
        left = []
        for job, chunk in running:
            if not job.done():
                left.append((job, chunk))
                continue
            try:
                results: list[ChunkResult] = job.result(0)
                assert results[0].number == chunk.number
            except PgsubError as error:
                tries[chunk.number] = tries.get(chunk.number, 0) + 1
                hopeless = error.directive is not Directive.RETRY or tries[chunk.number] >= CHUNK_TRIES
                if hopeless or not snapshot.alive():
                    raise
                waiting.append(chunk)
        return left

    # hand-over

    def _catch_up(self, session: psycopg.Connection, claim: Claim, state: RelationState) -> None:
        if self._at_once(session, claim, state):
            return
        slot = state.sync_slot
        assert slot is not None
        spec = WorkerSpec(
            self._sub,
            claim,
            slot,
            slot,
            pulse=self._context.pulse,
            spool_dir=self._context.spool_dir,
            relation=(state.schemaname, state.relname),
        )
        job = self._context.submit(f"catch up {state.relname}", catchup.run, [spec])
        try:
            while not job.done():
                if self._context.stopping.wait(_POLL):
                    job.result(30)
            job.result(0)
        finally:
            job.cancel()

    def _at_once(self, session: psycopg.Connection, claim: Claim, state: RelationState) -> bool:
        """Apply has not passed the sync worker: no need to stream the sync slot at all."""
        if state.handover_lsn is not None:
            return False
        row = session.execute(
            "SELECT remote_lsn::text FROM pgsub.progress WHERE subid = %s AND worker = %s",
            (self._sub.subid, self._relid),
        ).fetchone()
        position = ledger.lsn_or_none(row[0]) if row else None
        if position is None or ledger.apply_position(session, self._sub.subid) > position:
            return False
        failpoints.point("sync.before_s")
        try:
            return states.try_done(session, claim, position).done
        except psycopg.errors.LockNotAvailable:
            return False

    def _drop_slot(self, session: psycopg.Connection, state: RelationState) -> None:
        """Only now that ``s`` is on disk: before, a crash would bring back a state whose slot is gone."""
        if state.sync_slot is not None:
            failpoints.point("sync.before_slot_drop")
            self._drop_leftover(session, state)
            states.slot_dropped(session, self._sub.subid, self._relid)


def _owner_bypasses(session: psycopg.Connection) -> bool:
    row = session.execute(
        "SELECT rolsuper OR rolbypassrls FROM pg_catalog.pg_roles WHERE rolname = current_user"
    ).fetchone()
    return bool(row and row[0])
