"""Checks the reverse subscription like ``create``: how it reads the taking side, and writes to the giving side.

All tables are checked, whatever the publication contains, which is checked elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import psycopg

from pgsub.commands.preflight import catalog_facts, databases, privileges, server_limits, servers
from pgsub.commands.preflight.findings import Table
from pgsub.commands.preflight.tables import all_there, fitting, pairs
from pgsub.commands.switchover.obstacles.obstacle import (
    BOTH,
    ERROR,
    GIVING,
    TAKING,
    WARNING,
    Obstacle,
    Sides,
    dotted,
    of_caution,
    of_error,
    paste,
    rows,
    several,
)
from pgsub.common import quoting
from pgsub.common.errors import PgsubError
from pgsub.common.query import scalar
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher import prerequisites
from pgsub.publisher.tables import Name, describe_tables
from pgsub.switchover import lost_side
from pgsub.target.catalog.relation import describe_many
from pgsub.target.ledger import subscriptions
from pgsub.target.ledger.schema import installation

_PARAMETER_PRIVILEGES_SINCE = 150000
_SYSTEM = """
SELECT c.system_identifier::text, d.oid::bigint, d.datname::text
  FROM pg_catalog.pg_control_system() c, pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()
"""


def way_back(sides: Sides) -> Subscription:
    """Return the reverse subscription, as far as the checks need it."""
    back = sides.back
    return replace(
        sides.sub,
        subid=0,
        name=back.name,
        connection=back.connection,
        publications=back.publications,
        slot_name=back.name,
        run_as_owner=back.run_as_owner,
        origin=back.origin,
        sequences=False,
    )


def reading(sides: Sides) -> Iterator[Obstacle]:
    """Yield obstacles to reading the taking side."""
    back = sides.back
    for replication in (False, True):
        try:
            opened = publisher.connect(back.connection, application_name=back.name, replication=replication)
        except PgsubError as error:
            yield of_error(error, TAKING)
            return
        with contextlib.closing(opened) as connection:
            if replication:
                return
            found = list(_source(sides, connection))
        yield from found
        if any(one.severity == ERROR for one in found):
            return


def _source(sides: Sides, connection: publisher.Connection) -> Iterator[Obstacle]:
    if not databases.same_database(connection, sides.taking):
        yield Obstacle(
            TAKING,
            ERROR,
            "the way back would read another database than the target",
            "What clients write on the target would not be sent.",
            "Let --back-connection name the database of the target.",
        )
        return
    checks: tuple[Callable[[publisher.Connection], None], ...] = (
        prerequisites.check_wal_level,
        prerequisites.check_replication_role,
        lambda asked: server_limits.check_new_slot(asked, sides.back.name),
    )
    for check in checks:
        try:
            check(connection)
        except PgsubError as error:
            yield of_error(error, TAKING)
    yield from (of_caution(one, TAKING) for one in server_limits.delays(connection))
    if scalar(connection, lost_side.MAY_READ) is not True:
        yield Obstacle(
            TAKING,
            WARNING,
            f'role "{connection.info.user}" may not read the journal of the switchover',
            "It must read it if one of the servers loses the switchover later, by a failover or a restore.",
            paste(TAKING, lost_side.grants(connection.info.user)),
        )


def writing(sides: Sides) -> Iterator[Obstacle]:
    """Yield obstacles to writing to the giving side, except those of tables."""
    if scalar(sides.giving, "SELECT pg_catalog.pg_is_in_recovery()"):
        yield Obstacle(
            GIVING,
            ERROR,
            "the publisher is a standby",
            "The way back cannot write to it, and its clients write elsewhere.",
            "Let --back-target name its primary.",
        )
        return
    yield from _same_database(sides)
    try:
        installation.check(sides.giving)
    except PgsubError as error:
        yield of_error(error, GIVING)
    cautions = [
        *servers.check_role(sides.giving, replica=_may_be_replica(sides.giving)),
        *server_limits.check_origins(sides.giving, 1),
        *servers.publishing_ledger(sides.giving),
    ]
    yield from (of_caution(one, GIVING) for one in cautions)


def _same_database(sides: Sides) -> Iterator[Obstacle]:
    known = subscriptions.identity(sides.taking, sides.sub.subid)
    try:
        found = rows(sides.giving, _SYSTEM)
    except psycopg.errors.InsufficientPrivilege:
        return  # the reverse subscription checks it again
    system, oid, name = found[0]
    if known.system_identifier not in (None, system) or known.publisher_dboid not in (None, oid):
        yield Obstacle(
            GIVING,
            ERROR,
            "the way back would write to another database than the publisher",
            f'It is "{name}" of the server with system identifier {system}; the subscription follows'
            f' "{known.publisher_dbname}" of {known.system_identifier}.',
            "Let --back-target name the database of the publisher.",
        )


def _may_be_replica(session: psycopg.Connection) -> bool:
    """Return whether the role could set session_replication_role in another session."""
    asked = "(SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user)"
    if session.info.server_version >= _PARAMETER_PRIVILEGES_SINCE:
        asked += " OR pg_catalog.has_parameter_privilege('session_replication_role', 'SET')"
    return scalar(session, f"SELECT {asked}") is True


def tables(sides: Sides) -> Iterator[Obstacle]:
    """Yield obstacles to writing the taking side's rows to the giving side."""
    back, names = way_back(sides), sorted(sides.tables.values())
    places = describe_many(sides.giving, names, replica=_may_be_replica(sides.giving))
    try:
        all_there(names, places)
    except PgsubError as error:
        yield of_error(error, GIVING)
    remote = describe_tables(sides.taking, names, None).tables
    found = [Table(remote[name], places[name]) for name in names if name in remote and name in places]
    usable = [one for one in found if one.target.replicable]
    unowned = list(privileges.owners(usable, back))  # also sets the role that writes
    both = pairs(sides.taking, sides.giving, replace(back, publications=()), usable)
    cautions = [*fitting(sides.taking, sides.giving, back, both), *privileges.target(both, sides.giving.info.user)]
    encodings = tuple(databases.check_encoding(sides.taking, sides.giving))
    for one in [*cautions, *unowned]:
        if "without a replica identity" not in one.message:
            yield of_caution(one, BOTH if one in encodings else GIVING)


