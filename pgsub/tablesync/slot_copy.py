"""A table that was copied together with others gets a sync slot of its own, where the shared one is.

A slot can be streamed by one worker only, and streaming moves it. A copy of a slot nobody has streamed begins where
that one does, so each table can be caught up with by itself (pg_copy_logical_replication_slot, slotfuncs.c).
"""

from __future__ import annotations

import contextlib

import psycopg

from pgsub.common import failpoints
from pgsub.common.errors import SlotLost
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher import slots
from pgsub.tablesync import sync_slots
from pgsub.target.ledger import workers
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.ledger.workers import Claim
from pgsub.target.session.transactions import durable


def copy_shared(session: psycopg.Connection, sub: Subscription, claim: Claim, state: RelationState, own: str) -> None:
    """Copy the table's shared slot to ``own`` and have the ledger name that instead.

    Safe to repeat after any interruption: until the ledger names the new slot nobody has streamed it, and it is made
    again.

    :raises Fenced: the epoch was raised.
    :raises SlotLost: the shared slot is gone.
    """
    shared = state.sync_slot
    if shared is None:
        raise SlotLost(f'the ledger names no replication slot for table "{state.schemaname}.{state.relname}"')
    _name(session, claim, needed=shared, spare=own)
    failpoints.point("sync.before_separation")
    with contextlib.closing(publisher.connect(sub.connection, application_name=own)) as source:
        slots.drop_slot(source, own)
        slots.copy_slot(source, shared, own)
        version = source.info.server_version
    if sub.failover and version >= slots.FAILOVER_VERSION:  # a copy is none, whatever the slot is
        with contextlib.closing(publisher.connect(sub.connection, application_name=own, replication=True)) as sender:
            slots.alter_slot(sender, own, failover=True)
    failpoints.point("sync.after_separation")
    _name(session, claim, needed=own, spare=shared)
    sync_slots.release_slot(session, sub, shared, [claim.worker], claims=[claim])


def _name(session: psycopg.Connection, claim: Claim, *, needed: str, spare: str) -> None:
    with durable(session):
        workers.fence(session, claim)
        session.execute(
            "UPDATE pgsub.subscription_rel SET sync_slot = %s, spare_slot = %s WHERE subid = %s AND srrelid = %s",
            (needed, spare, claim.subid, claim.worker),
        )
