"""Identity, states and take-over of a subscription in the ledger: the launcher's side.

Mirrors pg_subscription.c (UpdateSubscriptionRelState and its like). Everything here commits synchronously: the
slot of a table may only be dropped when its state is on disk (a crash of the target would otherwise bring back a
state whose slot is gone).
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import LiteralString

import psycopg
from psycopg import sql

from pgsub.common.errors import StateForbids, SubscriptionExists, TargetUnavailable
from pgsub.protocol.lsn import format_lsn, parse_lsn

_TABLES = (
    *("event", "prepared_pending", "prepared_xact", "copy_chunk", "held_change", "held_table"),
    *("subscription_rel", "progress", "control", "subscription"),
)
#: Of ``pg_stat_activity a``: anybody may give a session any name, but only who may write to the ledger can be a worker.
_OURS = (
    "a.datname = pg_catalog.current_database()"
    " AND pg_catalog.has_table_privilege(a.usesysid, 'pgsub.control', 'UPDATE')"
)
APPLY = 0  #: the worker number of apply in control and progress; any other is a table's oid


@dataclass(frozen=True, slots=True)
class Claim:
    """What fences one try of one worker: given to its task, checked by every commit."""

    subid: int
    worker: int
    epoch: int
    token: str


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose slot, on which system: compared at every connect."""

    subid: int
    subname: str
    state_store: str
    system_identifier: str | None
    publisher_dbname: str | None
    publisher_dboid: int | None
    timeline: int | None
    slot_name: str | None
    slot_intent: bool
    consistent_point: int | None


@dataclass(frozen=True, slots=True)
class RelationState:
    """One row of pgsub.subscription_rel."""

    srrelid: int
    schemaname: str
    relname: str
    srsubstate: str
    srsublsn: int | None = None
    handover_lsn: int | None = None
    sync_slot: str | None = None
    attempt: int = 0
    copy_mode: str | None = None
    spare_slot: str | None = None  #: a slot that is being made for this table, or was and is no longer needed
    copy_bytes: int | None = None  #: estimate of what a copy moves, for its place in the order
    recorded: tuple[str, str] | None = None  #: schema and name in the ledger, where the table bears others by now


def lsn_or_none(text: str | None) -> int | None:
    """A pg_lsn column's text as an integer."""
    return None if text is None else parse_lsn(text)


@contextlib.contextmanager
def durable(connection: psycopg.Connection) -> Iterator[psycopg.Connection]:
    """A transaction that is on disk when it ends well, whatever the subscription's synchronous_commit is."""
    with connection.transaction():
        connection.execute("SET LOCAL synchronous_commit = on")
        yield connection


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
    """Write a new subscription's rows; ``slot_intent`` is set when a slot is about to be created.

    :param two_phase: ``e`` where that slot will be two-phase from its creation on.
    :raises SubscriptionExists: another state store has one of this number.
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
    """Insert relations inside the caller's transaction."""
    with connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO pgsub.subscription_rel (subid, srrelid, schemaname, relname, srsubstate, copy_bytes)"
            " VALUES (%s, %s, %s, %s, %s, %s)",
            [(subid, r.srrelid, r.schemaname, r.relname, r.srsubstate, r.copy_bytes) for r in relations],
        )


def slot_created(
    connection: psycopg.Connection,
    subid: int,
    *,
    system_identifier: str,
    dbname: str,
    dboid: int,
    timeline: int,
    position: int,
) -> None:
    """The slot exists: its consistent point (or a given slot's confirmed position) is where reporting starts."""
    with durable(connection):
        connection.execute(
            "UPDATE pgsub.subscription SET system_identifier = %s, publisher_dbname = %s, publisher_dboid = %s,"
            " timeline = %s, consistent_point = %s WHERE subid = %s",
            (system_identifier, dbname, dboid, timeline, format_lsn(position), subid),
        )
        connection.execute(
            "UPDATE pgsub.progress SET reported_lsn = %s WHERE subid = %s AND worker = 0",
            (format_lsn(position), subid),
        )


def registered(connection: psycopg.Connection, subid: int) -> None:
    """The state store knows the subscription: neither its creation nor its drop is under way any more."""
    connection.execute("UPDATE pgsub.subscription SET slot_intent = false WHERE subid = %s", (subid,))


