"""The checks of each server as a whole: settings, roles, room for slots and sessions, transactions that delay slots."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterator, Sequence

import psycopg

from pgsub.commands.preflight.findings import Caution, Table
from pgsub.common import conflict_rules, quoting
from pgsub.common.errors import StateForbids
from pgsub.common.subscription import Subscription
from pgsub.publisher import channel, prerequisites, slots
from pgsub.publisher import connect as publisher
from pgsub.publisher.slot_creation import long_transactions
from pgsub.target.ledger import schema
from pgsub.target.session import connect as target
from pgsub.target.session import origins

# From 19 tables can be left out (EXCEPT); a ledger that is still to come cannot.
_PUBLISHING = """
SELECT p.pubname FROM pg_catalog.pg_publication p
 WHERE p.puballtables AND (pg_catalog.to_regnamespace('pgsub') IS NULL OR EXISTS (
       SELECT FROM pg_catalog.pg_get_publication_tables(p.pubname::text) g JOIN pg_catalog.pg_class c ON c.oid = g.relid
        WHERE c.relnamespace = pg_catalog.to_regnamespace('pgsub')))
"""
# A copy of a cluster has its system identifier and its databases' OIDs, but was not started in the same microsecond.
_DATABASE = """
SELECT d.oid, pg_catalog.pg_postmaster_start_time(), d.datname::text
  FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()
"""
#: Seconds that a transaction has been open when it is named as one that delays slots.
LONG_SECONDS = 5.0
_AT_MOST = 5  #: transactions that are named one by one


def check_target(session: psycopg.Connection) -> list[Caution]:
    """Check the target as a whole: privileges of the role, settings, publications that include the ledger.

    :raises PermissionMissing: no ledger, and none may be made.
    """
    warned = [*check_role(session, replica=target.is_replica(session)), *_settings(session)]
    warned += [*check_encryption(session, "target"), *publishing_ledger(session)]
    schema.check(session)
    return warned


def publishing_ledger(session: psycopg.Connection) -> list[Caution]:
    """Warn of publications of the target that include the ledger."""
    return [
        Caution(
            f'publication "{name}" on the target publishes all tables, schema pgsub included',
            "A subscriber of it would receive the rows of pgsub's ledger.",
            "Publish schemas by name instead: CREATE PUBLICATION … FOR TABLES IN SCHEMA …",
        )
        for (name,) in session.execute(_PUBLISHING).fetchall()
    ]


def check_other_database(source: psycopg.Connection, session: psycopg.Connection) -> None:
    """Refuse to replicate a database into itself, where each change applied would be published again.

    :param source: a session of the publisher.
    :param session: of the target.
    :raises StateForbids: both are sessions of one database.
    """
    published, applied = source.execute(_DATABASE).fetchone(), session.execute(_DATABASE).fetchone()
    if published == applied and applied is not None:
        raise StateForbids(
            f'publisher and target are the same database "{applied[2]}"',
            detail="Every change that is applied would be published and applied again.",
            hint="Name another database with --target or --connection.",
        )


def check_same_database(known: psycopg.Connection, other: psycopg.Connection, what: str, option: str) -> None:
    """Check that two sessions are of one database.

    :param what: publisher or target, whose session ``known`` is.
    :param option: which made the other one.
    :raises StateForbids: they are not.
    """
    if known.execute(_DATABASE).fetchone() != other.execute(_DATABASE).fetchone():
        raise StateForbids(
            f"{option} leads to another database than that of the {what}",
            detail=f'It leads to database "{other.info.dbname}" on host "{other.info.host}", port {other.info.port}.',
            hint=f"Name the {what} of the subscription.",
        )


def check_encryption(connection: psycopg.Connection, server: str) -> Iterator[Caution]:
    """Warn of a connection that others could read and change.

    :param server: publisher or target.
    """
    info = connection.info
    if channel.plain(connection) and not is_local(info.hostaddr or info.host):
        yield Caution(
            f"the connection to the {server} is not encrypted",
            f"Anyone who can intercept the connection to {info.host} can change what is applied on the target.",
            f'Add "sslmode=verify-full sslrootcert=…" to the connection string of the {server}.',
        )


def is_local(host: str) -> bool:
    """Return whether a host is this machine: a folder of sockets, or an address of the loopback network."""
    if host.startswith(("/", "@")) or host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_role(session: psycopg.Connection, *, replica: bool) -> Iterator[Caution]:
    """Yield what the role may not do on the target.

    :param replica: whether it may set session_replication_role.
    """
    role = _role(session)
    if not replica:
        yield Caution(
            "cannot set session_replication_role on the target",
            "Ordinary triggers and foreign keys fire for replicated rows, and no table is copied in chunks.",
            f"Run this on the target:\nGRANT SET ON PARAMETER session_replication_role TO {role};",
            "session_replication_role",
        )
    if not origins.allowed(session):
        yield Caution(
            "cannot use replication origins on the target",
            "Subscribers of the target with origin = none receive what pgsub writes as if it were local.",
            origins.grant_hint(session, role),
            origins.FEATURE,
        )


def _role(session: psycopg.Connection) -> str:
    return str(publisher.scalar(session, "SELECT pg_catalog.quote_ident(current_user)"))


def _settings(session: psycopg.Connection) -> Iterator[Caution]:
    """Yield settings of the target by which the server's subscriber would read text otherwise (docs/differences.md)."""
    setting = publisher.scalar(session, "SELECT reset_val FROM pg_catalog.pg_settings WHERE name = 'array_nulls'")
    if setting == "off":
        yield Caution(
            "array_nulls is off on the target",
            "pgsub reads arrays with it on, so that NULL elements of the publisher's arrays stay NULL. NULL in a text"
            " column that goes to an array column is read as NULL, too; the server's subscriber would read it as text.",
        )


