"""What is looked at on both servers before anything is created. Mirrors the checks of CreateSubscription and more.

What the server refuses is refused here; what it only meets later (a missing column) is a warning, or an error with
``--strict``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import psycopg

from pgsub.errors import StateForbids, TargetSchemaError
from pgsub.publisher import connect as publisher
from pgsub.publisher import prerequisites, publication, slots, tables
from pgsub.publisher.tables import RemoteTable
from pgsub.subscription import Subscription
from pgsub.tablesync import plan
from pgsub.target import connect as target
from pgsub.target import ledger_schema, origins, statements
from pgsub.target.relation import TargetRelation, column_faults, describe

_POOLER_HINT = "Give the address and port of the server itself."


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning with its remedy; ``unavailable`` names what works less well for as long as the subscription lives."""

    message: str
    detail: str | None = None
    hint: str | None = None
    unavailable: str | None = None


@dataclass(slots=True)
class Table:
    """A published table and where its rows go."""

    remote: RemoteTable
    target: TargetRelation
    copy: str = ""  #: how it will be copied, for the plan


@dataclass(slots=True)
class Preflight:
    """What was found."""

    tables: list[Table] = field(default_factory=list)
    warnings: list[Warned] = field(default_factory=list)


def check_target(session: psycopg.Connection) -> list[Warned]:
    """The target as a whole: no pooler, what its role may do, publications that would publish the ledger.

    :raises StateForbids: a pooler answers.
    :raises PermissionMissing: no ledger, and none may be made.
    """
    if target.through_pooler(session):
        raise StateForbids(
            "the target's connection goes through a connection pooler",
            detail="pgsub needs sessions of its own: locks and settings live as long as they do.",
            hint=_POOLER_HINT,
        )
    warned = _privileges(session)
    names = session.execute("SELECT pubname FROM pg_catalog.pg_publication WHERE puballtables").fetchall()
    for (name,) in names:
        warned.append(
            Warned(
                f'publication "{name}" on the target publishes all tables, schema pgsub included',
                "A subscriber of it would receive the rows of pgsub's ledger.",
                "Publish schemas by name instead: CREATE PUBLICATION … FOR TABLES IN SCHEMA …",
            )
        )
    ledger_schema.check(session)
    return warned


def _privileges(session: psycopg.Connection) -> list[Warned]:
    row = session.execute("SELECT pg_catalog.quote_ident(current_user)").fetchone()
    role = row[0] if row else ""
    warned = []
    if not target.is_replica(session):
        warned.append(
            Warned(
                "cannot set session_replication_role on the target",
                "Ordinary triggers and foreign keys fire for replicated rows, and no table is copied in chunks.",
                f"GRANT SET ON PARAMETER session_replication_role TO {role};",
                "session_replication_role",
            )
        )
    if not origins.allowed(session):
        warned.append(
            Warned(
                "cannot use replication origins on the target",
                "Subscribers of the target with origin = none receive what pgsub writes as if it were local.",
                origins.grant_hint(role),
                "replication origins",
            )
        )
    return warned


def check_publisher(connection: publisher.Connection, sub: Subscription, *, create_slot: bool) -> None:
    """The publisher as a whole.

    :raises StateForbids: wal_level, a pooler, no free slot, the slot exists.
    :raises PermissionMissing: no REPLICATION.
    """
    if publisher.through_pooler(connection):
        raise StateForbids(
            "the publisher's connection goes through a connection pooler",
            detail="Logical replication needs a session of its own.",
            hint=_POOLER_HINT,
        )
    prerequisites.check_wal_level(connection)
    prerequisites.check_replication_role(connection)
    if not create_slot or sub.slot_name is None:
        return
    if slots.slot_state(connection, sub.slot_name) is not None:
        raise StateForbids(
            f'could not create replication slot "{sub.slot_name}": replication slot "{sub.slot_name}" already exists',
            hint=f"Use another slot (--slot-name), or the existing one (--no-create-slot), or drop it:\n"
            f"SELECT pg_drop_replication_slot('{sub.slot_name}');",
            sqlstate="42710",
        )
    free = slots.free_slots(connection)
    if free.used >= free.max:
        raise StateForbids(
            "all replication slots of the publisher are in use",
            detail=f"max_replication_slots is {free.max}; the subscription needs one, and one more for each table"
            " that synchronizes.",
            hint="Drop slots that nobody needs, or raise the setting and restart the publisher:\n"
            "ALTER SYSTEM SET max_replication_slots = 20;",
            sqlstate="53400",
        )
    if free.free_walsenders < 1:
        raise StateForbids(
            "all walsenders of the publisher are in use",
            hint="Raise the setting and restart the publisher:\nALTER SYSTEM SET max_wal_senders = 20;",
            sqlstate="53300",
        )


