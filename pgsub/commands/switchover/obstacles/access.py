"""Roles, privileges, owners and settings that exist on the giving side and are missing on the taking side."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from pgsub.commands.switchover.obstacles.given_power import (
    SAID,
    harmless_settings,
    hint,
    is_harmless,
    powerful_roles,
    shown,
)
from pgsub.commands.switchover.obstacles.obstacle import TAKING, Obstacle, Sides, dotted, paste, rows, several
from pgsub.common import quoting
from pgsub.common.query import NAMED, named
from pgsub.tablesync.sequences.reading import of_tables

_MAINTAIN_SINCE = 170000
_KINDS = ("SCHEMA", "TABLE", "SEQUENCE")  #: in the order in which they are granted
#: Privileges that may become words of statements. A publisher may send anything, and newer servers know others.
_PRIVILEGES = frozenset(
    ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER", "MAINTAIN", "USAGE", "CREATE")
)

# Roles that own objects in the database, have privileges or sessions there, or can become such a role.
_ROLES = """
WITH used AS MATERIALIZED (
     SELECT d.refobjid AS oid
       FROM pg_catalog.pg_shdepend d JOIN pg_catalog.pg_database b ON b.datname = current_database()
      WHERE d.refclassid = 'pg_catalog.pg_authid'::regclass
        AND (d.dbid = b.oid OR (d.classid = 'pg_catalog.pg_database'::regclass AND d.objid = b.oid))
      UNION SELECT usesysid FROM pg_catalog.pg_stat_activity WHERE datname = current_database())
SELECT r.rolname::text, r.rolcanlogin FROM pg_catalog.pg_roles r
 WHERE r.rolname !~ '^pg_' AND (r.oid IN (SELECT oid FROM used)
    OR r.rolcanlogin AND NOT r.rolsuper AND EXISTS (
       SELECT FROM used u WHERE pg_catalog.pg_has_role(r.oid, u.oid, 'MEMBER')))
 ORDER BY 1
"""
_ALL_ROLES = "SELECT rolname::text, rolcanlogin FROM pg_catalog.pg_roles"
_MEMBERS = """
SELECT g.rolname::text, m.rolname::text FROM pg_catalog.pg_auth_members a
  JOIN pg_catalog.pg_roles g ON g.oid = a.roleid JOIN pg_catalog.pg_roles m ON m.oid = a.member
 ORDER BY 1, 2
"""
# PUBLIC has no name. An owner's own privileges are not grants.
_GRANTS = f"""
WITH wanted AS MATERIALIZED (
     SELECT DISTINCT c.oid, c.relkind, c.relacl, c.relowner, c.relnamespace, w.nspname, w.relname
       FROM {NAMED}),
acls AS (
     SELECT CASE relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END AS kind, nspname AS nsp, relname AS rel,
            NULL::text AS att, relowner AS owner, relacl AS acl FROM wanted
      UNION ALL
     SELECT 'TABLE', w.nspname, w.relname, a.attname::text, w.relowner, a.attacl
       FROM wanted w JOIN pg_catalog.pg_attribute a ON a.attrelid = w.oid AND a.attacl IS NOT NULL
        AND NOT a.attisdropped
      UNION ALL
     SELECT 'SCHEMA', NULL, n.nspname::text, NULL, n.nspowner, n.nspacl
       FROM pg_catalog.pg_namespace n WHERE n.oid IN (SELECT relnamespace FROM wanted))
SELECT a.kind, a.nsp, a.rel, a.att, x.privilege_type, r.rolname::text, x.is_grantable
  FROM acls a CROSS JOIN LATERAL pg_catalog.aclexplode(a.acl) x
  LEFT JOIN pg_catalog.pg_roles r ON r.oid = x.grantee
 WHERE x.grantee <> a.owner
"""
_OWNERS = f"""
SELECT w.nspname, w.relname, r.rolname::text
  FROM {NAMED}
  JOIN pg_catalog.pg_roles r ON r.oid = c.relowner