def check_conflict_rules(session: psycopg.Connection, rules: Sequence[str]) -> None:
    """Check that the target tracks who wrote a row last, and when, if a rule needs it.

    :param rules: of the subscription.
    :raises StateForbids: it does not track that, in full or at all.
    """
    asking = conflict_rules.needing_times(rules)
    if not asking:
        return
    if not target.tracks_commits(session):
        raise StateForbids(
            f'conflict rule "{asking[0]}" needs track_commit_timestamp on the target',
            detail="Without it the target does not record which origin wrote a row last, and when.",
            hint="Set it there, and restart the target:\nALTER SYSTEM SET track_commit_timestamp = on;",
            sqlstate="55000",
        )
    if not origins.allowed(session):
        raise StateForbids(
            f'conflict rule "{asking[0]}" needs replication origins on the target',
            detail="Without them the rows that pgsub wrote cannot be distinguished from those of others.",
            hint=f"Run this on the target:\n{origins.grant_hint(session, _role(session))}",
            sqlstate="42501",
        )


def tables_of_rules(rules: Sequence[str], known: Collection[str]) -> list[Caution]:
    """Warn of rules for tables that the subscription does not have; a name may be mistyped.

    :param rules: of the subscription.
    :param known: its tables as schema.table of the target.
    """
    return [
        Caution(
            f'conflict rules name table "{name}", which is not part of the subscription',
            "They hold from when it becomes part of it.",
        )
        for name in sorted(conflict_rules.tables(rules) - set(known))
    ]


def check_two_phase(session: psycopg.Connection, source: publisher.Connection | None) -> list[Caution]:
    """Check that the target can prepare what is prepared on the publisher.

    :param source: None where the publisher is not asked.
    :raises StateForbids: the publisher is too old.
    """
    if source is not None:
        slots.check_two_phase(source)
    name = "max_prepared_transactions"
    here, there = _setting(session, name), 0 if source is None else _setting(source, name)
    hint = f"Set it on the target, and restart the target:\nALTER SYSTEM SET {name} = {max(there, 20)};"
    if here == 0:
        detail = f"Its {name} is 0. Apply stops at the first transaction that is prepared on the publisher."
        return [Caution("prepared transactions are disabled on the target", detail, hint)]
    if here < there:
        detail = f"It is {here}, the publisher's is {there}. While as many are prepared on the target, apply waits."
        return [Caution(f"{name} of the target is smaller than the publisher's", detail, hint)]
    return []


