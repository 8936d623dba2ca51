"""The slot that a synchronization leaves behind. Mirrors ReplicationSlotDropAtPubNode (subscriptioncmds.c)."""

from __future__ import annotations

import contextlib

import psycopg

from pgsub.publisher import connect as publisher
from pgsub.publisher import slots
from pgsub.subscription import Subscription
from pgsub.target import ledger


def release(session: psycopg.Connection, sub: Subscription, relid: int) -> None:
    """Drop the slot that the ledger names for a table, unless other tables still name it; safe to repeat.

    :param relid: the table; its sync worker is fenced.
    :raises PublisherUnavailable: the publisher cannot be asked; the ledger still names the slot.
    """
    row = session.execute(
        "SELECT r.sync_slot, EXISTS (SELECT FROM pgsub.subscription_rel o WHERE o.subid = r.subid"
        " AND o.sync_slot = r.sync_slot AND o.srrelid <> r.srrelid)"
        " FROM pgsub.subscription_rel r WHERE r.subid = %s AND r.srrelid = %s",
        (sub.subid, relid),
    ).fetchone()
    if row is None or row[0] is None:
        return
    slot, shared = row
    if not shared:
        with contextlib.closing(publisher.connect(sub.connection, application_name=slot)) as source:
            slots.drop_slot(source, slot)
    with ledger.durable(session):
        session.execute(
            "UPDATE pgsub.subscription_rel SET sync_slot = NULL WHERE subid = %s AND srrelid = %s AND sync_slot = %s",
            (sub.subid, relid, slot),
        )
