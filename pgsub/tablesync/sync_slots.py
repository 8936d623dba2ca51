"""Sync slots: which tables need one, and when it is dropped. Mirrors callers of ReplicationSlotDropAtPubNode.

Tables that were copied together name one slot in the ledger, and the last of them drops it. As long as a slot may
exist, a row names it, so none is orphaned. Only a slot that a row names is ever dropped.

Only one worker can stream a slot, and streaming advances it. Tables that are at one position stream their slot together
(:func:`pgsub.tablesync.catch_up.common_slot`). A table that cannot, because it failed, gets a copy of the slot
(pg_copy_logical_replication_slot). The slot lies at or before the table's position, because it moves only with all
tables that need it, and so does the copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

import psycopg

from pgsub.apply import verified_publisher
from pgsub.common import failpoints
from pgsub.common.errors import SlotLost
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.publisher import identity, slot_names, slots
from pgsub.publisher.connect import Connection
from pgsub.target.ledger import worker_takeover
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.ledger.tables import chunks, states
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session.transactions import durable

_SLOTS = """
SELECT DISTINCT v.slot FROM pgsub.subscription_rel, LATERAL (VALUES (sync_slot), (spare_slot)) AS v (slot)
 WHERE subid = %s AND srrelid = ANY (%s) AND v.slot IS NOT NULL ORDER BY v.slot
"""
_LOCKED = "ORDER BY srrelid FOR UPDATE"
#: Seconds to wait for a slot that is still streamed. Rows of the ledger are locked meanwhile.
_PATIENCE = 10.0
_CLEAR = """
UPDATE pgsub.subscription_rel SET sync_slot = nullif(sync_slot, %s), spare_slot = nullif(spare_slot, %s)
 WHERE subid = %s AND srrelid = ANY (%s)