def _setting(connection: psycopg.Connection, name: str) -> int:
    return int(str(publisher.scalar(connection, f"SHOW {name}")))


def check_given_slot(slot: slots.SlotState, sub: Subscription, *, ready: bool) -> None:
    """Check that two_phase of an existing slot fits the subscription: it decides what is sent.

    :param ready: whether every table, and there is one, will be ``r`` from the start.
    :raises StateForbids: it does not fit the subscription.
    """
    if not slot.two_phase or (ready and sub.two_phase != "d"):
        return
    lacking, detail = "is not", "The slot sends prepared transactions as such."
    hint = "Use another slot, or --two-phase with --no-copy-data."
    if sub.two_phase != "d":
        lacking = "will not be before every table is synchronized"
        detail = "Tables that are still copied would lose transactions that are prepared before and committed after."
        hint = "Use another slot, or no slot of your own."
    message = f'replication slot "{slot.name}" is two-phase, but the subscription {lacking}'
    raise StateForbids(message, detail=detail, hint=hint, sqlstate="55000")


def check_publisher(connection: publisher.Connection, sub: Subscription, *, create_slot: bool) -> None:
    """Check the publisher as a whole.

    :raises StateForbids: wal_level, no free slot, the slot exists.
    :raises PermissionMissing: no REPLICATION.
    """
    prerequisites.check_wal_level(connection)
    prerequisites.check_replication_role(connection)
    if create_slot and sub.slot_name is not None:
        check_new_slot(connection, sub.slot_name)


