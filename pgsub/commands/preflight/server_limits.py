"""Limits of both servers: slots, walsenders, sessions, origins, and transactions that delay slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import psycopg

from pgsub.commands.preflight.findings import Caution, Table
from pgsub.common import quoting
from pgsub.common.errors import StateForbids
from pgsub.common.plural import counted
from pgsub.common.query import scalar
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher import slots
from pgsub.publisher.slot_creation import long_transactions
from pgsub.target.session import origins
from pgsub.target.session.free_sessions import free_sessions

#: Minimum age in seconds of a transaction that is reported to delay slots.
LONG_SECONDS = 5.0
_AT_MOST = 5  #: maximum number of transactions that are reported separately


def setting(connection: psycopg.Connection, name: str) -> int:
    """Return an integer setting of a server."""
    return int(str(scalar(connection, f"SHOW {name}")))


def check_new_slot(connection: publisher.Connection, name: str) -> None:
    """Check that there is room for a slot and its walsender.

    :raises StateForbids: there is none, or a slot of this name exists.
    """
    if slots.slot_state(connection, name) is not None:
        raise StateForbids(
            f'could not create replication slot "{name}": replication slot "{name}" already exists',
            hint=f"Use another slot (--slot-name), or the existing one (--no-create-slot), or drop it:\n"
            f"SELECT pg_drop_replication_slot({quoting.literal(name)});",
            sqlstate="42710",
        )
    free = slots.free_slots(connection)
    if free.used >= free.max:
        raise StateForbids(
            "all replication slots of the publisher are in use",
            detail=f"max_replication_slots is {free.max}; the subscription needs one, and one more for each table"
            " that synchronizes.",
            hint="Drop slots that are no longer needed, or raise the setting and restart the publisher:\n"
            "ALTER SYSTEM SET max_replication_slots = 20;",
            sqlstate="53400",
        )
    if free.free_walsenders < 1:
        raise StateForbids(
            "all walsenders of the publisher are in use",
            hint="Raise the setting and restart the publisher:\nALTER SYSTEM SET max_wal_senders = 20;",
            sqlstate="53300",
        )


def check_limits(
    connection: publisher.Connection, session: psycopg.Connection, sub: Subscription, tables: Sequence[Table]
) -> Iterator[Caution]:
    """Check that both servers have room for simultaneous synchronization of tables, and that slots need not wait.

    :param tables: the tables to copy.
    """
    with_slot = sub.slot_name is None or slots.slot_state(connection, sub.slot_name) is not None
    syncing = min(sub.max_sync_workers, len(tables))
    needed = syncing + (0 if with_slot else 1)
    if needed == 0:
        yield from check_apply_workers(session, sub) if sub.apply_workers > 1 else ()
        return
    # Small tables share a slot. Each takes its turn with a copy of the slot when apply has passed it.
    shared = syncing if len(tables) > syncing else 0
    yield from _walsenders(connection, needed, needed + shared)
    yield from delays(connection)
    copying = sub.copy_workers if any(table.chunks > 1 for table in tables) else 1
    each = 1 + copying
    if any(table.mode == "adopt" for table in tables):  # comparing sessions and one with the snapshot
        each = max(each, 3 + sub.copy_workers)
    yield from _sessions(connection, "publisher", 2 + syncing * each, _COPYING)
    yield from check_apply_workers(session, sub, syncing, each)


def check_apply_workers(
    session: psycopg.Connection, sub: Subscription, syncing: int = 0, each: int = 0
) -> Iterator[Caution]:
    """Check that the target has room for the subscription's sessions, including those that it already has.

    If apply may choose the number of its sessions, only one is needed: it takes more only while enough are free.

    :param syncing: the number of tables that synchronize at the same time, with ``each`` sessions.
    """
    options = (("--apply-workers",) if sub.apply_workers > 1 else ()) + (_COPYING if syncing else ())
    applying = max(sub.apply_workers, 1)
    yield from _sessions(session, "target", 1 + applying + syncing * each, options, sub.subid)
    yield from check_origins(session, applying + syncing, sub.subid)


def check_origins(session: psycopg.Connection, needed: int, subid: int = 0) -> Iterator[Caution]:
    """Check that enough replication origins are free or already belong to the subscription.

    Each applying session and each synchronizing table keeps its own origin.
    """
    left = origins.free(session, subid) if origins.allowed(session) else None
    if left is not None and left < needed:
        yield Caution(
            f"only {counted(left, 'replication origin', ('is', 'are'))} free on the target",
            f"The subscription may take {needed}. A worker that gets none is tried again and again where origin = none"
            " or a publication of its tables depends on origins, and otherwise writes as if it were local.",
            origins.SHORT_HINT,
        )


def _walsenders(connection: publisher.Connection, walsenders: int, most_slots: int) -> Iterator[Caution]:
    """Check slots and walsenders: one of each for apply and for each synchronizing table."""
    free = slots.free_slots(connection)
    for kind, left, needed, name in (
        ("replication slot", free.max - free.used, most_slots, "max_replication_slots"),
        ("walsender", free.free_walsenders, walsenders, "max_wal_senders"),
    ):
        if left < needed:
            yield Caution(
                f"only {counted(max(left, 0), kind, ('is', 'are'))} free on the publisher",
                f"The subscription and the tables that synchronize at once may take {needed}; those that get none"
                " are tried again and again.",
                "Use a smaller --max-sync-workers, or raise the setting and restart the publisher:\n"
                f"ALTER SYSTEM SET {name} = {setting(connection, name) + needed - left};",
            )


def delays(connection: publisher.Connection) -> Iterator[Caution]:
    """Yield transactions for which a new slot would wait."""
    waits = "the creation of replication slots will wait for"
    found = long_transactions(connection, LONG_SECONDS)
    for one in found[:_AT_MOST]:
        yield Caution(f"{waits} {one.name} on the publisher", one.detail(), one.hint())
    if more := found[_AT_MOST:]:
        yield Caution(f"{waits} {counted(len(more), 'more transaction')}", ", ".join(one.name for one in more))


_COPYING = ("--max-sync-workers", "--copy-workers")


def _sessions(
    connection: psycopg.Connection, server: str, needed: int, options: Sequence[str], subid: int = 0
) -> Iterator[Caution]:
    """Check that the role may open the needed sessions.

    :param options: the options that determine their number.
    :param subid: the subscription whose present sessions count towards the needed ones, 0 for none.
    """
    counts = free_sessions(connection, subid)
    left = needed if counts is None else counts.free + counts.present
    if counts is not None and left < needed:
        smaller = f"Use a smaller {' or '.join(options)}, or raise" if options else "Raise"
        yield Caution(
            f"only {max(left, 0)} sessions are free for this role on the {server}",
            f"The subscription may take {needed} of them at once; what finds none is tried again.",
            f"{smaller} the limit (max_connections is {counts.most}, or CONNECTION LIMIT of role or database).",
        )
