"""Sync slots: who still needs one, and when it goes. Mirrors ReplicationSlotDropAtPubNode's callers in tablesync.c.

Tables that were copied together name one slot in the ledger; it is dropped by the last of them. As long as a slot may
exist some row names it, so none is ever orphaned, and only a slot that a row names is ever dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

import psycopg

from pgsub.common import failpoints
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher import slots
from pgsub.target.ledger import chunks, states, workers
from pgsub.target.ledger.workers import Claim
from pgsub.target.session.transactions import durable

_SLOTS = """
SELECT DISTINCT v.slot FROM pgsub.subscription_rel, LATERAL (VALUES (sync_slot), (spare_slot)) AS v (slot)
 WHERE subid = %s AND srrelid = ANY (%s) AND v.slot IS NOT NULL ORDER BY v.slot
"""
_NAMING = """
SELECT srrelid::bigint FROM pgsub.subscription_rel WHERE subid = %s AND %s IN (sync_slot, spare_slot)
 ORDER BY srrelid FOR UPDATE
"""
#: Seconds to wait for a slot that is still streamed: rows of the ledger are locked meanwhile.
_PATIENCE = 10.0
_CLEAR = """
UPDATE pgsub.subscription_rel SET sync_slot = nullif(sync_slot, %s), spare_slot = nullif(spare_slot, %s)
 WHERE subid = %s AND srrelid = ANY (%s)
"""


def release(session: psycopg.Connection, sub: Subscription, *relids: int, claims: Sequence[Claim] = ()) -> None:
    """Tables need their sync slots no more: the ledger stops naming them, and what nobody else needs is dropped.

    Safe to repeat after any interruption.

    :param session: on the target.
    :param claims: under which this is done; without any the tables' workers must have been fenced for good.
    :raises Fenced: an epoch was raised.
    :raises PgsubError: a slot could not be dropped; the ledger names it still.
    """
    for (slot,) in session.execute(_SLOTS.encode(), (sub.subid, list(relids))).fetchall():
        release_slot(session, sub, slot, relids, claims=claims)


def own_slots(session: psycopg.Connection, sub: Subscription, relids: Collection[int]) -> list[str]:
    """Slots that these tables name and no other."""
    rows = session.execute(_SLOTS.encode(), (sub.subid, list(relids))).fetchall()
    naming = "SELECT srrelid::bigint FROM pgsub.subscription_rel WHERE subid = %s AND %s IN (sync_slot, spare_slot)"
    named = [slot for (slot,) in rows if slots.is_sync_slot(sub.subid, slot)]
    return [slot for slot in named if {relid for (relid,) in session.execute(naming, (sub.subid, slot))} <= set(relids)]


def release_slot(
    session: psycopg.Connection, sub: Subscription, slot: str, relids: Collection[int], *, claims: Sequence[Claim] = ()
) -> None:
    """Like :func:`release`, for one slot and those of the tables that name it."""
    with durable(session):
        if claims:
            workers.fence_all(session, claims)
        # whoever is not the last only forgets the name; the lock makes sure that one of two is the last. It is held
        # while the slot goes: a new attempt of the table would make one of the same name
        naming = {relid for (relid,) in session.execute(_NAMING.encode(), (sub.subid, slot))}
        if naming and not naming - set(relids):
            failpoints.point("sync.before_slot_drop")
            with contextlib.closing(publisher.connect(sub.connection, application_name=slot)) as source:
                slots.drop_sync_slot(source, sub.subid, slot, timeout=_PATIENCE)
        session.execute(_CLEAR.encode(), (slot, slot, sub.subid, list(relids)))


def finish_sync(session: psycopg.Connection, sub: Subscription, claims: Sequence[Claim]) -> None:
    """Tables are handed over: the book-keeping of their copies and their slots go.

    The slots go last: as long as a table names one its worker is started again, and nothing is left behind.
    """
    relids = [claim.worker for claim in claims]
    with durable(session):
        workers.fence_all(session, claims)
        chunks.forget(session, sub.subid, relids)
    release(session, sub, *relids, claims=claims)


def drop_unnamed(session: psycopg.Connection, sub: Subscription, slot: str, relids: Collection[int]) -> None:
    """A slot came to be while its tables were fenced: drop it, unless an attempt that came later names it.

    :param relids: the tables that it was made for.
    """
    with durable(session):
        # whoever would name it waits
        states.lock_tables(session, sub.subid, relids)
        if not session.execute(_NAMING.encode(), (sub.subid, slot)).fetchall():
            with contextlib.closing(publisher.connect(sub.connection, application_name=slot)) as source:
                slots.drop_sync_slot(source, sub.subid, slot, timeout=_PATIENCE)