"""
# A role may have made a setting of its own in a database of another encoding: the server takes apart no such text.
_SETTINGS = """
SELECT r.rolname::text, c
  FROM pg_catalog.pg_db_role_setting s JOIN pg_catalog.pg_database d ON d.oid = s.setdatabase
 CROSS JOIN pg_catalog.unnest(s.setconfig) AS c LEFT JOIN pg_catalog.pg_roles r ON r.oid = s.setrole
 WHERE d.datname = current_database() AND NOT pg_catalog.starts_with(c, 'default_transaction_read_only=')
"""
#: Settings whose values are lists of names (GUC_LIST_QUOTE).
_LISTS = ("search_path", "temp_tablespaces", "local_preload_libraries", "session_preload_libraries")
_ITEMS = re.compile(r'"((?:[^"]|"")*)"|([^,\s]+)')

#: Kind, name, column, privilege, role (None for PUBLIC), and whether it has the grant option.
Grant = tuple[str, tuple[str, ...], str | None, str, str | None, bool]


def find(sides: Sides) -> Iterator[Obstacle]:
    """Yield the differences, one warning for each kind."""
    yield from _roles(sides)
    yield from _grants(sides)
    yield from _owners(sides)
    yield from _settings(sides)


def _roles(sides: Sides) -> Iterator[Obstacle]:
    used = dict(rows(sides.giving, _ROLES))
    here = dict(rows(sides.taking, _ALL_ROLES))
    powerful = powerful_roles(sides)
    missing = [name for name in used if name not in here]
    yield from several(
        missing,
        ("role", "roles"),
        "{} of the publisher [is|are] missing on the target",
        "Passwords are not replicated either.",
        paste(TAKING, [f"CREATE ROLE {quoting.name(name)}{' LOGIN' if used[name] else ''};" for name in missing], SAID),
        server=TAKING,
    )
    closed = [name for name in used if used[name] and here.get(name) is False]
    yield from several(
        closed,
        ("role", "roles"),
        "{} cannot log in on the target",
        "",
        shown([(f"ALTER ROLE {quoting.name(name)} LOGIN;", name) for name in closed], powerful),
        server=TAKING,
    )
    there = {pair for pair in rows(sides.giving, _MEMBERS) if pair[1] in used}
    lacking = sorted(there - set(rows(sides.taking, _MEMBERS)))
    yield from several(
        sorted({member for _, member in lacking}),
        ("role", "roles"),
        "{} [is|are] no member of the same roles on the target",
        "",
        shown([(f"GRANT {quoting.name(one)} TO {quoting.name(member)};", one) for one, member in lacking], powerful),
        server=TAKING,
    )


def _grants(sides: Sides) -> Iterator[Obstacle]:
    names = {**sides.tables, **{name: name for name in of_tables(sides.giving, sides.tables)}}  # and their sequences
    found = rows(sides.taking, _OWNERS, named(names.values()))
    owners: dict[tuple[str, ...], str] = {(schema, name): owner for schema, name, owner in found}
    here = {_grant(row) for row in rows(sides.taking, _GRANTS, named(names.values()))}
    lacking = []
    for row in rows(sides.giving, _GRANTS, named(names)):
        kind, place, column, privilege, role, grantable = _grant(row)
        moved = place if len(place) == 1 else names.get((place[0], place[1]), place)
        old = privilege == "MAINTAIN" and sides.taking.info.server_version < _MAINTAIN_SINCE
        unknown = old or kind not in _KINDS or privilege not in _PRIVILEGES
        one = (kind, moved, column, privilege, role, grantable)
        owned = role is not None and owners.get(moved) == role
        if not (one in here or (*one[:5], True) in here or unknown or owned):
            lacking.append(one)
    yield from several(
        sorted({".".join(one[1]) for one in lacking}),
        ("relation or schema", "relations and schemas"),
        "privileges on {} were granted on the publisher, but not on the target",
        "Applications may lack them after the switchover.",
        paste(TAKING, _statements(lacking), SAID),
        server=TAKING,
    )


def _grant(row: Sequence[str | bool | None]) -> Grant:
    kind, schema, name, column, privilege, role, grantable = row
    place = (str(name),) if schema is None else (str(schema), str(name))
    return str(kind), place, _text(column), str(privilege), _text(role), grantable is True


def _text(value: str | bool | None) -> str | None:
    return None if value is None else str(value)


def _statements(lacking: Sequence[Grant]) -> list[str]:
    """Return GRANT statements, one for each combination of role and privileges."""
    privileges: dict[tuple[str, tuple[str, ...], str | None, bool], list[str]] = {}
    for kind, place, column, privilege, role, grantable in sorted(lacking, key=str):
        word = privilege if column is None else f"{privilege} ({quoting.name(column)})"
        privileges.setdefault((kind, place, role, grantable), []).append(word)
    objects: dict[tuple[str, str, str | None, bool], list[str]] = {}
    for (kind, place, role, grantable), words in privileges.items():
        objects.setdefault((kind, ", ".join(words), role, grantable), []).append(quoting.name(*place))
    return [
        f"GRANT {words} ON {kind} {', '.join(names)} TO {'PUBLIC' if role is None else quoting.name(role)}"
        f"{' WITH GRANT OPTION' if grantable else ''};"
        for (kind, words, role, grantable), names in sorted(objects.items(), key=lambda item: _KINDS.index(item[0][0]))
    ]


def _owners(sides: Sides) -> Iterator[Obstacle]:
    there = {(schema, name): owner for schema, name, owner in rows(sides.giving, _OWNERS, named(sides.tables))}
    here = {(s, n): owner for s, n, owner in rows(sides.taking, _OWNERS, named(sides.tables.values()))}
    moved = {sides.tables[name]: owner for name, owner in there.items()}
    other = sorted(name for name, owner in moved.items() if here.get(name, owner) != owner)
    yield from several(
        [dotted(name) for name in other],
        ("table", "tables"),
        "{} [has|have] another owner on the target",
        "",
        shown(
            [
                (f"ALTER TABLE {quoting.name(*name)} OWNER TO {quoting.name(moved[name])};", moved[name])
                for name in other
            ],
            powerful_roles(sides),
        ),
        server=TAKING,
    )


def _settings(sides: Sides) -> Iterator[Obstacle]:
    here = _values(rows(sides.taking, _SETTINGS, {}))
    there = _values(rows(sides.giving, _SETTINGS, {}))
    differing = [key for key, value in there.items() if here.get(key) != value]
    database = quoting.name(sides.taking.info.dbname)
    harmless, powerful = harmless_settings(sides), powerful_roles(sides)
    # guard: no statement to paste alters a role that has power over the server, without "role in powerful or "
    left = [(role, name) for role, name in differing if role in powerful or not is_harmless(name, harmless)]
    statements = [
        ("ALTER DATABASE " + database if role is None else f"ALTER ROLE {quoting.name(role)} IN DATABASE {database}")
        + f" SET {_setting(name)} TO {_value(name, there[role, name])};"
        for role, name in differing
        if (role, name) not in left
    ]
    yield from several(
        sorted({name for _, name in differing}),
        ("setting", "settings"),
        "{} of the database [is|are] not the same on the target",
        "",
        hint(statements, [_setting(name) for _, name in left]),
        server=TAKING,
    )


def _values(found: Sequence[tuple[str | None, str]]) -> Mapping[tuple[str | None, str], str]:
    parts = [(role, *text.partition("=")) for role, text in sorted(found, key=lambda one: (one[0] or "", one[1]))]
    return {(role, name): value for role, name, _, value in parts}


def _setting(name: str) -> str:
    return quoting.name(*name.split("."))


def _value(name: str, value: str) -> str:
    if name not in _LISTS:
        return quoting.literal(value)
    items = [quoted.replace('""', '"') or plain for quoted, plain in _ITEMS.findall(value)]
    return ", ".join(map(quoting.literal, items)) or "''"
