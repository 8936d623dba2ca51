"""Writers that no fence stops (jobs, superusers, prepared transactions), and missing rights to put up the fence."""

from __future__ import annotations

from collections.abc import Iterator

from pgsub.commands.switchover.obstacles.obstacle import (
    ERROR,
    GIVING,
    SPOKEN,
    TAKING,
    Obstacle,
    Sides,
    paste,
    rows,
    several,
)
from pgsub.common import quoting
from pgsub.common.query import scalar
from pgsub.common.quoting import word
from pgsub.switchover.fence import COMMAND, READ_ONLY

_PREPARED = "SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE database = current_database() ORDER BY prepared, gid"
_SUBSCRIPTIONS = """
SELECT s.subname::text FROM pg_catalog.pg_subscription s JOIN pg_catalog.pg_database d ON d.oid = s.subdbid
 WHERE d.datname = current_database() AND s.subenabled ORDER BY 1
"""
# A ledger that does not exist or that the role may not read is skipped. Disabled subscriptions are, too.
_MAY_READ = """
SELECT pg_catalog.bool_and(pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE')
                           AND pg_catalog.has_table_privilege(c.oid, 'SELECT')) IS TRUE
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = 'pgsub' AND c.relname IN ('subscription', 'definition')
HAVING count(*) = 2
"""
_OTHERS = """
SELECT s.subname FROM pgsub.subscription s LEFT JOIN pgsub.definition d USING (subid)
 WHERE s.subname <> %(back)s AND coalesce((d.options ->> 'enabled')::boolean, true) ORDER BY 1
"""
#: Extensions whose background workers run statements of users.
_JOBS = (
    "pg_cron",
    "pg_partman",
    "pg_timetable",
    "pgagent",
    "pg_task",
    "timescaledb",
    "pgmq",
    "pg_net",
    "pg_background",
)
_EXTENSIONS = "SELECT extname::text FROM pg_catalog.pg_extension WHERE extname = ANY (%(jobs)s::name[]) ORDER BY 1"
_OVERRIDES = """
SELECT r.rolname::text, s.setdatabase <> 0
  FROM pg_catalog.pg_db_role_setting s JOIN pg_catalog.pg_roles r ON r.oid = s.setrole
 CROSS JOIN pg_catalog.unnest(s.setconfig) AS c
 WHERE s.setdatabase IN (0, (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database()))
   AND c LIKE 'default\\_transaction\\_read\\_only=%%' AND NOT pg_catalog.split_part(c, '=', 2)::boolean
 ORDER BY 1, 2
"""
_SUPERUSERS = """
SELECT DISTINCT r.rolname::text FROM pg_catalog.pg_stat_activity a JOIN pg_catalog.pg_roles r ON r.oid = a.usesysid
 WHERE a.datname = current_database() AND r.rolsuper AND a.application_name !~ '^pgsub '
   AND coalesce(a.backend_type, 'client backend') = 'client backend' AND a.pid <> pg_catalog.pg_backend_pid()
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_stat_replication w WHERE w.pid = a.pid)
 ORDER BY 1
"""
# A walsender with a database can run statements. One that serves a standby has no database.
_WALSENDERS = """
SELECT DISTINCT w.usename::text FROM pg_catalog.pg_stat_replication w JOIN pg_catalog.pg_stat_activity a USING (pid)
 WHERE a.datname = current_database()
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_replication_slots s WHERE s.active_pid = w.pid AND s.slot_name = %(slot)s)
 ORDER BY 1
"""
_RIGHTS = """
SELECT r.rolsuper, r.rolsuper OR pg_catalog.pg_has_role(current_user, d.datdba, 'USAGE'),
       r.rolsuper OR pg_catalog.pg_has_role(current_user, 'pg_signal_backend', 'USAGE'),
       current_user::text, d.datname::text, o.rolname::text, o.rolsuper
  FROM pg_catalog.pg_roles r, pg_catalog.pg_database d JOIN pg_catalog.pg_roles o ON o.oid = d.datdba
 WHERE r.rolname = current_user AND d.datname = current_database()
"""
# Whether clients are prevented from writing on the target until the switchover.
_CLOSED = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_db_role_setting s JOIN pg_catalog.pg_database d ON d.oid = s.setdatabase
                CROSS JOIN pg_catalog.unnest(s.setconfig) AS c
                WHERE s.setrole = 0 AND d.datname = current_database()
                  AND c LIKE 'default\\_transaction\\_read\\_only=%')
