"""Replication slots: state, creation, removal.

Mirrors ``slot.c``, ``libpqrcv_create_slot`` (libpqwalreceiver.c) and ``ReplicationSlotDropAtPubNode``
(subscriptioncmds.c). A slot is only ever dropped by the full name that the caller gives.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, NamedTuple

import psycopg
from psycopg.rows import dict_row

from pgsub.common import quoting
from pgsub.common.errors import PgsubError, SlotLost, StateForbids
from pgsub.common.query import scalar
from pgsub.protocol.lsn import lsn_or_none, parse_lsn
from pgsub.publisher.connect import Connection, answer, is_replication
from pgsub.publisher.server_errors import standby_lacks_slot, translate, translating
from pgsub.publisher.slot_names import is_sync_slot, valid_slot_name
from pgsub.publisher.stream.walsender import quote_identifier

#: The first version whose standbys synchronize slots.
FAILOVER_VERSION = 170000
#: The first version that sends PREPARE TRANSACTION as such, and the first that can disable it for a slot.
TWO_PHASE_VERSION, ALTER_TWO_PHASE_VERSION = 150000, 180000
#: The first version whose standbys synchronize since when a slot is two-phase (two_phase_at).
SYNCED_TWO_PHASE_VERSION = 180000
_WAL_STATUSES = frozenset(("reserved", "extended", "unreserved", "lost"))


@dataclass(frozen=True, slots=True)
class SlotState:
    """A row of pg_replication_slots. Columns that the server's version lacks are None or False."""

    name: str
    plugin: str | None  #: None: a physical slot
    database: str | None
    active: bool
    active_pid: int | None
    restart_lsn: int | None
    confirmed_flush_lsn: int | None
    wal_status: str | None  #: reserved, extended, unreserved, lost
    safe_wal_size: int | None  #: bytes until the slot is lost; None: no limit is set
    two_phase: bool
    failover: bool
    invalidation_reason: str | None
    retained_bytes: int | None  #: bytes of WAL from restart_lsn to current_lsn
    current_lsn: int  #: the server's write position; on a standby, its replay position
    in_recovery: bool = False  #: the server is in recovery
    synced: bool | None = None  #: a copy of a primary's slot; it cannot be used while the server is in recovery
    conflicting: bool | None = None  #: invalidated by a conflict with recovery
    inactive_since: datetime | None = None


class FreeSlots(NamedTuple):
    """The number of used slots, their maximum, and the number of free walsenders."""

    used: int
    max: int
    free_walsenders: int


def sync_slots(connection: Connection, subid: int) -> dict[str, bool]:
    """List slots of this database that synchronize tables of a subscription, by their names.

    :return: whether each slot can still be used.
    """
    query = """
        SELECT slot_name::text, wal_status IS DISTINCT FROM 'lost' FROM pg_catalog.pg_replication_slots
        WHERE database = pg_catalog.current_database() AND slot_name ~ ('^pgsub_' || %s || '_sync_') ORDER BY 1"""
    with translating(connection, "list replication slots of table synchronization"):
        return dict(connection.execute(query, (str(subid),)).fetchall())


def in_recovery(connection: Connection) -> bool:
    """Return whether the server is a standby that has not been promoted."""
    with translating(connection, "ask whether the publisher is a standby"):
        return bool(scalar(connection, "SELECT pg_catalog.pg_is_in_recovery()"))


def of_no_table(name: str) -> tuple[str, str]:
    """Return DETAIL and HINT for a slot with such a name that the ledger does not name."""
    return (
        "It is named as those that synchronize tables of this subscription, but the ledger does not name it. It keeps"
        " WAL.",
        f"If nobody uses it, run this on the publisher:\nSELECT pg_drop_replication_slot({quoting.literal(name)});",
    )