"""


def release(session: psycopg.Connection, sub: Subscription, *relids: int, claims: Sequence[Claim] = ()) -> None:
    """Remove the sync slots of these tables from the ledger, and drop slots that no other table names.

    It can be repeated after any interruption.

    :param claims: claims under which it is done. Without any, the tables' workers must have been fenced for good.
    :raises Fenced: an epoch was raised.
    :raises PgsubError: a slot could not be dropped; the ledger still names it.
    """
    for (slot,) in session.execute(_SLOTS.encode(), (sub.subid, list(relids))).fetchall():
        release_slot(session, sub, slot, relids, claims=claims)


def lost_hint(sub: Subscription, table: RelationState) -> str:
    """Return the hint for a table whose slot is lost."""
    return (
        "The changes of the table since its copy are no longer available. Compare it, and send only what differs:\n"
        f"pgsub refresh {word(sub.name)} --resync {word(f'{table.schemaname}.{table.relname}')} --adopt"
    )


def own_slots(session: psycopg.Connection, sub: Subscription, relids: Collection[int]) -> list[str]:
    """Return the slots that these tables name and no other table does."""
    rows = session.execute(_SLOTS.encode(), (sub.subid, list(relids))).fetchall()
    named = [slot for (slot,) in rows if slot_names.is_sync_slot(sub.subid, slot)]
    return [slot for slot in named if _naming(session, sub, slot) <= set(relids)]


def needed_by(session: psycopg.Connection, sub: Subscription, slot: str) -> set[int]:
    """Return the tables that name a slot and are not handed over."""
    return _naming(session, sub, slot, "AND srsubstate IN ('i', 'd', 'f')")


def _naming(session: psycopg.Connection, sub: Subscription, slot: str, more: str = "") -> set[int]:
    """Return the tables that name a slot."""
    query = "SELECT srrelid::bigint FROM pgsub.subscription_rel WHERE subid = %s AND %s IN (sync_slot, spare_slot)"
    return {relid for (relid,) in session.execute(f"{query} {more}".encode(), (sub.subid, slot))}


def check_not_standby(source: Connection, sub: Subscription) -> None:
    """Refuse a standby that answers for its primary: the slots of tables are where the main slot is.

    :raises PublisherUnavailable: it lacks the main slot, or has a copy of it.
    """
    main = sub.slot_name
    # guard: no slot of a table is made or taken for dropped on a standby that answers for its primary
    if main is not None and slots.in_recovery(source):
        identity.check_not_standby(slots.slot_state(source, main), main, in_recovery=True)


def _drop(session: psycopg.Connection, sub: Subscription, slot: str) -> None:
    """Drop a slot on the verified publisher. On another server it is missing, and the real slot would keep WAL."""
    with contextlib.closing(verified_publisher.connect(session, sub, slot)) as source:
        check_not_standby(source, sub)
        slots.drop_sync_slot(source, sub.subid, slot, timeout=_PATIENCE)


def release_slot(
    session: psycopg.Connection, sub: Subscription, slot: str, relids: Collection[int], *, claims: Sequence[Claim] = ()
) -> None:
    """Release one slot of these tables; see :func:`release`."""
    with durable(session):
        worker_takeover.fence(session, *claims)
        # Only the last table drops the slot; others just forget its name. The lock makes one of two the last. It is
        # held during the drop, because a new attempt at the table would create a slot of the same name.
        naming = _naming(session, sub, slot, _LOCKED)
        if naming and not naming - set(relids):
            failpoints.point("sync.before_slot_drop")
            _drop(session, sub, slot)
        session.execute(_CLEAR.encode(), (slot, slot, sub.subid, list(relids)))


def finish_sync(session: psycopg.Connection, sub: Subscription, claims: Sequence[Claim]) -> None:
    """Remove the records of copies, and the slots, of tables that were handed over.

    The slots are last: as long as a table names one, its worker is started again, so nothing is left behind.
    """
    relids = [claim.worker for claim in claims]
    with durable(session):
        worker_takeover.fence(session, *claims)
        chunks.forget(session, sub.subid, relids)
    release(session, sub, *relids, claims=claims)


def drop_unnamed(session: psycopg.Connection, sub: Subscription, slot: str, relids: Collection[int]) -> None:
    """Drop a slot that was created while its tables were taken over, unless a later attempt names it.

    :param relids: the tables for which it was created.
    """
    with durable(session):
        # an attempt that wants to name it waits
        states.lock_tables(session, sub.subid, relids)
        if not _naming(session, sub, slot, _LOCKED):
            _drop(session, sub, slot)


def copy_shared(session: psycopg.Connection, sub: Subscription, claim: Claim, state: RelationState, own: str) -> None:
    """Copy the table's shared slot to ``own``, and name that in the ledger instead.

    It can be repeated after any interruption: until the ledger names the new slot nobody streams it, and it is created
    again.

    :raises SlotLost: the shared slot is gone.
    """
    shared = state.sync_slot
    if shared is None:
        raise SlotLost(f'the ledger names no replication slot for table "{state.schemaname}.{state.relname}"')
    with durable(session):
        worker_takeover.fence(session, claim)
        _name(session, claim, needed=shared, spare=own)
    failpoints.point("sync.before_separation")
    with durable(session):
        # guard: a slot is created again only by the attempt that will stream it
        worker_takeover.fence(session, claim)
        states.lock_tables(session, sub.subid, [claim.worker])
        _copy(session, sub, shared, own)
        failpoints.point("sync.after_separation")
        _name(session, claim, needed=own, spare=shared)
    release_slot(session, sub, shared, [claim.worker], claims=[claim])


def _copy(session: psycopg.Connection, sub: Subscription, shared: str, own: str) -> None:
    with contextlib.closing(verified_publisher.connect(session, sub, own)) as source:
        check_not_standby(source, sub)
        slots.drop_slot(source, own, timeout=_PATIENCE)
        slots.copy_slot(source, shared, own)
        version = source.info.server_version
    if sub.failover and version >= slots.FAILOVER_VERSION:  # a copy never has failover enabled
        sender = verified_publisher.connect(session, sub, own, replication=True)
        with contextlib.closing(sender):
            slots.alter_slot(sender, own, failover=True)


def _name(session: psycopg.Connection, claim: Claim, *, needed: str, spare: str) -> None:
    session.execute(
        "UPDATE pgsub.subscription_rel SET sync_slot = %s, spare_slot = %s WHERE subid = %s AND srrelid = %s",
        (needed, spare, claim.subid, claim.worker),
    )
