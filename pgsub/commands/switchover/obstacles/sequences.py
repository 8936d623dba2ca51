"""Sequences: obstacles to setting one side's values on the other, in both directions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pgsub.commands.switchover.obstacles.obstacle import (
    ERROR,
    GIVING,
    TAKING,
    WARNING,
    Obstacle,
    Sides,
    dotted,
    in_their_words,
    paste,
    rows,
    several,
)
from pgsub.common.errors import PgsubError, PublisherUnavailable
from pgsub.common.quoting import dumping, word
from pgsub.common.table_lock import name_as_sql
from pgsub.publisher import connect as publisher
from pgsub.publisher.server_errors import translating
from pgsub.publisher.tables import Name
from pgsub.tablesync.sequences import comparison, reading

_CONSEQUENCE = "Its value would not be set on the other server."
_ALL = """
SELECT n.nspname::text, c.relname::text FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'S' AND c.relpersistence <> 't' AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pgsub')
   AND n.nspname !~ '^pg_(toast|temp)'
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d WHERE d.classid = 'pg_catalog.pg_class'::regclass
                      AND d.objid = c.oid AND d.deptype IN ('e', 'i'))
   AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d WHERE d.classid = 'pg_catalog.pg_class'::regclass
                      AND d.objid = c.oid AND d.deptype = 'a' AND d.refclassid = 'pg_catalog.pg_class'::regclass)
 ORDER BY 1, 2
"""


def find(sides: Sides) -> Iterator[Obstacle]:
    """Yield the obstacles: errors for this direction, warnings for the other (``--back``)."""
    seen: set[Name] = set()
    try:
        opened = publisher.connect(sides.sub.connection, application_name=sides.sub.name)
        with contextlib.closing(opened) as source, translating(source, "fetch sequence info from publisher"):
            reading.prepare(source)
            tables, names, as_owner = sides.tables, sides.sub.publications, sides.sub.run_as_owner
            found = comparison.compare(source, sides.taking, tables, names, run_as_owner=as_owner)
    except PublisherUnavailable:
        raise  # the connection was lost, which is no obstacle
    except PgsubError as error:
        yield Obstacle(GIVING, ERROR, error.message, error.detail, error.hint)
        return
    for one in found.obstacles:
        if not one.message.startswith("insufficient"):  # concerns a role on one side only
            seen.add(one.key)
        server = GIVING if one.side == "publisher" else TAKING
        yield Obstacle(server, ERROR, one.message, _CONSEQUENCE, _hint(one, server))
    yield from _backward(sides, seen)
    yield from _unused(sides)


def _backward(sides: Sides, seen: set[Name]) -> Iterator[Obstacle]:
    names = {there: here for here, there in sides.tables.items()}
    back = sides.back
    found = comparison.compare(sides.taking, sides.giving, names, back.publications, run_as_owner=back.run_as_owner)
    for one in found.obstacles:
        if one.key not in seen:
            server = TAKING if one.side == "publisher" else GIVING
            yield Obstacle(server, WARNING, *in_their_words(one.message, _CONSEQUENCE, None)[:2], _hint(one, server))


def _hint(one: comparison.Obstacle, server: str) -> str | None:
    return paste(server, one.statements) if one.statements else None


def _unused(sides: Sides) -> Iterator[Obstacle]:
    """Yield sequences that no subscribed table uses, whose values are not replicated."""
    brought = {
        *reading.of_tables(sides.giving, sides.tables),
        *reading.published(sides.giving, sides.sub.publications),
    }
    names = [(schema, name) for schema, name in rows(sides.giving, _ALL) if (schema, name) not in brought]
    options = " ".join(f"--table={word(name_as_sql(*name))}" for name in names)
    yield from several(
        [dotted(name) for name in names],
        ("sequence", "sequences"),
        "{} [is|are] used by no subscribed table",
        "Their values are not set on the target.",
        "Use them in defaults of the tables, or set their values while nobody writes. "
        + dumping(f"--data-only {options}"),
        server=GIVING,
    )
