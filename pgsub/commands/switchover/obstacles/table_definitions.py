"""Indexes, constraints, triggers and defaults of tables that are missing on the other side.

Definitions are compared as the servers return them. Names are ignored, except those of triggers. Locked tables are left
out, because reading a definition needs a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg

from pgsub.commands.preflight import catalog_facts
from pgsub.commands.switchover.obstacles.definition_statements import (
    Part,
    constraint,
    default,
    hint,
    index,
    policy,
    trigger,
)
from pgsub.commands.switchover.obstacles.obstacle import (
    BOTH,
    TAKING,
    WARNING,
    Obstacle,
    Sides,
    dotted,
    paste,
    rows,
    several,
)
from pgsub.common import quoting
from pgsub.common.query import NAMED, named
from pgsub.publisher.tables import Name

_VERSIONS_SINCE = 150000

# Partitions inherit from their roots.
_WANTED = f"""
WITH wanted AS MATERIALIZED (
     SELECT c.oid, w.nspname, w.relname
       FROM {NAMED}
      WHERE c.oid <> ALL (%(locked)s::oid[]))
"""
# The definition of a partitioned table's index contains ONLY, which would exclude partitions.
_INDEXES = f"""{_WANTED}
SELECT w.nspname, w.relname, i.relname::text, s.kind || d.body, d.body
  FROM wanted w JOIN pg_catalog.pg_index x ON x.indrelid = w.oid JOIN pg_catalog.pg_class i ON i.oid = x.indexrelid
 CROSS JOIN LATERAL (
       SELECT CASE WHEN x.indisunique THEN 'CREATE UNIQUE INDEX ' ELSE 'CREATE INDEX ' END,
              ' ON ' || pg_catalog.quote_ident(w.nspname) || '.' || pg_catalog.quote_ident(w.relname)
       ) AS s (kind, place)
 CROSS JOIN LATERAL (
       SELECT pg_catalog.substr(pg_catalog.pg_get_indexdef(i.oid), 1 + pg_catalog.length(
              s.kind || pg_catalog.quote_ident(i.relname) || s.place || CASE i.relkind WHEN 'I' THEN 'ONLY ' ELSE '' END
              ))) AS d (body)
 WHERE x.indisvalid AND NOT i.relispartition
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_constraint k WHERE k.conindid = i.oid AND k.contype IN ('p', 'u', 'x'))
 ORDER BY 1, 2, 3
"""
_CONSTRAINTS = f"""{_WANTED}
SELECT w.nspname, w.relname, k.conname::text, d.def, d.def
  FROM wanted w JOIN pg_catalog.pg_constraint k ON k.conrelid = w.oid
 CROSS JOIN LATERAL pg_catalog.pg_get_constraintdef(k.oid) AS d (def)
 WHERE k.contype IN ('p', 'u', 'x', 'c', 'f') AND k.conparentid = 0 AND k.coninhcount = 0
 ORDER BY 1, 2, position(k.contype::text IN 'pucxf'), 3
"""
_TRIGGERS = f"""{_WANTED}
SELECT w.nspname, w.relname, t.tgname::text, d.def, d.def
  FROM wanted w JOIN pg_catalog.pg_trigger t ON t.tgrelid = w.oid
 CROSS JOIN LATERAL pg_catalog.pg_get_triggerdef(t.oid) AS d (def)
 WHERE NOT t.tgisinternal AND t.tgparentid = 0
 ORDER BY 1, 2, 3
"""
_DEFAULTS = f"""{_WANTED}
SELECT w.nspname, w.relname, a.attname::text, a.attidentity::text || e.def, e.def
  FROM wanted w JOIN pg_catalog.pg_attribute a ON a.attrelid = w.oid AND NOT a.attisdropped AND a.attgenerated = ''
  LEFT JOIN pg_catalog.pg_attrdef f ON f.adrelid = a.attrelid AND f.adnum = a.attnum
 CROSS JOIN LATERAL (SELECT CASE a.attidentity WHEN 'a' THEN 'ALWAYS' WHEN 'd' THEN 'BY DEFAULT'
                     ELSE pg_catalog.pg_get_expr(f.adbin, f.adrelid) END) AS e (def)
 WHERE e.def IS NOT NULL AND a.attnum > 0
 ORDER BY 1, 2, a.attnum
