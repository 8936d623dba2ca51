"""Rows of pgsub.subscription and pgsub.subscription_rel: the publisher, the slot and the tables of a subscription.

Mirrors pg_subscription.c (UpdateSubscriptionRelState and others). Everything here commits synchronously: the slot of a
table may be dropped only when its state is on disk. Otherwise a crash of the target could bring back a state whose slot
is gone.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import psycopg
from psycopg import sql

from pgsub.common.errors import LedgerLost, PgsubError, SubscriptionExists
from pgsub.common.query import row, scalar
from pgsub.protocol.lsn import format_lsn, lsn_or_none
from pgsub.target.ledger import worker_takeover
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session.connect import translate
from pgsub.target.session.transactions import durable

_TABLES = (
    *("event", "prepared_pending", "prepared_xact", "copy_chunk", "held_change", "held_table", "definition"),
    *("subscription_rel", "progress", "control", "subscription"),
)


class Publisher(NamedTuple):
    """The system and database that a slot belongs to, as columns of the ledger."""

    system_identifier: str
    publisher_dbname: str
    publisher_dboid: int
    timeline: int


@dataclass(frozen=True, slots=True)
class Identity:
    """The slot's owner and system, compared at every connect."""

    subid: int
    subname: str
    system_identifier: str | None
    publisher_dbname: str | None
    publisher_dboid: int | None
    timeline: int | None
    slot_name: str | None
    consistent_point: int | None
    new_slot: str | None = None  #: name of a slot that is being created in place of ``slot_name``


@dataclass(frozen=True, slots=True)
class RelationState:
    """A row of pgsub.subscription_rel."""

    srrelid: int
    schemaname: str
    relname: str
    srsubstate: str
    srsublsn: int | None = None
    handover_lsn: int | None = None
    sync_slot: str | None = None
    attempt: int = 0
    spare_slot: str | None = None  #: a slot that is being created for this table, or is no longer needed
    copy_bytes: int | None = None  #: estimated size of the copy, which decides the order
    recorded: tuple[str, str] | None = None  #: schema and name in the ledger, if the table was renamed since
    adopt: bool = False  #: its rows are compared with the publisher's, and only differences are transferred
    adopted: tuple[int, int, int] | None = None  #: rows that were transferred: missing, extra, different
    keep: int = 0  #: rows that may still be kept of those that adoption replaces or deletes


def register(
    connection: psycopg.Connection,
    subid: int,
    name: str,
    state_store: str,
    slot_name: str | None,
    relations: Sequence[RelationState],
    *,
    slot_intent: bool,
    two_phase: str = "d",
) -> None:
    """Write a new subscription's rows.

    :param slot_intent: whether a slot is about to be created.
    :param two_phase: ``e`` if that slot will be two-phase from its creation on.
    :raises SubscriptionExists: the number is taken by another state store's subscription.
    """
    try:
        with durable(connection):
            connection.execute(
                "INSERT INTO pgsub.subscription (subid, subname, state_store, slot_name, slot_intent, two_phase)"
                " VALUES (%s, %s, %s, %s, %s, %s)",
                (subid, name, state_store, slot_name, slot_intent, two_phase),
            )
            connection.execute(
                "INSERT INTO pgsub.control (subid, worker, token) VALUES (%s, 0, %s)", (subid, uuid.uuid4())
            )
            connection.execute("INSERT INTO pgsub.progress (subid, worker) VALUES (%s, 0)", (subid,))
            add_relations(connection, subid, relations)
    except psycopg.errors.UniqueViolation:
        raise SubscriptionExists(f"subscription number {subid} is taken in the target's ledger") from None


def add_relations(connection: psycopg.Connection, subid: int, relations: Sequence[RelationState]) -> None:
    """Insert relations in the caller's transaction."""
    with connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO pgsub.subscription_rel (subid, srrelid, schemaname, relname, srsubstate, copy_bytes, adopt,"
            " keep) VALUES (%s, %s, %s, %s, %s, %s, %s, %s)",
            [
                (subid, r.srrelid, r.schemaname, r.relname, r.srsubstate, r.copy_bytes, r.adopt, r.keep)
                for r in relations
            ],
        )


def slot_created(connection: psycopg.Connection, subid: int, publisher: Publisher, position: int) -> None:
    """Record that the slot exists. Reporting starts at its consistent point or confirmed position."""
    point = format_lsn(position)
    with durable(connection):
        _set(connection, subid, consistent_point=point, **publisher._asdict())
        connection.execute(_REPORT, (point, subid))


# for apply
_REPORT = "UPDATE pgsub.progress SET reported_lsn = %s WHERE subid = %s AND worker = 0"


