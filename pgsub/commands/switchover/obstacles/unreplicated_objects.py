"""Objects of the giving side that are never replicated: tables, large objects, extensions, materialized views."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pgsub.commands.switchover.obstacles.obstacle import (
    GIVING,
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
from pgsub.common.query import NAMED, named, scalar
from pgsub.common.quoting import word
from pgsub.publisher.tables import Name

# Users' relations except extensions' and temporary ones. Roots stand for their partitions.
_RELATIONS = f"""
WITH subscribed AS MATERIALIZED (
     SELECT c.oid FROM {NAMED}),
covered AS MATERIALIZED (
     SELECT oid FROM subscribed
      UNION SELECT a.relid::oid FROM subscribed s, LATERAL pg_catalog.pg_partition_ancestors(s.oid) a
      UNION SELECT t.relid::oid FROM subscribed s, LATERAL pg_catalog.pg_partition_tree(s.oid) t)
SELECT n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p', 'm', 'f') AND c.relpersistence <> 't' AND c.oid >= 16384
   AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pgsub') AND n.nspname !~ '^pg_(toast|temp)'
   AND NOT (c.relispartition AND c.relkind = 'p') AND c.oid NOT IN (SELECT oid FROM covered)
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d WHERE d.classid = 'pg_catalog.pg_class'::regclass
                      AND d.objid = c.oid AND d.deptype = 'e')
 ORDER BY 1, 2
"""
_MATERIALIZED = """
SELECT n.nspname::text, c.relname::text FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'm'
"""
_EXTENSIONS = "SELECT extname::text, extversion FROM pg_catalog.pg_extension"
_ALL_TABLES = """
SELECT pubname::text, puballtables FROM pg_catalog.pg_publication WHERE pubname = ANY (%(names)s::name[])
"""
_SLOTS = """
SELECT slot_name::text FROM pg_catalog.pg_replication_slots
 WHERE database = current_database() AND NOT temporary AND slot_name <> coalesce(%(slot)s, '')
   AND slot_name !~ %(own)s
 ORDER BY 1
"""


def find(sides: Sides) -> Iterator[Obstacle]:
    """Yield the objects, one warning for each kind."""
    found = rows(sides.giving, _RELATIONS, named(sides.tables))
    kinds: dict[str, list[Name]] = {}
    for schema, name, kind, persistence in found:
        what = "unlogged" if persistence == "u" and kind != "m" else {"p": "r"}.get(kind, kind)
        kinds.setdefault(what, []).append((schema, name))
    yield from _tables(sides, kinds.get("r", []))
    yield from _unlogged(kinds.get("unlogged", []))
    yield from _materialized(sides, kinds.get("m", []))
    yield from several(
        [dotted(name) for name in kinds.get("f", [])],
        ("foreign table", "foreign tables"),
        "{} on the publisher [is|are] not replicated",
        "The rows are on another server. The target needs foreign tables, servers and user mappings of its own.",
        server=GIVING,
    )
    yield from _large_objects(sides)
    own = {"slot": sides.sub.slot_name, "own": f"^pgsub_{sides.sub.subid}_"}
    yield from several(
        [name for (name,) in rows(sides.giving, _SLOTS, own)],
        ("replication slot", "replication slots"),
        "{} of the publisher [serves|serve] others",
        "Its consumers would receive nothing of what clients write on the target.",
        "Create slots for them on the target before clients write there.",
        server=GIVING,
    )
    yield from _extensions(sides)


def _tables(sides: Sides, names: list[Name]) -> Iterator[Obstacle]:
    refresh = f"pgsub refresh {word(sides.sub.name)}"
    publications = dict(rows(sides.giving, _ALL_TABLES, {"names": list(sides.sub.publications)}))
    listed = ", ".join(quoting.name(*name) for name in names)
    some = [name for name, every in publications.items() if not every]
    add = "" if not some else f"ALTER PUBLICATION {quoting.name(some[0])} ADD TABLE {listed};\n"
    yield from several(
        [dotted(name) for name in names],
        ("table", "tables"),
        "{} of the publisher [is|are] not subscribed",
        "The rows stay behind, and what clients write there on the target has no way back.",
        f"Create them on the target, publish them, and subscribe to them:\n{add}{refresh}",
        server=GIVING,
    )


def _unlogged(names: list[Name]) -> Iterator[Obstacle]:
    yield from several(
        [dotted(name) for name in names],
        ("unlogged table", "unlogged tables"),
        "{} of the publisher cannot be replicated",
        "The rows stay behind.",
        paste(
            GIVING,
            [f"ALTER TABLE {quoting.name(*name)} SET LOGGED;" for name in names],
            "Fill them on the target by other means, or log them and publish them.",
        ),
        server=GIVING,
    )


def _materialized(sides: Sides, names: list[Name]) -> Iterator[Obstacle]:
    there = {(schema, name) for schema, name in rows(sides.taking, _MATERIALIZED)}
    nouns = ("materialized view", "materialized views")
    yield from several(
        [dotted(name) for name in names if name not in there],
        nouns,
        "{} of the publisher [does|do] not exist on the target",
        server=TAKING,
    )
    present = [name for name in names if name in there]
    yield from several(
        [dotted(name) for name in present],
        nouns,
        "{} on the target [is|are] as of the last refresh there",
        "What a materialized view holds is not replicated.",
        paste(
            TAKING,
            [f"REFRESH MATERIALIZED VIEW {quoting.name(*name)};" for name in present],
            "Refresh them shortly before the switchover, and afterwards.",
        ),
        server=TAKING,
    )


def _large_objects(sides: Sides) -> Iterator[Obstacle]:
    count = scalar(sides.giving, "SELECT count(*) FROM pg_catalog.pg_largeobject_metadata")
    if count:
        yield Obstacle(
            GIVING,
            WARNING,
            f"the publisher has {count} large object{'' if count == 1 else 's'}, which are not replicated",
            None,
            "Keep them in columns of type bytea, or copy them while nobody writes. "
            + quoting.dumping("--large-objects --section=data --exclude-table-data='*'"),
        )


def _extensions(sides: Sides) -> Iterator[Obstacle]:
    there, here = dict(rows(sides.giving, _EXTENSIONS)), dict(rows(sides.taking, _EXTENSIONS))
    missing = sorted(there.keys() - here.keys())
    yield from several(
        missing,
        ("extension", "extensions"),
        "{} of the publisher [is|are] missing on the target",
        "",
        paste(TAKING, [f"CREATE EXTENSION {quoting.name(name)};" for name in missing]),
        server=TAKING,
    )
    older = sorted(name for name in there.keys() & here.keys() if _numbers(here[name]) < _numbers(there[name]))
    yield from several(
        older,
        ("extension", "extensions"),
        "{} on the target [is|are] older than on the publisher",
        "Applications may use what only the newer version has.",
        paste(
            TAKING,
            [f"ALTER EXTENSION {quoting.name(name)} UPDATE TO {quoting.literal(there[name])};" for name in older],
            "Its programs must be there in that version.",
        ),
        server=TAKING,
    )


def _numbers(version: str) -> list[Any]:
    return [int(part) for part in version.replace("-", ".").split(".") if part.isdigit()]
