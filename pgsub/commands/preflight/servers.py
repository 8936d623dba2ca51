"""The checks of each server as a whole: settings, roles, and the prerequisites of slots and two-phase commit."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import psycopg

from pgsub.commands.preflight import databases, server_limits
from pgsub.commands.preflight.findings import Caution
from pgsub.common import conflict_rules
from pgsub.common.errors import StateForbids
from pgsub.common.query import current_role, scalar
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher import prerequisites, slots
from pgsub.target.ledger.schema import installation
from pgsub.target.session import connect as target
from pgsub.target.session import origins

# Since 19, publications can exclude tables (EXCEPT), but not those of a ledger that does not exist yet.
_PUBLISHING = """
SELECT p.pubname FROM pg_catalog.pg_publication p
 WHERE p.puballtables AND (pg_catalog.to_regnamespace('pgsub') IS NULL OR EXISTS (
       SELECT FROM pg_catalog.pg_get_publication_tables(p.pubname::text) g JOIN pg_catalog.pg_class c ON c.oid = g.relid
        WHERE c.relnamespace = pg_catalog.to_regnamespace('pgsub')))
"""


def check_target(session: psycopg.Connection) -> list[Caution]:
    """Check the target as a whole: privileges of the role, settings, publications that include the ledger.

    :raises PermissionMissing: there is no ledger and the role may not create one.
    """
    warned = [*check_role(session, replica=target.is_replica(session)), *_settings(session)]
    warned += [*databases.check_encryption(session, "target"), *publishing_ledger(session)]
    installation.check(session)
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


def check_role(session: psycopg.Connection, *, replica: bool) -> Iterator[Caution]:
    """Yield privileges that the role lacks on the target.

    :param replica: whether it may set session_replication_role.
    """
    if not replica:
        yield Caution(
            "cannot set session_replication_role on the target",
            "Ordinary triggers and foreign keys fire for replicated rows, and no table is copied in chunks.",
            f"Run this on the target:\nGRANT SET ON PARAMETER session_replication_role TO {current_role(session)};",
            "session_replication_role",
        )
    if not origins.allowed(session):
        yield Caution(
            "cannot use replication origins on the target",
            "Subscribers of the target with origin = none receive what pgsub writes as if it were local.",
            f"Run this on the target:\n{origins.grant_hint(session)}",
            origins.FEATURE,
        )


def _settings(session: psycopg.Connection) -> Iterator[Caution]:
    """Yield settings that make the server's subscriber read text differently (docs/differences.md)."""
    setting = scalar(session, "SELECT reset_val FROM pg_catalog.pg_settings WHERE name = 'array_nulls'")
    if setting == "off":
        yield Caution(
            "array_nulls is off on the target",
            "pgsub reads arrays with it on, so that NULL elements of the publisher's arrays stay NULL. NULL in a text"
            " column that goes to an array column is read as NULL, too; the server's subscriber would read it as text.",
        )


def check_conflict_rules(session: psycopg.Connection, rules: Sequence[str]) -> None:
    """Check that the target records the origin and time of each row's last write, if a rule needs them.

    :raises StateForbids: the target does not record both.
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
            hint=f"Run this on the target:\n{origins.grant_hint(session)}",
            sqlstate="42501",
        )


def tables_of_rules(rules: Sequence[str], known: Collection[str]) -> list[Caution]:
    """Warn of rules for tables that the subscription does not have. A name may be mistyped.

    :param known: the subscription's tables as schema.table of the target.
    """
    return [
        Caution(
            f'conflict rules name table "{name}", which is not part of the subscription',
            "They hold from when it becomes part of it.",
        )
        for name in sorted(conflict_rules.tables(rules) - set(known))
    ]


def times_of_prepared(rules: Sequence[str], *, enabled: bool) -> list[Caution]:
    """Warn of rules that compare times, because a prepared transaction is applied before it has a commit time.

    :param enabled: whether two_phase is enabled, or will be.
    """
    asking = [rule for rule in rules if conflict_rules.parse(rule).resolution in conflict_rules.BY_TIME]
    if not enabled or not asking:
        return []
    return [
        Caution(
            f'conflict rule "{asking[0]}" compares the time of PREPARE for a prepared transaction',
            "Its changes are applied before it has a commit time. Two databases that subscribe to each other may decide"
            " differently, so that their rows stay different.",
        )
    ]


def check_two_phase(session: psycopg.Connection, source: publisher.Connection | None) -> list[Caution]:
    """Check that the target can prepare the publisher's prepared transactions.

    :param source: None to leave out the publisher.
    :raises StateForbids: the publisher is too old.
    """
    if source is not None:
        slots.check_two_phase(source)
    name = "max_prepared_transactions"
    here, there = server_limits.setting(session, name), 0 if source is None else server_limits.setting(source, name)
    hint = f"Set it on the target, and restart the target:\nALTER SYSTEM SET {name} = {max(there, 20)};"
    if here == 0:
        detail = f"Its {name} is 0. Apply stops at the first transaction that is prepared on the publisher."
        return [Caution("prepared transactions are disabled on the target", detail, hint)]
    if here < there:
        detail = f"It is {here}, the publisher's is {there}. While as many are prepared on the target, apply waits."
        return [Caution(f"{name} of the target is smaller than the publisher's", detail, hint)]
    return []


def prepared_at_failover(source: publisher.Connection) -> list[Caution]:
    """Warn of transactions that a publisher may lose in a failover if its slot is two-phase.

    A standby of 17 does not know since when the slot is two-phase (two_phase_at). The server warns of nothing. What was
    prepared before counts as sent there, so of its COMMIT PREPARED only the end is sent (ReorderBufferFinishPrepared).
    """
    if not slots.FAILOVER_VERSION <= source.info.server_version < slots.SYNCED_TWO_PHASE_VERSION:
        return []
    return [
        Caution(
            "a failover of the publisher may lose transactions that were prepared before two_phase is enabled",
            "A standby before PostgreSQL 18 does not know since when the slot is two-phase. Until those transactions"
            " have ended and are applied, the promoted standby would not send them.",
            "See which there are, on the publisher:\nSELECT gid, prepared FROM pg_prepared_xacts ORDER BY prepared;",
        )
    ]


def check_given_slot(slot: slots.SlotState, sub: Subscription, *, ready: bool) -> None:
    """Check that two_phase of an existing slot, which determines what is sent, fits the subscription.

    :param ready: whether there are tables and all of them are ``r`` from the start.
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

    :raises StateForbids: wal_level is too low, no slot is free, or the slot exists.
    :raises PermissionMissing: the role lacks REPLICATION.
    """
    prerequisites.check_wal_level(connection)
    prerequisites.check_replication_role(connection)
    if create_slot and sub.slot_name is not None:
        server_limits.check_new_slot(connection, sub.slot_name)