"""


def find(sides: Sides) -> Iterator[Obstacle]:
    """Yield the obstacles."""
    yield from _prepared(sides)
    yield from _subscriptions(sides)
    yield from _jobs(sides)
    if sides.back.fence == READ_ONLY:
        yield from _overrides(sides, GIVING)
        yield from _overrides(sides, TAKING)
    yield from _rights(sides, GIVING)
    yield from _rights(sides, TAKING)
    yield from _superusers(sides)
    yield from _walsenders(sides)


def _prepared(sides: Sides) -> Iterator[Obstacle]:
    gids = [gid for (gid,) in rows(sides.giving, _PREPARED)]
    yield from several(
        gids,
        ("transaction", "transactions"),
        "{} [is|are] prepared on the publisher",
        "The pause lasts until it is decided.",
        paste(
            GIVING,
            [f"ROLLBACK PREPARED {quoting.literal(gid)};" for gid in gids],
            "Let its transaction manager decide, or give it up.",
        ),
        server=GIVING,
    )


def _subscriptions(sides: Sides) -> Iterator[Obstacle]:
    """Yield subscriptions that write to the giving side, which no fence stops."""
    written = "What they write there after the switchover would not reach the target."
    names = [name for (name,) in rows(sides.giving, _SUBSCRIPTIONS)]
    statements = [f"ALTER SUBSCRIPTION {quoting.name(name)} DISABLE;" for name in names]
    message = "{} [writes|write] to the publisher"
    nouns = ("subscription", "subscriptions")
    hint = paste(GIVING, statements)
    yield from several(names, nouns, message, written, hint, server=GIVING, severity=ERROR)
    if scalar(sides.giving, _MAY_READ):
        others = [name for (name,) in rows(sides.giving, _OTHERS, {"back": sides.back.name})]
        hint = "\n".join(["Run this where pgsub serves them:", *(f"pgsub disable {word(name)}" for name in others)])
        nouns = ("subscription of pgsub", "subscriptions of pgsub")
        yield from several(others, nouns, message, written, hint, server=GIVING, severity=ERROR)


def _jobs(sides: Sides) -> Iterator[Obstacle]:
    yield from several(
        [name for (name,) in rows(sides.giving, _EXTENSIONS, {"jobs": list(_JOBS)})],
        ("extension", "extensions"),
        "{} on the publisher may run jobs that write",
        "Background workers are not clients, and their sessions are not ended. Jobs are not replicated.",
        "Stop the jobs before the switchover, and create them on the target afterwards.",
        server=GIVING,
    )


def _overrides(sides: Sides, server: str) -> Iterator[Obstacle]:
    """Yield roles whose own setting overrides the database's."""
    session = sides.session(server)
    found = rows(session, _OVERRIDES, {})
    database = quoting.name(session.info.dbname)
    yield from several(
        sorted({name for name, _ in found}),
        ("role", "roles"),
        f"default_transaction_read_only is off for {{}} on the {SPOKEN[server]}",
        "Settings of a role go before those of the database: these clients would not be kept from writing.",
        paste(
            server,
            [
                f"ALTER ROLE {quoting.name(name)}{f' IN DATABASE {database}' if here else ''}"
                " RESET default_transaction_read_only;"
                for name, here in found
            ],
        ),
        server=server,
        severity=ERROR,
    )


def _rights(sides: Sides, server: str) -> Iterator[Obstacle]:
    """Yield rights that the role lacks to put up the fence, and to end sessions."""
    _, owns, signals, user, database, owner, high = rows(sides.session(server), _RIGHTS)[0]
    named, role = quoting.name(database), quoting.name(user)
    closed = server == TAKING and scalar(sides.taking, _CLOSED) is True
    if not owns and (closed or sides.back.fence != COMMAND):
        # Membership in a superuser's role would be more than is needed.
        grant = f"ALTER DATABASE {named} OWNER TO {role};" if high else f"GRANT {quoting.name(owner)} TO {role};"
        yield Obstacle(
            server,
            ERROR,
            f'role "{user}" must be owner of database "{database}" on the {SPOKEN[server]}',
            "Only the owner and superusers can keep clients from writing to it, and let them.",
            paste(server, [grant]),
        )
    if not signals:
        yield Obstacle(
            server,
            ERROR,
            f'role "{user}" may not end sessions on the {SPOKEN[server]}',
            "Clients keep the settings with which their sessions began.",
            paste(server, [f"GRANT pg_signal_backend TO {role};"]),
        )


def _superusers(sides: Sides) -> Iterator[Obstacle]:
    ours = rows(sides.giving, _RIGHTS)[0][0]
    may_end = "" if ours else " Only superusers can end their sessions."
    yield from several(
        [name for (name,) in rows(sides.giving, _SUPERUSERS)],
        ("superuser", "superusers"),
        "{} [has|have] sessions on the publisher",
        f"No fence but a command of your own keeps a superuser from writing for sure.{may_end}",
        "Let applications use roles that are not superusers, or see that they do not write meanwhile.",
        server=GIVING,
    )


def _walsenders(sides: Sides) -> Iterator[Obstacle]:
    """Yield roles with replication sessions, which no fence ends: the subscription needs one itself."""
    yield from several(
        [name for (name,) in rows(sides.giving, _WALSENDERS, {"slot": sides.sub.slot_name})],
        ("role", "roles"),
        "{} [has|have] sessions of replication on the publisher",
        "Such a session (replication=database) can run statements, too. It is not ended, and keeps the settings with"
        " which it began.",
        "See that nothing writes through them. One that begins behind the fence cannot write.",
        server=GIVING,
    )
