"""Replacement of a subscription's slot: its position, publisher and tables change in one commit of the ledger.

The server has no such operation: there the subscription is dropped, and all tables are copied again.

NOTES
:func:`begin` records durably that a slot of this name is about to be created. From then on apply does not start, and a
command that was killed is repeated until :func:`move` has committed. This makes the position safe if the publisher
went back in time: the new slot may begin before the old position, and nothing else would keep apply from going on at
the old one, past changes that it never received. ``tests/models/reconcile_model.py`` has these rules.
"""

from __future__ import annotations

import psycopg

from pgsub.common.errors import SlotLost, log_text
from pgsub.common.quoting import word
from pgsub.protocol.lsn import format_lsn
from pgsub.target.ledger import events, subscriptions, worker_takeover
from pgsub.target.ledger.subscriptions import Identity, Publisher
from pgsub.target.ledger.tables import handover
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session.transactions import durable


def begin(connection: psycopg.Connection, subid: int, slot_name: str) -> None:
    """Record that a slot is about to be created in place of the present or lost one. This revokes a drop.

    A drop that was interrupted has recorded that the slot is dropped (``end_slot_drop``), which the new one is not.
    """
    with durable(connection):
        query = "UPDATE pgsub.subscription SET new_slot = %s, slot_intent = false WHERE subid = %s"
        if not connection.execute(query, (slot_name, subid)).rowcount:
            raise subscriptions.unknown(subid)


def withdraw(connection: psycopg.Connection, subid: int) -> None:
    """Remove the record of :func:`begin`. Since then no slot was dropped or made, and nothing was rolled back."""
    with durable(connection):
        connection.execute("UPDATE pgsub.subscription SET new_slot = NULL WHERE subid = %s", (subid,))


def check_not_under_way(known: Identity) -> None:
    """Refuse to apply from a slot that may not be the one that the position belongs to.

    :raises SlotLost: a reconciliation has not finished.
    """
    if known.new_slot is not None:
        raise SlotLost(
            f'subscription "{known.subname}" is being reconciled',
            detail=f'Replication slot "{known.new_slot}" takes the place of one that was lost.',
            hint=f"If the command was interrupted, run it again to continue:\npgsub reconcile {word(known.subname)}",
            sqlstate="55000",
        )


def move(connection: psycopg.Connection, claim: Claim, publisher: Publisher, slot_name: str, position: int) -> None:
    """Let apply go on at a new slot, in the caller's transaction, which holds apply's row and resets the tables.

    Everything that waited for the old stream is removed: skips, awaited positions, a barrier, prepared transactions.
    two_phase is enabled again once every table is ready.

    :param claim: apply's claim, raised after the reconciliation began.
    :param position: the new slot's consistent point, which may lie before the old position.
    """
    subid, at = claim.subid, format_lsn(position)
    connection.execute(
        "UPDATE pgsub.subscription SET (system_identifier, publisher_dbname, publisher_dboid, timeline, slot_name,"
        " consistent_point, new_slot, two_phase) = (%s, %s, %s, %s, %s, %s, NULL,"
        " CASE two_phase WHEN 'e' THEN 'p' ELSE two_phase END) WHERE subid = %s",
        (*publisher, slot_name, at, subid),
    )
    worker_takeover.fence(connection, claim)
    connection.execute(
        "UPDATE pgsub.control SET skip_lsn = NULL, skip_rows = NULL, skip_lsns = NULL, wanted_lsn = NULL"
        " WHERE subid = %s AND worker = 0",
        (subid,),
    )
    connection.execute(
        "UPDATE pgsub.progress SET remote_lsn = %s, reported_lsn = %s, remote_commit_ts = NULL"
        " WHERE subid = %s AND worker = 0",
        (at, at, subid),
    )
    for table in ("barrier", "prepared_pending", "prepared_xact"):
        connection.execute(f"DELETE FROM pgsub.{table} WHERE subid = %s".encode(), (subid,))
    handover.clear_claims(connection, subid, None)
    text = f'subscription continues from {at} of replication slot "{slot_name}"'
    more = "Its tables are compared with the publisher's, and only rows that differ are sent."
    events.add(connection, subid, events.log_entry("LOG", log_text(text, detail=more)))