def _set(connection: psycopg.Connection, subid: int, **columns: object) -> bool:
    """Set columns of the subscription's row; return False if there is none."""
    assignments = sql.SQL(", ").join(sql.SQL("{} = %s").format(sql.Identifier(name)) for name in columns)
    query = sql.SQL("UPDATE pgsub.subscription SET {} WHERE subid = %s").format(assignments)
    return connection.execute(query, (*columns.values(), subid)).rowcount > 0


def registered(connection: psycopg.Connection, subid: int) -> None:
    """Record that the state store has the subscription: no creation or drop is in progress any more."""
    _set(connection, subid, slot_intent=False)


def identity(connection: psycopg.Connection, subid: int) -> Identity:
    """Read a subscription's identity.

    :raises StateForbids: the ledger has no such subscription (restored or another database).
    """
    query = """
        SELECT subname, system_identifier, publisher_dbname, publisher_dboid, timeline, slot_name,
               consistent_point::text, new_slot
          FROM pgsub.subscription WHERE subid = %s"""
    found = row(connection, query, (subid,))
    if found is None:
        raise unknown(subid)
    name, system, dbname, dboid, timeline, slot_name, point, new_slot = found
    return Identity(subid, name, system, dbname, dboid, timeline, slot_name, lsn_or_none(point), new_slot)


_REPLACED = (
    "Was the target replaced or restored? Drop the subscription and create it again, with --adopt if its tables"
    " have rows."
)


def unknown(subid: int) -> LedgerLost:
    """Make the error for a target whose ledger is missing or does not have the subscription."""
    return LedgerLost(
        "the target's ledger does not know this subscription",
        detail=f"Schema pgsub of the target database has no row for subscription number {subid}.",
        hint=_REPLACED,
    )


def unreadable(error: psycopg.Error) -> PgsubError:
    """Make pgsub's error for a ledger that cannot be read, perhaps because the target was replaced."""
    failed = translate(error, "read the ledger")
    if isinstance(error, psycopg.errors.InvalidSchemaName | psycopg.errors.UndefinedTable):
        failed.hint = _REPLACED
    return failed


def relations(connection: psycopg.Connection, subid: int) -> list[RelationState]:
    """Return all tables of a subscription by OID, under their present names.

    A dropped table has the name under which it was subscribed.
    """
    rows = connection.execute(
        "SELECT r.srrelid::bigint, coalesce(n.nspname::text, r.schemaname), coalesce(c.relname::text, r.relname),"
        " r.srsubstate::text, r.srsublsn::text, r.handover_lsn::text, r.sync_slot, r.attempt,"
        " r.spare_slot, r.copy_bytes, r.schemaname, r.relname, r.adopt, r.adopted FROM pgsub.subscription_rel r"
        " LEFT JOIN pg_catalog.pg_class c ON c.oid = r.srrelid"
        " LEFT JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE r.subid = %s ORDER BY r.srrelid",
        (subid,),
    )
    found = []
    for oid, schema, name, state, lsn, handover, slot, attempt, spare, size, *old, adopt, adopted in rows:
        recorded = None if [schema, name] == old else (old[0], old[1])
        brought = None if adopted is None else (adopted[0], adopted[1], adopted[2])
        lsns = (lsn_or_none(lsn), lsn_or_none(handover))
        one = RelationState(oid, schema, name, state, *lsns, slot, attempt, spare, size, recorded)
        found.append(replace(one, adopt=adopt, adopted=brought))
    return found


def table_states(connection: psycopg.Connection, subid: int) -> dict[int, RelationState]:
    """Read table states by OID, as of this statement, for apply's filter. Names are the recorded ones."""
    rows = connection.execute(
        "SELECT srrelid::bigint, schemaname, relname, srsubstate::text, srsublsn::text, handover_lsn::text"
        " FROM pgsub.subscription_rel WHERE subid = %s",
        (subid,),
    )
    return {
        oid: RelationState(oid, schema, name, state, lsn_or_none(lsn), lsn_or_none(handover))
        for oid, schema, name, state, lsn, handover in rows
    }


def grown_since(connection: psycopg.Connection, subid: int, position: int) -> bool:
    """Return whether tables were added: some are copied as of a position behind the given one, and others are not."""
    query = """
        SELECT bool_or(late) AND NOT bool_and(late)
          FROM (SELECT srsubstate <> 'r' OR coalesce(srsublsn > %s::pg_lsn, false)
                  FROM pgsub.subscription_rel WHERE subid = %s) AS r (late)"""
    return scalar(connection, query, (format_lsn(position), subid)) is True


