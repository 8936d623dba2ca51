"""Checks every published table and its target: how it is copied, whether it fits, and missing privileges."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import psycopg

from pgsub.commands.preflight import adoption, catalog_facts, databases, privileges, server_limits, table_warnings
from pgsub.commands.preflight.compatibility import Actions, Pair, misfits, unidentified
from pgsub.commands.preflight.emptiness import are_empty
from pgsub.commands.preflight.findings import Caution, Preflight, Table
from pgsub.common import quoting
from pgsub.common.errors import TargetSchemaError
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher import publication
from pgsub.publisher.publication import PublishedTable
from pgsub.publisher.server_errors import translating
from pgsub.publisher.tables import Name, RemoteColumn, describe_tables
from pgsub.tablesync.copy import plan
from pgsub.tablesync.copy.preparation import types_here
from pgsub.tablesync.sequences.comparison import compare
from pgsub.target.catalog.relation import TargetRelation, describe_many
from pgsub.target.session import connect as target

_PASTED = 20  #: maximum number of tables in a command to paste


def missing_publications(connection: publisher.Connection, names: Sequence[str]) -> list[Caution]:
    """Warn, like the server, of publications that do not exist on the publisher."""
    absent = publication.missing_publications(connection, names)
    if not absent:
        return []
    return [Caution(publication.missing_warning(absent), publication.existing_said(connection), several_in_one(absent))]


def several_in_one(names: Sequence[str]) -> str | None:
    """Return a hint about a name that looks like a comma-separated list, None if there is none."""
    listed = next((name for name in names if "," in name), None)
    if listed is None:
        return None
    parts = [part.strip() for part in listed.split(",")]
    return f"An option names one publication: repeat it for {' and '.join(map(quoting.word, filter(None, parts)))}."


def check_tables(
    connection: publisher.Connection,
    session: psycopg.Connection,
    sub: Subscription,
    *,
    copy_data: bool,
    adopt: bool = False,
    known: Collection[Name] = (),
    named: Collection[str] | None = None,
) -> Preflight:
    """Check that every published table has a target, and that it can be copied and replicated.

    :param adopt: whether to compare existing rows.
    :param known: names of already subscribed tables, which are left out.
    :param named: publications whose absence is a warning, None for all of the subscription.
    :raises TargetSchemaError: tables are missing or cannot be replicated into. All are named.
    :raises StateForbids: a table cannot be adopted.
    """
    found = Preflight()
    names = sub.publications if named is None else tuple(named)
    found.warnings += missing_publications(connection, names)
    for name in [] if sub.sequences else publication.publishing_sequences(connection, names):
        found.warnings.append(
            Caution(
                f'publication "{name}" publishes sequences, which are not synchronized',
                "Tables are replicated; sequences on the target keep the values that they have there.",
                "With --sequences they follow the publisher. Or once, before the target takes writes of its own:\n"
                f"pgsub refresh {word(sub.name)} --sequences",
            )
        )
    published = [
        one for one in publication.published_tables(connection, sub.publications) if (one.schema, one.name) not in known
    ]
    if sub.sequences:
        found.warnings += _sequences(connection, session, sub, [(one.schema, one.name) for one in published])
    replica = target.is_replica(session)
    places = describe_many(session, [(one.schema, one.name) for one in published], replica=replica)
    all_there([(one.schema, one.name) for one in published], places)
    found.tables = _tables(connection, session, sub, published, places, replica=replica, copy_data=copy_data)
    if adopt:
        found.warnings += adoption.decide(connection, session, sub, found.tables)
    unowned = list(privileges.owners(found.tables, sub))
    checked = pairs(connection, session, sub, found.tables)
    found.warnings += fitting(connection, session, sub, checked)
    found.warnings += privileges.publisher(checked, connection.info.user)
    found.warnings += privileges.target(checked, session.info.user)
    found.warnings += unowned
    found.warnings += table_warnings.not_empty(found.tables, sub)
    found.warnings += table_warnings.foreign_partitions(found.tables) if copy_data else ()
    found.warnings += table_warnings.values_left_out([table.remote for table in found.tables], sub.on_conflict)
    if copy_data and sub.origin == "none":
        found.warnings += table_warnings.rows_of_other_origins(connection, sub, known)
    copied = [table for table in found.tables if table.mode != "none"]
    found.warnings += databases.check_encryption(connection, "publisher")
    found.warnings += server_limits.check_limits(connection, session, sub, copied)
    return found


def _sequences(
    connection: publisher.Connection, session: psycopg.Connection, sub: Subscription, tables: Sequence[Name]
) -> Iterator[Caution]:
    """Yield obstacles to synchronizing sequences: those of these tables, and published ones."""
    with translating(connection, "fetch sequence info from publisher"):
        named = {name: name for name in tables}
        found = compare(connection, session, named, sub.publications, run_as_owner=sub.run_as_owner)
    for one in found.obstacles:
        hint = "\n".join([f"Run this on the {one.side}:", *one.statements]) if one.statements else None
        yield Caution(one.message, "Its value on the target does not follow the publisher.", hint)


def all_there(names: Sequence[Name], places: Mapping[Name, TargetRelation]) -> None:
    """Check that tables of these names exist and can be written.

    :raises TargetSchemaError: all tables without a target.
    """
    missing, absent = [], [name for name in names if name not in places]
    for name in names:
        place = places.get(name)
        if place is None:
            missing.append(f'relation "{".".join(name)}" does not exist on the target')
        elif not place.replicable:
            missing.append(f'cannot use relation "{".".join(name)}" as logical replication target')
    if missing:
        raise TargetSchemaError(
            missing[0] if len(missing) == 1 else f"{len(missing)} published tables have no target",
            detail="\n".join(missing) if len(missing) > 1 else None,
            hint=_creating([] if len(absent) == len(names) else absent) if absent else "Put a table in its place.",
            sqlstate="42P01",
        )


def _creating(names: Sequence[Name]) -> str:
    """Return a hint on how to create tables on the target.

    :param names: empty for all tables of the publisher, as are too many names for one line.
    """
    chosen = [f"-t {word(quoting.name(*name))}" for name in names] if len(names) <= _PASTED else []
    options = ["--schema-only", "--no-owner", "--no-privileges", "--no-publications", "--no-subscriptions", *chosen]
    more = " With -t, pg_dump leaves out the schemas, types and functions that they need: create those before."
    return f"Create the tables on the target first, for example as below.{more if chosen else ''} " + quoting.dumping(
        " ".join(options)
    )


def _tables(
    connection: publisher.Connection,
    session: psycopg.Connection,
    sub: Subscription,
    published: Sequence[PublishedTable],
    places: dict[Name, TargetRelation],
    *,
    replica: bool,
    copy_data: bool,
) -> list[Table]:
    described = describe_tables(connection, [(one.schema, one.name) for one in published], sub.publications)
    for fault in described.faults.values():
        raise fault
    tables = [Table(remote, places[name]) for name, remote in described.tables.items()]
    if not copy_data:
        return tables
    for table, empty in zip(tables, are_empty(session, tables), strict=True):
        table.empty = empty
        table.reason = plan.atomic_reason(sub, table.remote, table.target, replica=replica)
        if table.reason is None and empty is False:
            table.reason = "the target table is not empty"
        table.mode = "chunked" if table.reason is None else "atomic"
        table.chunks = len(plan.chunk_ranges(sub, table.remote)) if table.reason is None else 1
    return tables


_ACTIONS = """
SELECT g.relid::bigint, bool_or(p.pubupdate), bool_or(p.pubdelete), bool_or(p.pubtruncate)
  FROM pg_catalog.pg_publication p CROSS JOIN LATERAL pg_catalog.pg_get_publication_tables(p.pubname::text) g
 WHERE p.pubname = ANY (%s::name[]) GROUP BY 1