def check_new_slot(connection: publisher.Connection, name: str) -> None:
    """Check that there is room for a slot and its walsender.

    :raises StateForbids: there is none, or a slot of this name.
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


def check_room(
    connection: publisher.Connection, session: psycopg.Connection, sub: Subscription, tables: Sequence[Table]
) -> Iterator[Caution]:
    """Check that both servers have room for the tables that synchronize at once, and that slots need not wait.

    :param tables: those that will be copied.
    """
    with_slot = sub.slot_name is None or slots.slot_state(connection, sub.slot_name) is not None
    syncing = min(sub.max_sync_workers, len(tables))
    needed = syncing + (0 if with_slot else 1)
    if needed == 0:
        return
    # small tables share a slot, and get a copy of it each in turn where apply went past it
    shared = syncing if len(tables) > syncing else 0
    yield from _walsenders(connection, needed, needed + shared)
    yield from delays(connection)
    copying = sub.copy_workers if any(table.chunks > 1 for table in tables) else 1
    each = 1 + copying
    if any(table.mode == "adopt" for table in tables):  # sessions that compare, and one that holds the snapshot
        each = max(each, 3 + sub.copy_workers)
    for server, asked in (("publisher", connection), ("target", session)):
        yield from _sessions(asked, server, 2 + syncing * each)
    yield from check_origins(session, 1 + syncing)


def check_origins(session: psycopg.Connection, needed: int) -> Iterator[Caution]:
    """Check that enough replication origins are free.

    Apply and each table that synchronizes write with one of their own, which stays the subscription's.
    """
    left = origins.free(session) if origins.allowed(session) else None
    if left is not None and left < needed:
        yield Caution(
            f"only {left} replication origins are free on the target",
            f"The subscription may take {needed}. A worker that gets none is tried again and again where origin = none"
            " or a publication of its tables depends on origins, and otherwise writes as if it were local.",
            origins.SHORT_HINT,
        )


def _walsenders(connection: publisher.Connection, walsenders: int, most_slots: int) -> Iterator[Caution]:
    """Check slots and walsenders: each table that synchronizes holds one of both, apply another."""
    free = slots.free_slots(connection)
    for kind, left, needed, setting in (
        ("replication slots", free.max - free.used, most_slots, "max_replication_slots"),
        ("walsenders", free.free_walsenders, walsenders, "max_wal_senders"),
    ):
        if left < needed:
            yield Caution(
                f"only {max(left, 0)} {kind} are free on the publisher",
                f"The subscription and the tables that synchronize at once may take {needed}; those that get none"
                " are tried again and again.",
                "Use a smaller --max-sync-workers, or raise the setting and restart the publisher:\n"
                f"ALTER SYSTEM SET {setting} = {_setting(connection, setting) + needed - left};",
            )


def delays(connection: publisher.Connection) -> Iterator[Caution]:
    """Yield transactions that a new slot would wait for."""
    waits = "the creation of replication slots will wait for"
    found = long_transactions(connection, LONG_SECONDS)
    for one in found[:_AT_MOST]:
        yield Caution(f"{waits} {one.name} on the publisher", one.detail(), one.hint())
    if more := found[_AT_MOST:]:
        yield Caution(f"{waits} {len(more)} more transactions", ", ".join(one.name for one in more))


# Reserved connections are not for everybody, and a role and a database have limits of their own. What the role may not
# see of others counts as a client's.
_SESSIONS = """
SELECT least(
       current_setting('max_connections')::bigint - CASE WHEN r.rolsuper THEN 0 ELSE
           current_setting('superuser_reserved_connections')::bigint
           + coalesce(current_setting('reserved_connections', true)::bigint, 0) END - a.clients,
       CASE WHEN r.rolconnlimit >= 0 AND NOT r.rolsuper THEN r.rolconnlimit - a.ours END,
       CASE WHEN d.datconnlimit >= 0 AND NOT r.rolsuper THEN d.datconnlimit - a.here END),
       current_setting('max_connections')
  FROM pg_catalog.pg_roles r, pg_catalog.pg_database d,
       (SELECT count(*), count(*) FILTER (WHERE usename = current_user),
               count(*) FILTER (WHERE datname = current_database())
          FROM pg_catalog.pg_stat_activity
         WHERE datid IS NOT NULL AND coalesce(backend_type, 'client backend') = 'client backend'
       ) AS a (clients, ours, here)
 WHERE r.rolname = current_user AND d.datname = current_database()
"""


def _sessions(connection: psycopg.Connection, server: str, needed: int) -> Iterator[Caution]:
    row = connection.execute(_SESSIONS.encode()).fetchone()
    if row is not None and row[0] < needed:
        yield Caution(
            f"only {max(row[0], 0)} sessions are free for this role on the {server}",
            f"Tables and chunks that are copied at once may take {needed}; those that find none are retried.",
            f"Use a smaller --max-sync-workers or --copy-workers, or raise the limit (max_connections is {row[1]}, or"
            " CONNECTION LIMIT of role or database).",
        )


def check_encoding(connection: publisher.Connection, session: psycopg.Connection) -> Iterator[Caution]:
    """Check that every character of the publisher exists on the target."""
    there = connection.info.parameter_status("server_encoding")
    here = session.info.parameter_status("server_encoding")
    message = f'the publisher\'s database has encoding "{there}", the target\'s "{here}"'
    if "SQL_ASCII" in (there, here):  # nobody knows what its bytes mean, so nothing can be converted
        yield Caution(
            message,
            "pgsub sends text as UTF-8. What is no UTF-8 in a database of SQL_ASCII stops apply and copies, and text"
            " from another encoding is stored in it as UTF-8; the server's subscriber would take the bytes as they"
            " are.",
            "Replicate between databases with an encoding other than SQL_ASCII.",
        )
    elif here not in (there, "UTF8"):
        yield Caution(
            message,
            "Text with characters that have no equivalent in the target's encoding fails.",
            "Replicate into a database of the same encoding, or of UTF8.",
        )