def has_slot_of_another(connection: psycopg.Connection, subid: int, slot_name: str) -> bool:
    """Return whether another subscription of the ledger has a slot of this name."""
    query = "SELECT true FROM pgsub.subscription WHERE slot_name = %s AND subid <> %s LIMIT 1"
    return scalar(connection, query, (slot_name, subid)) is True


def forget(connection: psycopg.Connection, subid: int) -> None:
    """Remove everything about a subscription from the ledger."""
    with durable(connection):
        for table in _TABLES:  # one by one: session_replication_role = replica disables ON DELETE CASCADE
            connection.execute(
                sql.SQL("DELETE FROM {} WHERE subid = %s").format(sql.Identifier("pgsub", table)), (subid,)
            )


def begin_slot_drop(connection: psycopg.Connection, subid: int, slot_name: str) -> tuple[bool, bool]:
    """Record that the main slot is about to be dropped, which explains why it may be missing later.

    The lock is not FOR UPDATE, which would wait for prepared transactions (see ``state`` in two_phase_state.py).

    :return: whether that was recorded before, and whether :func:`end_slot_drop` was.
    """
    query = """
        UPDATE pgsub.subscription AS s
           SET slot_intent = true, slot_name = CASE WHEN before.slot_intent THEN s.slot_name ELSE %s END
          FROM (SELECT subid, slot_intent, slot_name FROM pgsub.subscription WHERE subid = %s FOR NO KEY UPDATE)
            AS before
         WHERE s.subid = before.subid RETURNING before.slot_intent, before.slot_intent AND before.slot_name IS NULL"""
    with durable(connection):
        begun, dropped = row(connection, query, (slot_name, subid)) or (True, False)
    return bool(begun), bool(dropped)


def end_slot_drop(connection: psycopg.Connection, subid: int) -> None:
    """Record that the main slot was dropped: a slot of its name is somebody else's from now on."""
    with durable(connection):
        _set(connection, subid, slot_name=None)


def any_left(connection: psycopg.Connection) -> bool:
    """Return whether the ledger holds a subscription."""
    return scalar(connection, "SELECT true FROM pgsub.subscription LIMIT 1") is True


def apply_position(connection: psycopg.Connection, subid: int) -> int:
    """Read apply's ``remote_lsn`` without a lock, good for estimates only."""
    query = "SELECT remote_lsn::text FROM pgsub.progress WHERE subid = %s AND worker = 0"
    return lsn_or_none(scalar(connection, query, (subid,))) or 0


def recorded_position(connection: psycopg.Connection, subid: int) -> int:
    """Read the position up to which apply has the publisher's WAL, transactions or not; 0 if there is none."""
    query = "SELECT greatest(remote_lsn, reported_lsn)::text FROM pgsub.progress WHERE subid = %s AND worker = 0"
    return lsn_or_none(scalar(connection, query, (subid,))) or 0


def adopt_publisher(connection: psycopg.Connection, claim: Claim, publisher: Publisher) -> None:
    """Record the first publisher that answered, for a subscription that was created without a connection."""
    with durable(connection):
        worker_takeover.fence(connection, claim)
        connection.execute(
            "UPDATE pgsub.subscription SET (system_identifier, publisher_dbname, publisher_dboid, timeline)"
            " = (%s, %s, %s, %s) WHERE subid = %s AND system_identifier IS NULL",
            (*publisher, claim.subid),
        )


def adopt_slot(connection: psycopg.Connection, claim: Claim, position: int) -> None:
    """Record where a manually created slot begins, for a subscription that never received anything.

    :param position: the slot's confirmed_flush_lsn.
    """
    with durable(connection):
        worker_takeover.fence(connection, claim)
        untouched = _REPORT + " AND reported_lsn = '0/0' AND remote_lsn = '0/0'"
        connection.execute(untouched, (format_lsn(position), claim.subid))
        _set(connection, claim.subid, consistent_point=format_lsn(position))


def replace_publisher(
    connection: psycopg.Connection, claim: Claim, system_identifier: str, timeline: int, position: int
) -> None:
    """Record the cluster that replaced the publisher, and the position of the slot that it took along.

    ``remote_lsn`` stays at the end of the last transaction, like the origin of a subscription of the server.
    """
    with durable(connection):
        worker_takeover.fence(connection, claim)
        _set(connection, claim.subid, system_identifier=system_identifier, timeline=timeline)
        connection.execute(_REPORT, (format_lsn(position), claim.subid))


def redefine(connection: psycopg.Connection, subid: int, name: str, slot_name: str | None) -> None:
    """Follow ALTER SUBSCRIPTION ... RENAME TO and SET (slot_name = ...)."""
    with durable(connection):
        if not _set(connection, subid, subname=name, slot_name=slot_name):
            raise unknown(subid)
