"""Checks the publication of the reverse subscription: it must publish all of exactly the subscribed tables.

Trees of partitions are compared by their leaves, because a root or its partitions may be published.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pgsub.commands.switchover.obstacles.forward_publications import LISTS_SINCE, RESTRICTED
from pgsub.commands.switchover.obstacles.obstacle import (
    ERROR,
    PUBLISH,
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
from pgsub.publisher.tables import Name

_PUBLICATIONS = """
SELECT p.pubname::text, p.puballtables, p.pubinsert AND p.pubupdate AND p.pubdelete AND p.pubtruncate
  FROM pg_catalog.pg_publication p WHERE p.pubname = ANY (%(publications)s::name[]) ORDER BY 1
"""
# pg_partition_tree returns no rows for a table outside of a partition tree.
_LEAVES = """
WITH wanted AS MATERIALIZED (SELECT unnest(%(relids)s::oid[]) AS oid),
published AS MATERIALIZED (
     SELECT DISTINCT g.relid::oid AS oid FROM pg_catalog.pg_publication p,
            LATERAL pg_catalog.pg_get_publication_tables(p.pubname::text) g
      WHERE p.pubname = ANY (%(publications)s::name[])),
leaves AS (
     SELECT w.oid AS root, coalesce(t.relid::oid, w.oid) AS oid, w.is_wanted
       FROM (SELECT oid, true FROM wanted UNION ALL SELECT oid, false FROM published) AS w (oid, is_wanted)
       LEFT JOIN LATERAL pg_catalog.pg_partition_tree(w.oid) t ON t.isleaf)
SELECT n.nspname::text, c.relname::text, l.is_wanted
  FROM leaves l JOIN pg_catalog.pg_class c ON c.oid = l.root JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE NOT EXISTS (SELECT FROM leaves o WHERE o.oid = l.oid AND o.is_wanted <> l.is_wanted)
 GROUP BY 1, 2, 3 ORDER BY 1, 2
"""
# ONLY for a table with inheritance children, which are subscribed separately or not at all.
_SUBSCRIBED = """
SELECT n.nspname::text, c.relname::text, c.relkind = 'p',
       c.relkind = 'r' AND EXISTS (SELECT FROM pg_catalog.pg_inherits i WHERE i.inhparent = c.oid)
  FROM unnest(%(relids)s::oid[]) AS w (oid) JOIN pg_catalog.pg_class c ON c.oid = w.oid
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace ORDER BY 1, 2
"""


@dataclass(frozen=True, slots=True)
class _Remedy:
    """The statements that correct a publication."""

    name: str
    tables: str
    roots: bool
    exists: bool
    fixed: bool  #: publishes all tables, so that its list of tables cannot be set

    def statements(self) -> list[str]:
        """Return the statements for the present database."""
        name, with_roots = quoting.name(self.name), ", publish_via_partition_root = true" if self.roots else ""
        create = f"CREATE PUBLICATION {name} FOR TABLE {self.tables} WITH ({PUBLISH}{with_roots});"
        if not self.exists:
            return [create]
        if self.fixed:
            return [f"DROP PUBLICATION {name};", create]
        set_tables = f"ALTER PUBLICATION {name} SET TABLE {self.tables};"
        return [set_tables, f"ALTER PUBLICATION {name} SET ({PUBLISH}{with_roots});"]


def find(sides: Sides) -> Iterator[Obstacle]:
    """Yield the differences between the reverse subscription's publications and the required one."""
    wanted: dict[str, list[Any]] = {"publications": list(sides.back.publications), "relids": list(sides.relids)}
    there = rows(sides.taking, _PUBLICATIONS, wanted)
    hint = _hint(sides, there)
    missing = [name for name in sides.back.publications if name not in {row[0] for row in there}]
    yield from several(
        missing,
        ("publication", "publications"),
        "{} of the way back [does|do] not exist on the target",
        "What clients write on the target would not be sent.",
        hint,
        server=TAKING,
        severity=ERROR,
    )
    if there:
        yield from _contents(sides, wanted, there, hint)


def _contents(
    sides: Sides, wanted: dict[str, list[Any]], there: Sequence[tuple[Any, ...]], hint: str
) -> Iterator[Obstacle]:
    leaves = rows(sides.taking, _LEAVES, wanted)
    others = [(schema, name) for schema, name, is_wanted in leaves if not is_wanted]
    ledger = [one for one in others if one[0] == "pgsub"]
    yield from _tables(
        [(schema, name) for schema, name, is_wanted in leaves if is_wanted],
        "{} [is|are] not published by the way back's publication",
        "What clients write to them on the target would not be sent.",
        hint,
    )
    yield from _tables(
        [one for one in others if one[0] != "pgsub"],
        "the way back's publication publishes {}, which [is|are] not subscribed",
        "Rows would be sent that did not come from the publisher.",
        hint,
    )
    if ledger:
        yield Obstacle(
            TAKING,
            WARNING,
            "the way back's publication publishes schema pgsub",
            "Changes of the target's ledger would be sent, and left out where they arrive.",
            hint,
        )
    if sides.taking.info.server_version >= LISTS_SINCE:
        restricted = sorted({(schema, name) for _, schema, name, _ in rows(sides.taking, RESTRICTED, wanted)})
        detail = "Some of what clients write to them on the target would not be sent."
        yield from _tables(restricted, "{} [is|are] published with a row filter or a column list", detail, hint)
    yield from several(
        [name for name, _, complete in there if not complete],
        ("publication", "publications"),
        "{} on the target [does|do] not publish all of insert, update, delete and truncate",
        "Some of what clients do there would not be sent.",
        hint,
        server=TAKING,
        severity=ERROR,
    )


def _tables(names: Sequence[Name], message: str, detail: str, hint: str) -> Iterator[Obstacle]:
    shown = [dotted(name) for name in names]
    yield from several(shown, ("table", "tables"), message, detail, hint, server=TAKING, severity=ERROR)


def _hint(sides: Sides, there: Sequence[tuple[Any, ...]]) -> str:
    """Return a hint to publish all the tables in one publication, the first if there are several."""
    first = sides.back.publications[0]
    found = {name: every for name, every, _ in there}
    subscribed = rows(sides.taking, _SUBSCRIBED, {"relids": list(sides.relids)})
    listed = ", ".join(("ONLY " if inherits else "") + quoting.name(s, n) for s, n, _, inherits in subscribed)
    remedy = _Remedy(first, listed, any(one[2] for one in subscribed), first in found, found.get(first, False))
    only = "" if len(sides.back.publications) == 1 else f"Let --back-publication name {quoting.word(first)} alone."
    return paste(TAKING, remedy.statements(), only)
