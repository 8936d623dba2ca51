"""The hand-over of copied tables: at once if apply has not passed their slot, else after a job has caught up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import psycopg

from pgsub.apply.worker.start import WorkerSpec
from pgsub.common import failpoints
from pgsub.common.errors import ApplyError, Directive, Fenced, PgsubError, SlotLost
from pgsub.common.query import scalar
from pgsub.common.subscription import Subscription
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


def hand_over(
    context: SyncContext, session: psycopg.Connection, claims: Mapping[int, Claim], copied: Sequence[RelationState]
) -> dict[int, PgsubError]:
    """Hand over tables in ``f``. Those that share a slot catch up together, others one after another.

    :param claims: by table.
    :return: errors of single tables.
    """
    sub = context.subscription
    done = hand_over_at_once(session, sub.subid, claims, copied)
    left = [table for table in copied if table.srrelid not in done]
    slot = common_slot(session, sub, left) if left else None
    if slot is not None:
        return _catch_up_together(context, session, [claims[table.srrelid] for table in left], left, slot)
    errors: dict[int, PgsubError] = {}
    for table in left:
        if context.stopping.is_set():
            break
        claim = claims[table.srrelid]
        try:
            own = _separate(context, session, claim, table)
            catch_up(context, session, [claim], [table], own)
        except PgsubError as error:
            errors[table.srrelid] = error
            if error.directive is Directive.RETRY:  # a server that is gone is not tried for one table after another
                break
    return errors


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
        return handover.try_syncdone(session, ready, position).done
    except psycopg.errors.LockNotAvailable:
        return set()


def _position(session: psycopg.Connection, subid: int, relids: Sequence[int]) -> int | None:
    """Return the position of the tables' own progress; None if their positions differ."""
    query = """
        SELECT min(remote_lsn)::text FROM pgsub.progress
         WHERE subid = %s AND worker = ANY (%s) HAVING min(remote_lsn) = max(remote_lsn)"""
    return lsn_or_none(scalar(session, query, (subid, list(relids))))


def common_slot(session: psycopg.Connection, sub: Subscription, tables: Sequence[RelationState]) -> str | None:
    """Return the slot that copied tables can stream together: it is the slot of all and of no other table.

    :return: None if there is no such slot, or if the tables are not at one position.
    """
    slots = {table.sync_slot for table in tables}
    slot = slots.pop()
    if slots or slot is None or any(table.spare_slot is not None for table in tables):
        return None
    relids = {table.srrelid for table in tables}
    # guard: a slot moves only together with every table that needs it
    if sync_slots.needed_by(session, sub, slot) != relids:
        return None
    return None if _position(session, sub.subid, sorted(relids)) is None else slot


def catch_up(
    context: SyncContext,
    session: psycopg.Connection,
    claims: Sequence[Claim],
    tables: Sequence[RelationState],
    slot: str,
) -> None:
    """Stream those changes of tables that apply has passed, in one job, until apply takes some of the tables over.

    :param slot: the slot of these tables alone.
    :raises SlotLost: the slot is gone; the hint tells how to repair the table.
    """
    sub, table = context.subscription, tables[0]
    more = f" and {len(tables) - 1} more" if len(tables) > 1 else ""
    spec = WorkerSpec(
        *(sub, claims[0], slot, slot),
        heartbeat=context.heartbeat,
        spool_dir=context.spool_dir,
        tables={(one.schemaname, one.relname): claim for one, claim in zip(tables, claims, strict=True)},
    )
    with _told(sub, table):
        _await(context, session, claims, context.submit(f"catch up {table.relname}{more}", sync_worker.run, [spec]))


def _catch_up_together(
    context: SyncContext,
    session: psycopg.Connection,
    claims: Sequence[Claim],
    tables: Sequence[RelationState],
    slot: str,
) -> dict[int, PgsubError]:
    try:
        catch_up(context, session, claims, tables, slot)
    except ApplyError as error:
        names = [f"{table.schemaname}.{table.relname}" for table in tables]
        if len(tables) == 1 or error.relation not in names:
            raise
        failed = names.index(error.relation)
        # it leaves the slot to the others, which go on together in the next attempt
        _separate(context, session, claims[failed], tables[failed])
        return {tables[failed].srrelid: error}
    return {}


def _separate(context: SyncContext, session: psycopg.Connection, claim: Claim, table: RelationState) -> str:
    """Give a table a slot of its own, a copy of the one that it shares, unless it has one; return its name."""
    sub = context.subscription
    slot = slot_names.sync_slot_name(sub.subid, claim.worker, context.system_identifier)
    with _told(sub, table):
        if table.sync_slot != slot:
            sync_slots.copy_shared(session, sub, claim, table, slot)
        elif table.spare_slot is not None:
            sync_slots.release_slot(session, sub, table.spare_slot, [claim.worker], claims=[claim])
    return slot


@contextlib.contextmanager
def _told(sub: Subscription, table: RelationState) -> Iterator[None]:
    """Tell how to repair a table whose slot is lost."""
    try:
        yield
    except SlotLost as error:
        error.hint = sync_slots.lost_hint(sub, table)
        raise


def _await(context: SyncContext, session: psycopg.Connection, claims: Sequence[Claim], job: Job) -> None:
    """Wait for a job. After a stop request, wait only if its task has begun: it reads the request itself."""
    watch = TaskWatch(session, claims, context.patience)
    try:
        while not job.done():
            watch.look()
            if context.stopping.wait(_POLL):
                if worker_takeover.withdraw(session, claims[0]):
                    raise Fenced("asked to stop")
                job.result(30)
        job.result(0)
    finally:
        job.cancel()
