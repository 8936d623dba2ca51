"""Checks that the ending subscription's publications include all rows, columns and operations of every table.

Clients would miss what the target lacks, and the reverse subscription would overwrite it on the publisher.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pgsub.commands.switchover.obstacles.obstacle import (
    ERROR,
    GIVING,
    PUBLISH,
    TAKING,
    WARNING,
    Obstacle,
    Sides,
    dotted,
    of_error,
    paste,
    rows,
    several,
)
from pgsub.common import quoting
from pgsub.common.errors import StateForbids
from pgsub.common.query import named
from pgsub.common.quoting import word
from pgsub.protocol.messages import Column, TypeName
from pgsub.publisher import publication
from pgsub.publisher.tables import Name
from pgsub.target.catalog import ddl_hints

#: First version with row filters and column lists.
LISTS_SINCE = 150000
# Several publications of a table are combined.
_PUBLISHED = """
SELECT t.schemaname::text, t.tablename::text, bool_and({filtered}),
       NOT (bool_or(p.pubinsert) AND bool_or(p.pubupdate) AND bool_or(p.pubdelete) AND bool_or(p.pubtruncate))
  FROM pg_catalog.pg_publication_tables t JOIN pg_catalog.pg_publication p USING (pubname)
 WHERE t.pubname = ANY (%(publications)s::name[]) GROUP BY 1, 2 ORDER BY 1, 2
"""
# Generated columns are computed on the target, or published on request.
_LEFT_OUT = """
WITH published AS MATERIALIZED (
     SELECT t.schemaname, t.tablename, unnest(t.attnames) AS attname
       FROM pg_catalog.pg_publication_tables t WHERE t.pubname = ANY (%(publications)s::name[]))
SELECT n.nspname::text, c.relname::text, a.attname::text
  FROM (SELECT DISTINCT schemaname, tablename FROM published) AS t
  JOIN pg_catalog.pg_namespace n ON n.nspname = t.schemaname
  JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
  JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid
 WHERE a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
   AND NOT EXISTS (SELECT FROM published p WHERE p.schemaname = n.nspname AND p.tablename = c.relname
                      AND p.attname = a.attname)
 ORDER BY 1, 2, a.attnum
"""
#: Tables of the publications %(publications)s with a row filter or a column list; whether to name them with ONLY.
RESTRICTED = """
SELECT p.pubname::text, n.nspname::text, c.relname::text,
       c.relkind = 'r' AND EXISTS (SELECT FROM pg_catalog.pg_inherits i WHERE i.inhparent = c.oid)
  FROM pg_catalog.pg_publication p JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid
  JOIN pg_catalog.pg_class c ON c.oid = r.prrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE p.pubname = ANY (%(publications)s::name[]) AND (r.prqual IS NOT NULL OR r.prattrs IS NOT NULL)
 ORDER BY 1, 2, 3
"""
_INCOMPLETE = """
SELECT pubname::text FROM pg_catalog.pg_publication
 WHERE pubname = ANY (%(publications)s::name[]) AND NOT (pubinsert AND pubupdate AND pubdelete AND pubtruncate)
 ORDER BY 1
"""
_COLUMNS = """
SELECT n.nspname::text, c.relname::text, a.attname::text, a.attgenerated <> '', a.atttypid::bigint, a.atttypmod,
       tn.nspname::text, y.typname::text
  FROM ROWS FROM (unnest(%(schemas)s::text[]), unnest(%(names)s::text[])) AS w (nspname, relname)
  JOIN pg_catalog.pg_namespace n USING (nspname)
  JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = w.relname
  JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
  JOIN pg_catalog.pg_type y ON y.oid = a.atttypid JOIN pg_catalog.pg_namespace tn ON tn.oid = y.typnamespace
 ORDER BY 1, 2, a.attnum