def identities(sides: Sides) -> Iterator[Obstacle]:
    """Yield tables of the taking side whose UPDATE and DELETE will be refused after they are published.

    If the giving side's table has no replica identity, either, it is only a warning: clients do not need them.
    """
    here = _anonymous(sides.taking, sides.tables.values())
    alike = {sides.tables[name] for name in _anonymous(sides.giving, sides.tables)}
    for severity, roots in ((ERROR, here.keys() - alike), (WARNING, here.keys() & alike)):
        lacking = sorted(leaf for root in roots for leaf in here[root])
        statements = [f"ALTER TABLE {quoting.name(*name)} REPLICA IDENTITY FULL;" for name in lacking]
        yield from several(
            [dotted(name) for name in lacking],
            ("table", "tables"),
            "{} on the target [has|have] no replica identity",
            "UPDATE and DELETE of clients would fail there once the way back publishes them.",
            paste(TAKING, statements, "Give them primary keys, or use whole rows."),
            server=TAKING,
            severity=severity,
        )


def _anonymous(session: psycopg.Connection, names: Iterable[Name]) -> dict[Name, list[Name]]:
    """Return tables that have leaves without a replica identity, with these leaves."""
    described = describe_tables(session, sorted(names), None).tables
    facts = catalog_facts.read(session, {leaf.oid for one in described.values() for leaf in one.leaves})
    found: dict[Name, list[Name]] = {}
    for name, one in described.items():
        known = [leaf for leaf in one.leaves if leaf.oid in facts]
        lacking = [(leaf.schema, leaf.name) for leaf in known if not facts[leaf.oid].identified]
        if lacking:
            found[name] = lacking
    return found
