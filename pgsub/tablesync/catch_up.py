"""The hand-over of copied tables: at once if apply has not passed their slot, else after a job has caught up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psycopg

from pgsub.apply.worker.start import WorkerSpec
from pgsub.common import failpoints
from pgsub.common.errors import Fenced, SlotLost
from pgsub.common.query import scalar
from pgsub.common.quoting import word
from pgsub.protocol.lsn import lsn_or_none
from pgsub.publisher import slot_names
from pgsub.tablesync import sync_slots, sync_worker
from pgsub.tablesync.context import Job, SyncContext
from pgsub.tablesync.task_watch import TaskWatch
from pgsub.target.ledger import subscriptions, worker_takeover
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.ledger.tables import handover
from pgsub.target.ledger.worker_takeover import Claim

_POLL = 0.02


def hand_over_at_once(
    session: psycopg.Connection, subid: int, claims: Mapping[int, Claim], copied: Sequence[RelationState]
) -> set[int]:
    """Hand over tables if apply has not passed their slot's consistent point, so that nothing needs to be streamed.

    :param claims: by table.
    :return: the tables that were handed over.
    """
    position = _position(session, subid, [row.srrelid for row in copied])
    if position is None:
        return set()
    apply_lsn = subscriptions.apply_position(session, subid)
    ready = [claims[row.srrelid] for row in copied if handover.may_hand_over(apply_lsn, position, row.handover_lsn)]
    if not ready:
        return set()
    failpoints.point("sync.before_s")
    try:
        return handover.try_syncdone_many(session, ready, position)
    except psycopg.errors.LockNotAvailable:
        return set()


def _position(session: psycopg.Connection, subid: int, relids: Sequence[int]) -> int | None:
    """Return the position of the tables' own progress; None if their positions differ."""
    query = """
        SELECT min(remote_lsn)::text FROM pgsub.progress
         WHERE subid = %s AND worker = ANY (%s) HAVING min(remote_lsn) = max(remote_lsn)"""
    return lsn_or_none(scalar(session, query, (subid, list(relids))))


def catch_up(context: SyncContext, session: psycopg.Connection, claim: Claim, state: RelationState) -> None:
    """Stream those changes of a table that apply has passed, in a job of its own, until apply takes the table over.

    :raises SlotLost: the slot is gone; the hint tells how to repair the table.
    """
    sub = context.subscription
    own = slot_names.sync_slot_name(sub.subid, claim.worker, context.system_identifier)
    try:
        if state.sync_slot != own:
            sync_slots.copy_shared(session, sub, claim, state, own)
        elif state.spare_slot is not None:
            sync_slots.release_slot(session, sub, state.spare_slot, [claim.worker], claims=[claim])
        spec = WorkerSpec(
            *(sub, claim, own, own),
            heartbeat=context.heartbeat,
            spool_dir=context.spool_dir,
            relation=(state.schemaname, state.relname),
        )
        _await(context, session, claim, context.submit(f"catch up {state.relname}", sync_worker.run, [spec]))
    except SlotLost as error:
        error.hint = (
            "The changes of the table since its copy are no longer available. Compare it, and send only what differs:\n"
            f"pgsub refresh {word(sub.name)} --resync {word(f'{state.schemaname}.{state.relname}')} --adopt"
        )
        raise


def _await(context: SyncContext, session: psycopg.Connection, claim: Claim, job: Job) -> None:
    """Wait for a job. After a stop request, wait only if its task has begun: it reads the request itself."""
    watch = TaskWatch(session, [claim], context.patience)
    try:
        while not job.done():
            watch.look()
            if context.stopping.wait(_POLL):
                if worker_takeover.withdraw(session, claim):
                    raise Fenced("asked to stop")
                job.result(30)
        job.result(0)
    finally:
        job.cancel()