def end_walsenders(connection: Connection, names: Sequence[str]) -> None:
    """Terminate the walsenders that stream or create these slots. Their workers were fenced. Do not wait for their end.

    Without the privilege nothing happens; then the caller has to wait for the slots.
    """
    query = """
        SELECT pg_catalog.pg_terminate_backend(active_pid) FROM pg_catalog.pg_replication_slots
        WHERE slot_name = ANY(%s::name[]) AND active_pid IS NOT NULL"""
    with (
        translating(connection, "end the walsender of a replication slot"),
        contextlib.suppress(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute(query, (list(names),))


def slot_state(connection: Connection, name: str) -> SlotState | None:
    """Read the state of a slot; return None if there is no slot with this name."""
    query = """
        SELECT s.*, s.slot_name AS name, w.lsn::text AS current_lsn,
            pg_catalog.pg_wal_lsn_diff(w.lsn, s.restart_lsn)::bigint AS retained_bytes,
            pg_catalog.pg_is_in_recovery() AS in_recovery
        FROM pg_catalog.pg_replication_slots s,
            (SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
                ELSE pg_catalog.pg_current_wal_lsn() END) AS w (lsn)
        WHERE s.slot_name = %s"""
    with translating(connection, f'read replication slot "{name}"'), connection.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(query, (name,)).fetchone()
    return None if row is None else _state(row)


def has_changes(connection: Connection, name: str, publications: Sequence[str]) -> bool:
    """Return whether an inactive slot of pgoutput has a change to send, without consuming it; true if it cannot tell.

    :param connection: not a replication connection.
    """
    # before 15 every transaction is sent, also an empty one
    first = 1 if connection.info.server_version >= 150000 else None
    query = """
        SELECT EXISTS (SELECT FROM pg_catalog.pg_logical_slot_peek_binary_changes(%s, NULL, %s, 'proto_version', '1',
            'publication_names', %s) AS c (lsn, xid, data) WHERE pg_catalog.get_byte(data, 0) NOT IN (66, 67))"""
    listed = ",".join(map(quote_identifier, publications))
    try:
        return scalar(connection, query, (name, first, listed)) is not False
    except psycopg.Error:
        return True


def _state(row: dict[str, Any]) -> SlotState:
    known: dict[str, Any] = {"failover": False, "invalidation_reason": None}
    known |= {field.name: row[field.name] for field in fields(SlotState) if field.name in row}
    for position in ("restart_lsn", "confirmed_flush_lsn", "current_lsn"):
        known[position] = lsn_or_none(row[position])
    if known["wal_status"] not in _WAL_STATUSES:  # every message about the slot shows it
        known["wal_status"] = None
    if known["invalidation_reason"] is None and known["wal_status"] == "lost":
        known["invalidation_reason"] = "wal_removed"  # before 17 no reason is shown; on a primary it is this one
    return SlotState(**{**known, "current_lsn": known["current_lsn"] or 0})


def create_slot(
    connection: Connection,
    name: str,
    *,
    two_phase: bool = False,
    failover: bool = False,
    snapshot: str = "nothing",
    temporary: bool = False,
) -> int:
    """Create a logical slot of pgoutput, after waiting for older write transactions.

    :param connection: a replication connection; with ``use``, in a fresh REPEATABLE READ transaction.
    :param failover: let standbys synchronize the slot; ignored before 17.
    :param snapshot: nothing, use or export.
    :param temporary: the slot is dropped with the connection.
    :return: the consistent point: everything that commits later is streamed.
    :raises PgsubError: translated; StateForbids if the slot exists.
    """
    valid_slot_name(name)
    options = _create_options(connection.info.server_version, two_phase, failover, snapshot)
    kind = " TEMPORARY" if temporary else ""
    command = f"CREATE_REPLICATION_SLOT {quote_identifier(name)}{kind} LOGICAL pgoutput {options}"
    with translating(connection, f'create replication slot "{name}"'):
        _, consistent_point, *_ = answer(connection, command, 4)
    return parse_lsn(consistent_point)


def _create_options(version: int, two_phase: bool, failover: bool, snapshot: str) -> str:
    if version < 150000:
        words = {"nothing": "NOEXPORT_SNAPSHOT", "use": "USE_SNAPSHOT", "export": "EXPORT_SNAPSHOT"}
        return f"{'TWO_PHASE ' if two_phase else ''}{words[snapshot]}"
    options = ["TWO_PHASE"] if two_phase else []
    if failover and version >= FAILOVER_VERSION:
        options.append("FAILOVER")
    options.append(f"SNAPSHOT '{snapshot}'")
    return f"({', '.join(options)})"


def copy_slot(connection: Connection, name: str, new: str, *, temporary: bool = False) -> None:
    """Create a slot that begins at the position of another one.

    :param connection: not a replication connection, unless ``temporary``.
    :param temporary: the slot is dropped with the connection. The other slot may be streamed meanwhile; a reader loses
        nothing if it confirms a position in the meantime.
    :raises PgsubError: translated; SlotLost if the other slot is gone or lost, unless a standby lacks it.
    """
    words = (name, valid_slot_name(new), temporary)
    doing = f'copy replication slot "{name}"'
    with translating(connection, doing):
        try:
            connection.execute("SELECT pg_catalog.pg_copy_logical_replication_slot(%s, %s, %s)", words)
        except (psycopg.errors.UndefinedObject, psycopg.errors.ObjectNotInPrerequisiteState) as error:
            if isinstance(error, psycopg.errors.UndefinedObject) and in_recovery(connection):
                raise standby_lacks_slot(name) from None
            raise SlotLost(translate(error, doing).message, sqlstate=error.sqlstate) from None


def check_two_phase(connection: Connection) -> None:
    """Check that the publisher can send prepared transactions.

    :raises StateForbids: it is too old.
    """
    version = connection.info.server_version
    if version < TWO_PHASE_VERSION:
        raise StateForbids(
            "two_phase is not available with this publisher",
            detail=f"It runs PostgreSQL {version // 10000}; prepared transactions are replicated from 15 on.",
            hint="Leave out --two-phase. To take it back from a subscription that is disabled:\n"
            "pgsub alter NAME --no-two-phase",
            sqlstate="0A000",
        )


def alter_slot(
    connection: Connection, name: str, *, failover: bool | None = None, two_phase: bool | None = None
) -> None:
    """Run ALTER_REPLICATION_SLOT. The slot must not be in use.

    :param connection: a replication connection.
    :param failover: None: unchanged; needs :data:`FAILOVER_VERSION`.
    :param two_phase: None: unchanged; needs :data:`ALTER_TWO_PHASE_VERSION`.
    :raises PgsubError: translated; PublisherUnavailable while a walsender uses the slot.
    """
    given = {"FAILOVER": failover, "TWO_PHASE": two_phase}
    words = ", ".join(f"{word} {'true' if value else 'false'}" for word, value in given.items() if value is not None)
    command = f"ALTER_REPLICATION_SLOT {quote_identifier(name)} ({words})"
    with translating(connection, f'alter replication slot "{name}"'):
        connection.execute(command.encode())


def drop_slot(connection: Connection, name: str, *, missing_ok: bool = True, timeout: float = 60) -> bool:
    """Drop a slot and return whether it existed.

    The server's ``DROP_REPLICATION_SLOT … WAIT`` waits without a limit while another walsender uses the slot. Here the
    drop is retried until the timeout.

    :param connection: a replication connection or an ordinary one.
    :param missing_ok: False: a missing slot is an error, as for the main slot of DROP SUBSCRIPTION.
    :param timeout: seconds to wait while the slot is active.
    :raises SlotLost: missing and not ``missing_ok``.
    :raises PublisherUnavailable: still active.
    """
    deadline = time.monotonic() + timeout
    pause = 0.005
    while True:
        try:
            _drop(connection, name)
            return True
        except psycopg.errors.ObjectInUse as error:
            if time.monotonic() >= deadline:
                raise _not_dropped(error, name) from None
        except psycopg.errors.UndefinedObject as error:
            if not missing_ok:
                raise SlotLost(_not_dropped(error, name).message, sqlstate=error.sqlstate) from None
            return False
        except psycopg.Error as error:
            raise _not_dropped(error, name) from None
        time.sleep(pause)
        pause = min(pause * 2, 0.25)


def _drop(connection: Connection, name: str) -> None:
    if is_replication(connection):
        connection.execute(f"DROP_REPLICATION_SLOT {quote_identifier(name)}".encode(connection.info.encoding))
    else:
        connection.execute("SELECT pg_catalog.pg_drop_replication_slot(%s)", (name,))


def _not_dropped(error: psycopg.Error, name: str) -> PgsubError:
    return translate(error, f'drop replication slot "{name}" on publisher')


def drop_sync_slot(connection: Connection, subid: int, name: str, *, timeout: float = 60) -> None:
    """Drop a slot if its name is one that synchronizes the subscription's tables.

    The name comes from the ledger, whose owner must not decide which slots of the publisher are dropped. So slots with
    other names are kept.

    :raises PublisherUnavailable: still active.
    """
    if is_sync_slot(subid, name):
        drop_slot(connection, name, timeout=timeout)


def free_slots(connection: Connection) -> FreeSlots:
    """Count used slots, their maximum, and the walsenders that may still start."""
    query = """
        SELECT (SELECT count(*) FROM pg_catalog.pg_replication_slots),
            pg_catalog.current_setting('max_replication_slots')::bigint,
            pg_catalog.current_setting('max_wal_senders')::bigint
                - (SELECT count(*) FROM pg_catalog.pg_stat_replication)"""
    with translating(connection, "count replication slots"):
        row = connection.execute(query).fetchone()
    assert row is not None
    return FreeSlots(*row)