"""


def pairs(
    connection: publisher.Connection, session: psycopg.Connection, sub: Subscription, tables: Sequence[Table]
) -> list[Pair]:
    """Read the facts about each table from the catalogs of both servers."""
    oids = {oid for table in tables for oid in (table.remote.oid, *(leaf.oid for leaf in table.remote.leaves))}
    with translating(connection, "read the catalogs of the publisher"):
        theirs = catalog_facts.read(connection, oids)
        rows = connection.execute(_ACTIONS, (list(sub.publications),)).fetchall() if tables else []
    actions = {oid: Actions(*published) for oid, *published in rows}
    acting = {table.target.oid: table.target.acts_as for table in tables}
    ours = catalog_facts.read(session, list(acting), acting)
    return [
        Pair(
            table,
            theirs[table.remote.oid],
            ours[table.target.oid],
            actions.get(table.remote.oid, Actions(True, True, True)),
            tuple(theirs[leaf.oid] for leaf in table.remote.leaves if leaf.oid in theirs),
        )
        for table in tables
        if table.remote.oid in theirs and table.target.oid in ours  # otherwise it was just dropped
    ]


def fitting(
    connection: publisher.Connection, session: psycopg.Connection, sub: Subscription, pairs: Sequence[Pair]
) -> Iterator[Caution]:
    """Yield the reasons why rows may not fit into their targets."""
    yield from databases.check_encoding(connection, session) if pairs else []
    with translating(connection, "read the types of the publisher"):
        source_types = catalog_facts.read_types(connection, [pair.source for pair in pairs])
    target_types = catalog_facts.read_types(session, [pair.target for pair in pairs])
    for pair in pairs:
        lacking = types_here(session, _lacking(pair.table))
        yield from misfits(pair, source_types, target_types, lacking, binary=sub.binary)
    yield from unidentified(pairs)
    yield from table_warnings.where_rows_go(session, [pair.table for pair in pairs])
    yield from table_warnings.rules_that_fire([pair.table for pair in pairs])


def _lacking(table: Table) -> list[RemoteColumn]:
    ours = {column.name for column in table.target.columns if not column.generated}
    return [column for column in table.remote.columns if column.name not in ours]