def set_timeline(connection: psycopg.Connection, subid: int, timeline: int) -> None:
    """The publisher moved to another timeline and was checked to be the same history."""
    connection.execute("UPDATE pgsub.subscription SET timeline = %s WHERE subid = %s", (timeline, subid))


def identity(connection: psycopg.Connection, subid: int) -> Identity:
    """:raises StateForbids: the ledger has no such subscription (restored or another database)."""
    row = connection.execute(
        "SELECT subid, subname, state_store, system_identifier, publisher_dbname, publisher_dboid, timeline,"
        " slot_name, slot_intent, consistent_point::text FROM pgsub.subscription WHERE subid = %s",
        (subid,),
    ).fetchone()
    if row is None:
        raise unknown(subid)
    name, store, system, dbname, dboid, timeline, slot, intent, point = row[1:]
    return Identity(subid, name, store, system, dbname, dboid, timeline, slot, intent, lsn_or_none(point))


def unknown(subid: int) -> StateForbids:
    """The error for a ledger, or a database without one, that does not have the subscription."""
    return StateForbids(
        "the target's ledger does not know this subscription",
        detail=f"Schema pgsub of the target database has no row for subscription number {subid}.",
        hint="Was the target replaced or restored? Drop the subscription and create it again.",
    )


def relations(connection: psycopg.Connection, subid: int) -> list[RelationState]:
    """All tables of a subscription, in the order of their oids, by the names that they bear now.

    One that was dropped has the name that it was subscribed by.
    """
    rows = connection.execute(
        "SELECT r.srrelid::bigint, coalesce(n.nspname::text, r.schemaname), coalesce(c.relname::text, r.relname),"
        " r.srsubstate::text, r.srsublsn::text, r.handover_lsn::text, r.sync_slot, r.attempt, r.copy_mode,"
        " r.spare_slot, r.copy_bytes, r.schemaname, r.relname FROM pgsub.subscription_rel r"
        " LEFT JOIN pg_catalog.pg_class c ON c.oid = r.srrelid"
        " LEFT JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE r.subid = %s ORDER BY r.srrelid",
        (subid,),
    )
    found = []
    for oid, schema, name, state, lsn, handover, slot, attempt, mode, spare, size, old_schema, old_name in rows:
        recorded = None if (schema, name) == (old_schema, old_name) else (old_schema, old_name)
        lsns = (lsn_or_none(lsn), lsn_or_none(handover))
        found.append(RelationState(oid, schema, name, state, *lsns, slot, attempt, mode, spare, size, recorded))
    return found


def forget(connection: psycopg.Connection, subid: int) -> None:
    """Remove everything the ledger has about a subscription."""
    with durable(connection):
        for table in _TABLES:  # one by one: session_replication_role = replica silences ON DELETE CASCADE
            connection.execute(
                sql.SQL("DELETE FROM {} WHERE subid = %s").format(sql.Identifier("pgsub", table)), (subid,)
            )


def begin_slot_drop(connection: psycopg.Connection, subid: int) -> bool:
    """Record that the main slot is about to be dropped: who finds it missing then need not ask why.

    :return: whether that was recorded before.
    """
    with durable(connection):
        row = connection.execute(
            "UPDATE pgsub.subscription AS s SET slot_intent = true"
            " FROM (SELECT subid, slot_intent FROM pgsub.subscription WHERE subid = %s FOR UPDATE) AS before"
            " WHERE s.subid = before.subid RETURNING before.slot_intent",
            (subid,),
        ).fetchone()
    return row is None or bool(row[0])


def any_left(connection: psycopg.Connection) -> bool:
    """Return whether the ledger holds a subscription."""
    row = connection.execute("SELECT EXISTS (SELECT FROM pgsub.subscription)").fetchone()
    return row is not None and bool(row[0])


def take_over(connection: psycopg.Connection, subid: int, worker: int) -> Claim:
    """Raise the epoch of a worker and end every session of an older one: the only way to start a worker.

    A zombie that connects after the raise fails its claim; one that connected before is listed and terminated. What
    it committed before dying is in the ledger that the new worker reads afterwards.

    :param worker: :data:`APPLY` or a table's oid.
    :raises TargetUnavailable: an older session would not end within 30 s.
    """
    return take_over_many(connection, subid, [worker])[worker]