"""


class _Column(NamedTuple):
    """A column on one server, with its type."""

    name: str
    generated: bool
    sent: Column
    type: TypeName


def find(sides: Sides) -> Iterator[Obstacle]:
    """Yield parts of the subscribed tables that are not replicated to the target."""
    yield from _unpublished(sides)
    yield from _incomplete(sides)
    yield from _columns(sides)


def _unpublished(sides: Sides) -> Iterator[Obstacle]:
    """Yield subscribed tables of which no changes are sent any more."""
    publications = sides.sub.publications
    try:
        published = {one[:2] for one in publication.published_tables(sides.giving, publications)}
    except StateForbids as error:
        yield of_error(error, GIVING)
        return
    names = sorted(sides.tables.keys() - published)
    to = quoting.name(next(iter(publications), ""))
    statements = [f"ALTER PUBLICATION {to} ADD TABLE {quoting.name(*name)};" for name in names]
    # guard: a table that the publisher does not publish any more is not left behind
    yield from _tables(
        names,
        "the publisher does not publish {} any more",
        "What clients have changed since is not on the target, and the way back would overwrite it.",
        f"{paste(GIVING, statements)}\n{_again(sides, names)}\n"
        f"Or remove what is not published from the subscription:\npgsub refresh {word(sides.sub.name)}",
    )


def _incomplete(sides: Sides) -> Iterator[Obstacle]:
    wanted = {"publications": list(sides.sub.publications)}
    lists = sides.giving.info.server_version >= LISTS_SINCE
    found = rows(sides.giving, _PUBLISHED.format(filtered="t.rowfilter IS NOT NULL" if lists else "false"), wanted)
    if lists:
        whole = _whole(sides, rows(sides.giving, RESTRICTED, wanted))
        yield from _tables(
            [(schema, name) for schema, name, filtered, _ in found if filtered],
            "the publisher publishes {} with a row filter",
            "The target lacks rows that clients would miss there.",
            whole,
        )
        yield from several(
            [dotted(names) for names in rows(sides.giving, _LEFT_OUT, wanted)],
            ("column", "columns"),
            "{} of the publisher [is|are] not published",
            "The way back would write what the target has there over the publisher's values.",
            whole,
            server=GIVING,
            severity=ERROR,
        )
    statements = [
        f"ALTER PUBLICATION {quoting.name(name)} SET ({PUBLISH});"
        for (name,) in rows(sides.giving, _INCOMPLETE, wanted)
    ]
    repair = f"Then repair what was left out:\npgsub verify {word(sides.sub.name)} --repair"
    yield from _tables(
        [(schema, name) for schema, name, _, incomplete in found if incomplete],
        "the publisher does not publish all of insert, update, delete and truncate of {}",
        "Some of what clients did is not on the target.",
        f"{paste(GIVING, statements)}\n{repair}",
    )


def _tables(names: Sequence[Name], message: str, detail: str, hint: str) -> Iterator[Obstacle]:
    shown = [dotted(name) for name in names]
    yield from several(shown, ("table", "tables"), message, detail, hint, server=GIVING, severity=ERROR)


def _whole(sides: Sides, restricted: Sequence[tuple[Any, ...]]) -> str:
    """Return the statements that publish tables completely, and the command that copies them again."""
    statements = []
    for publishing, schema, name, inherits in restricted:
        table = ("ONLY " if inherits else "") + quoting.name(schema, name)
        statements += [
            f"ALTER PUBLICATION {quoting.name(publishing)} {verb} TABLE {table};" for verb in ("DROP", "ADD")
        ]
    return f"{paste(GIVING, statements)}\n{_again(sides, [(schema, name) for _, schema, name, _ in restricted])}"


def _again(sides: Sides, names: Sequence[Name]) -> str:
    tables = dict.fromkeys(sides.tables.get(name, name) for name in names)
    options = " ".join(f"--resync {word(dotted(name))}" for name in tables)
    return f"Then copy the rows again:\npgsub refresh {word(sides.sub.name)} {options}"


def _columns(sides: Sides) -> Iterator[Obstacle]:
    """Yield columns that only the publisher has. Columns that only the target has are an obstacle elsewhere."""
    there = _columns_of(sides, GIVING, sides.tables)
    here = _columns_of(sides, TAKING, sides.tables.values())
    lacking = []
    for name, columns in there.items():
        known = {one.name for one in here.get(sides.tables[name], columns)}
        lacking += [(sides.tables[name], one) for one in columns if one.name not in known]
    for severity, of_kind in ((ERROR, False), (WARNING, True)):
        found = [(name, one) for name, one in lacking if one.generated is of_kind]
        yield from several(
            [dotted((*name, one.name)) for name, one in found],
            ("generated column", "generated columns") if of_kind else ("column", "columns"),
            "{} of the publisher [does|do] not exist on the target",
            "Clients would miss it there.",
            None if of_kind else _added(sides, found),
            server=TAKING,
            severity=severity,
        )


def _added(sides: Sides, found: Sequence[tuple[Name, _Column]]) -> str:
    """Return the statements that add columns, with the names of their types on the target."""
    types = {one.type.oid: one.type for _, one in found}
    texts = ddl_hints.column_types(sides.taking, [one.sent for _, one in found], types)
    statements = [
        f"{quoting.statement(ddl_hints.add_columns(*name, [(one.name, text)]))};"
        for (name, one), text in zip(found, texts, strict=True)
    ]
    return f"{paste(TAKING, statements)}\n{_again(sides, list(dict.fromkeys(name for name, _ in found)))}"


def _columns_of(sides: Sides, server: str, names: Any) -> dict[Name, list[_Column]]:
    found: dict[Name, list[_Column]] = {}
    for schema, name, column, generated, oid, typmod, *type_name in rows(sides.session(server), _COLUMNS, named(names)):
        one = _Column(column, generated, Column(0, column, oid, typmod), TypeName(oid, *type_name))
        found.setdefault((schema, name), []).append(one)
    return found