"""
_DISABLED = f"""{_WANTED}
SELECT DISTINCT w.nspname, w.relname, CASE WHEN t.tgisinternal THEN NULL ELSE t.tgname::text END
  FROM wanted w JOIN pg_catalog.pg_trigger t ON t.tgrelid = w.oid WHERE t.tgenabled = 'D'
 ORDER BY 1, 2, 3 NULLS FIRST
"""
_SECURITY = f"""{_WANTED}
SELECT w.nspname, w.relname, c.relrowsecurity, c.relforcerowsecurity FROM wanted w
  JOIN pg_catalog.pg_class c ON c.oid = w.oid ORDER BY 1, 2
"""
_POLICIES = f"""{_WANTED}
SELECT w.nspname, w.relname, p.policyname::text, p::text, p.permissive, p.cmd, p.roles::text[], p.qual, p.with_check
  FROM wanted w JOIN pg_catalog.pg_policies p ON p.schemaname = w.nspname AND p.tablename = w.relname
 ORDER BY 1, 2, 3
"""
_COLLATIONS = """
SELECT DISTINCT n.nspname::text, l.collname::text
  FROM unnest(%(relids)s::oid[]) AS w (oid) JOIN pg_catalog.pg_attribute a ON a.attrelid = w.oid AND a.attnum > 0
  JOIN pg_catalog.pg_collation l ON l.oid = a.attcollation JOIN pg_catalog.pg_namespace n ON n.oid = l.collnamespace
 WHERE l.collversion <> pg_catalog.pg_collation_actual_version(l.oid)
 ORDER BY 1, 2
"""
_VERSION = """
SELECT datcollversion <> pg_catalog.pg_database_collation_actual_version(oid)
  FROM pg_catalog.pg_database WHERE datname = current_database()
"""
_LOCALE = """
SELECT pg_catalog.pg_encoding_to_char(encoding)::text, datcollate::text, datctype::text
  FROM pg_catalog.pg_database WHERE datname = current_database()
"""


def find(sides: Sides) -> Iterator[Obstacle]:
    """Yield the differences, one warning for each kind."""
    for query, nouns, write, detail in _KINDS:
        lacking = _lacking(sides, query)
        yield from several(
            [f"{dotted(one.table)}.{one.name}" for one in lacking],
            nouns,
            "{} of the publisher [is|are] missing on the target",
            detail,
            hint([(one.source, write(one)) for one in lacking]),
            server=TAKING,
        )
    yield from _disabled(sides)
    yield from _row_security(sides)
    yield from _collations(sides)
    yield from _locale(sides)


def _query(session: psycopg.Connection, query: str, names: list[Name]) -> list[tuple[Any, ...]]:
    return rows(session, query, {**named(names), "locked": list(catalog_facts.locked(session))})


def _lacking(sides: Sides, query: str) -> list[Part]:
    """Return parts of the giving side's tables that have no equal on the taking side."""
    here = {((row[0], row[1]), *_key(query, row)) for row in _query(sides.taking, query, list(sides.tables.values()))}
    found = []
    for row in _query(sides.giving, query, list(sides.tables)):
        source = str(row[0]), str(row[1])
        table = sides.tables[source]
        if (table, *_key(query, row)) not in here:
            found.append(Part(source, table, str(row[2]), str(row[3]), str(row[4])))
    return found