def take_over_many(connection: psycopg.Connection, subid: int, workers: Collection[int]) -> dict[int, Claim]:
    """:func:`take_over` of several workers in one commit; their claims by worker."""
    token = uuid.uuid4()
    with durable(connection):
        rows = connection.execute(
            "INSERT INTO pgsub.control AS c (subid, worker, epoch, token)"
            " SELECT %s, w, 1, %s FROM pg_catalog.unnest(%s::oid[]) AS w ORDER BY w"
            " ON CONFLICT (subid, worker) DO UPDATE SET epoch = c.epoch + 1, token = excluded.token,"
            " claimed_by = NULL, stop = false RETURNING worker::bigint, epoch",
            (subid, token, list(workers)),
        ).fetchall()
    epochs: dict[int, int] = dict(rows)
    roles = {role: epoch for worker, epoch in epochs.items() for role in _roles(worker)}
    evict(connection, subid, roles)
    return {worker: Claim(subid, worker, epoch, str(token)) for worker, epoch in epochs.items()}


def _roles(worker: int) -> tuple[str, ...]:
    return ("apply",) if worker == APPLY else (f"sync:{worker}", f"copy:{worker}")


def evict(connection: psycopg.Connection, subid: int, epochs: Mapping[str, int]) -> None:
    """Terminate sessions of these roles with an epoch below the given one and wait until none is left."""
    _terminate(
        connection,
        "SELECT pg_catalog.pg_terminate_backend(a.pid, 1000) FROM pg_catalog.pg_stat_activity a"
        " JOIN unnest(%s::text[], %s::bigint[]) AS r (role, epoch)"
        " ON pg_catalog.starts_with(a.application_name, r.role)"
        " WHERE CASE WHEN a.application_name ~ '^pgsub [0-9]+ [a-z]+(:[0-9]+)? [0-9]{1,18}$'"
        f" THEN pg_catalog.split_part(a.application_name, ' ', 4)::bigint < r.epoch END AND {_OURS}",
        ([f"pgsub {subid} {role} " for role in epochs], list(epochs.values())),
    )


def evict_all(connection: psycopg.Connection, subid: int) -> None:
    """Terminate every worker's session of a subscription and wait until none is left."""
    _terminate(
        connection,
        "SELECT pg_catalog.pg_terminate_backend(pid, 1000) FROM pg_catalog.pg_stat_activity"
        f" a WHERE application_name ~ %s AND {_OURS}",
        (f"^pgsub {subid} (apply|sync:[0-9]+|copy:[0-9]+) [0-9]+$",),
    )


def _terminate(connection: psycopg.Connection, query: LiteralString, params: Sequence[object]) -> None:
    deadline = time.monotonic() + 30
    while connection.execute(query, params).fetchall():
        if time.monotonic() > deadline:
            raise TargetUnavailable("could not end an older worker's session on the target")


def ask_to_stop(connection: psycopg.Connection, subid: int) -> None:
    """Set the stop flag of every worker; each reads it at a transaction boundary.

    A row that somebody holds is passed over rather than waited for: ask again.
    """
    connection.execute(
        "UPDATE pgsub.control SET stop = true WHERE (subid, worker) IN (SELECT subid, worker FROM pgsub.control"
        " WHERE subid = %s AND NOT stop FOR UPDATE SKIP LOCKED)",
        (subid,),
    )


def apply_position(connection: psycopg.Connection, subid: int) -> int:
    """Apply's ``remote_lsn``, read without a lock: good for estimates only."""
    row = connection.execute(
        "SELECT remote_lsn::text FROM pgsub.progress WHERE subid = %s AND worker = 0", (subid,)
    ).fetchone()
    return parse_lsn(row[0]) if row else 0


def lock_timeout(connection: psycopg.Connection) -> None:
    """Nothing waits long for a ledger row while it holds another (hand-over, TRUNCATE of a re-sync)."""
    connection.execute("SET LOCAL lock_timeout = '1s'")