def check_tables(
    connection: publisher.Connection,
    session: psycopg.Connection,
    sub: Subscription,
    *,
    copy_data: bool,
    known: Collection[tuple[str, str]] = (),
) -> Preflight:
    """Every published table has a place on the target.

    :param known: schema and name of tables that are subscribed already; they are left out.
    :raises TargetSchemaError: a table is missing or cannot be replicated into; all of them are named.
    """
    found = Preflight()
    absent = publication.missing_publications(connection, sub.publications)
    if absent:
        found.warnings.append(Warned(publication.missing_warning(absent)))
    replica = target.is_replica(session)
    missing: list[str] = []
    for published in publication.published_tables(connection, sub.publications):
        if (published.schema, published.name) in known:
            continue
        relation = describe(session, published.schema, published.name, replica=replica)
        if relation is None:
            missing.append(f'relation "{published.schema}.{published.name}" does not exist on the target')
        elif relation.relkind not in ("r", "p"):
            missing.append(f'cannot use relation "{published.schema}.{published.name}" as logical replication target')
        else:
            remote = tables.describe_table(connection, published.schema, published.name, sub.publications)
            found.tables.append(_table(session, sub, remote, relation, replica, copy_data))
            found.warnings += _table_warnings(remote, relation)
    if missing:
        raise TargetSchemaError(
            missing[0] if len(missing) == 1 else f"{len(missing)} published tables have no target",
            detail="\n".join(missing) if len(missing) > 1 else None,
            hint="Create the tables on the target first, for example:\n"
            "pg_dump --schema-only --no-publications --no-subscriptions PUBLISHER | psql TARGET",
            sqlstate="42P01",
        )
    if copy_data and sub.origin == "none":
        found.warnings += _foreign_rows(connection, sub, known)
    return found


def _table(
    session: psycopg.Connection,
    sub: Subscription,
    remote: RemoteTable,
    relation: TargetRelation,
    replica: bool,
    copy_data: bool,
) -> Table:
    if not copy_data:
        return Table(remote, relation, "not copied")
    reason = plan.atomic_reason(sub, remote, relation, replica=replica)
    if reason is None and not _empty(session, relation):
        reason = "the target table is not empty"
    return Table(remote, relation, "copied in chunks" if reason is None else f"copied in one transaction: {reason}")


def _empty(session: psycopg.Connection, relation: TargetRelation) -> bool:
    query = psycopg.sql.SQL("SELECT FROM {} LIMIT 1").format(statements.table_name(relation))
    try:
        return session.execute(query).fetchone() is None
    except psycopg.errors.InsufficientPrivilege:
        return False


def _table_warnings(remote: RemoteTable, relation: TargetRelation) -> list[Warned]:
    names = [c.name for c in remote.columns]
    hint = "Replication of this table stops at its first change until the target table fits."
    return [Warned(fault, hint=hint) for fault in column_faults(names, relation)]


def _foreign_rows(
    connection: publisher.Connection, sub: Subscription, known: Collection[tuple[str, str]]
) -> list[Warned]:
    others = publication.tables_with_other_origins(connection, sub.publications, known)
    if not others:
        return []
    listed = ", ".join(sorted({f'"{o.schema}.{o.name}"' for o in others}))
    return [
        Warned(
            f'subscription "{sub.name}" requested copy_data with origin = NONE but might copy data that had a different'
            " origin",
            f"The publisher subscribes to other publishers for: {listed}.",
            "Verify that initial data copied from the publisher tables did not come from other origins.",
        )
    ]


def enforce(warnings: Sequence[Warned]) -> None:
    """``--strict``: what would be warned about is refused.

    :raises PgsubError: the first warning, with all of them in the detail.
    """
    if warnings:
        first, *more = warnings
        raise TargetSchemaError(
            first.message,
            detail="\n".join([first.detail or "", *(f"Also: {w.message}." for w in more)]).strip() or None,
            hint=first.hint or "Without --strict this is a warning.",
        )