def _key(query: str, row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the key of a table's part, for a default with its column."""
    return (row[2], row[3]) if query is _DEFAULTS else (row[3],)


_KINDS: tuple[tuple[str, tuple[str, str], Callable[[Part], str | None], str], ...] = (
    (_INDEXES, ("index", "indexes"), index, "Queries may be slow after the switchover."),
    (_CONSTRAINTS, ("constraint", "constraints"), constraint, "Clients could write rows that the publisher refuses."),
    (_TRIGGERS, ("trigger", "triggers"), trigger, "What they do for clients would no longer be done."),
    (_DEFAULTS, ("default", "defaults"), default, "Clients' INSERTs may fail, or leave NULL."),
)


def _disabled(sides: Sides) -> Iterator[Obstacle]:
    """Yield triggers, including those of foreign keys, that are disabled only on the taking side."""
    there = {(sides.tables[row[0], row[1]], row[2]) for row in _query(sides.giving, _DISABLED, list(sides.tables))}
    found = [
        ((str(row[0]), str(row[1])), row[2])
        for row in _query(sides.taking, _DISABLED, list(sides.tables.values()))
        if ((row[0], row[1]), row[2]) not in there
    ]
    yield from several(
        list(dict.fromkeys(dotted(table) for table, _ in found)),
        ("table", "tables"),
        "triggers or foreign keys of {} are disabled on the target",
        "They would not fire for clients.",
        paste(
            TAKING,
            [
                f"ALTER TABLE {quoting.name(*table)} ENABLE TRIGGER"
                f" {'ALL' if trigger is None else quoting.name(str(trigger))};"
                for table, trigger in found
            ],
        ),
        server=TAKING,
    )


def _row_security(sides: Sides) -> Iterator[Obstacle]:
    here = {(row[0], row[1]): row[2:] for row in _query(sides.taking, _SECURITY, list(sides.tables.values()))}
    statements: list[tuple[Name, str | None]] = []
    concerned = []
    for schema, name, on, forced in _query(sides.giving, _SECURITY, list(sides.tables)):
        table = sides.tables[str(schema), str(name)]
        is_on, is_forced = here.get(table, (on, forced))
        words = [word for word, lacks in (("ENABLE", on and not is_on), ("FORCE", forced and not is_forced)) if lacks]
        statements += [(table, f"ALTER TABLE {quoting.name(*table)} {word} ROW LEVEL SECURITY;") for word in words]
        concerned += [dotted(table)] if words else []
    for row in _lacking_policies(sides):
        source = str(row[0]), str(row[1])
        table = sides.tables[source]
        statements.append((source, policy(table, row)))
        concerned.append(dotted(table))
    yield from several(
        list(dict.fromkeys(concerned)),
        ("table", "tables"),
        "row security of {} on the publisher is missing on the target",
        "Clients could see and write rows there that they must not.",
        hint(statements),
        server=TAKING,
    )


def _lacking_policies(sides: Sides) -> list[tuple[Any, ...]]:
    here = {row[:3] for row in _query(sides.taking, _POLICIES, list(sides.tables.values()))}
    there = _query(sides.giving, _POLICIES, list(sides.tables))
    return [row for row in there if (*sides.tables[str(row[0]), str(row[1])], row[2]) not in here]


def _collations(sides: Sides) -> Iterator[Obstacle]:
    names = [(s, n) for s, n in rows(sides.taking, _COLLATIONS, {"relids": list(sides.relids)})]
    statements = [f"ALTER COLLATION {quoting.name(*name)} REFRESH VERSION;" for name in names]
    shown = [dotted(name) for name in names]
    database = sides.taking.info.dbname
    if sides.taking.info.server_version >= _VERSIONS_SINCE and rows(sides.taking, _VERSION) == [(True,)]:
        statements.append(f"ALTER DATABASE {quoting.name(database)} REFRESH COLLATION VERSION;")
        shown.append(database)
    yield from several(
        shown,
        ("collation", "collations"),
        "the version of {} on the target is not that with which its objects were made",
        "Indexes there may be in another order than the operating system's collation.",
        paste(TAKING, [f"REINDEX DATABASE {quoting.name(database)};", *statements]),
        server=TAKING,
    )


def _locale(sides: Sides) -> Iterator[Obstacle]:
    there, here = rows(sides.giving, _LOCALE)[0], rows(sides.taking, _LOCALE)[0]
    names = ("encoding", "collation", "character classification")
    found = [
        f"{name} is {one} on the publisher, {other} on the target"
        for name, one, other in zip(names, there, here, strict=True)
        if one != other
    ]
    if found:
        yield Obstacle(
            BOTH,
            WARNING,
            "the databases differ in their locales",
            f"The {'; the '.join(found)}. Text may not fit, or be in another order.",
        )
