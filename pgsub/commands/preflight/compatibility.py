"""Checks whether the rows of a published table fit into its target: columns, constraints, ways to find a row.

Mirrors, with the same messages, what relation.c and execReplication.c refuse later. Also finds problems that the
server's subscriber notices only when a row fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pgsub.commands.preflight import type_conversion
from pgsub.commands.preflight.catalog_facts import Facts, Type, Unique
from pgsub.commands.preflight.findings import Caution, Table, concerning
from pgsub.common import quoting
from pgsub.common.errors import SchemaFault
from pgsub.common.plural import some
from pgsub.protocol.messages import Column, Relation
from pgsub.target.catalog.relation_map import check_updatable, column_faults, map_relation

_STOPS = "Replication of this table stops at its first change until the target table fits."
_FITS = "Change the target's table, or make sure that no row of the publisher is affected."


@dataclass(frozen=True, slots=True)
class Actions:
    """The actions that a table's publications publish."""

    updates: bool
    deletes: bool
    truncates: bool

    @property
    def words(self) -> str:
        """The published actions that must find a row, such as ``UPDATE and DELETE``."""
        return " and ".join(word for word, on in (("UPDATE", self.updates), ("DELETE", self.deletes)) if on)


@dataclass(frozen=True, slots=True)
class Pair:
    """A published table and its target."""

    table: Table
    source: Facts
    target: Facts
    actions: Actions
    leaves: tuple[Facts, ...]  #: on the publisher: the table itself, or its partitions with rows

    @property
    def sent(self) -> list[str]:
        """The names of the published columns."""
        return [column.name for column in self.table.remote.columns]


def misfits(
    pair: Pair,
    source_types: Mapping[int, Type],
    target_types: Mapping[int, Type],
    lacking: Mapping[str, str],
    *,
    binary: bool,
) -> Iterator[Caution]:
    """Yield everything about one table that will or may fail.

    :param lacking: types, as SQL of the target, of columns that are missing or generated on the target.
    """
    faults = column_faults({name: lacking.get(name) for name in pair.sent}, pair.table.target)
    for fault in faults:
        yield _about(pair, fault.message, hint=f"{_STOPS}\n{fault.hint}", stops=True)
    yield from _types(pair, source_types, target_types, binary=binary)
    yield from _nulls(pair)
    yield from _generated(pair)
    yield from _uniques(pair)
    yield from _constraints(pair)
    yield from _uncovered_identity(pair)
    if not faults:
        yield from _lookup(pair)


def _about(
    pair: Pair, message: str, detail: str | None = None, hint: str | None = _FITS, *, stops: bool = False
) -> Caution:
    return Caution(message, detail, hint, tables=(pair.table.name,), stops=stops)


def _listing(
    pair: Pair, names: Sequence[str], fault: str, detail: str, hint: str = _FITS, *, stops: bool = False
) -> Iterator[Caution]:
    """Yield a fault of the table with a list of columns, indexes or constraints, unless the list is empty."""
    if names:
        yield _about(pair, f'table "{pair.table.name}" {fault}', f"{detail}: {some(names)}.", hint, stops=stops)


def _types(
    pair: Pair, source_types: Mapping[int, Type], target_types: Mapping[int, Type], *, binary: bool
) -> Iterator[Caution]:
    lines = []
    for name in pair.sent:
        ours, theirs = pair.target.columns.get(name), pair.source.columns.get(name)
        if ours is None or theirs is None or ours.generated:
            continue
        source, target = type_conversion.resolve(source_types, theirs), type_conversion.resolve(target_types, ours)
        reason = type_conversion.difference(source, target, binary=binary)
        if reason is not None:
            lines.append(f'Column "{name}" is {theirs.type_text} on the publisher, {ours.type_text} here: {reason}.')
    if lines:
        yield _about(
            pair, f'table "{pair.table.name}" on the target has columns of types that may not fit', "\n".join(lines)
        )


def _nulls(pair: Pair) -> Iterator[Caution]:
    sent = set(pair.sent)
    columns = pair.target.columns.values()
    yield from _listing(
        pair,
        [c.name for c in columns if c.not_null and c.name not in sent and not c.filled],
        "on the target has NOT NULL columns without a default that are not published",
        "Every row fails. Columns",
        stops=True,
    )
    nullable = {c.name for c in pair.source.columns.values() if not c.not_null}
    yield from _listing(
        pair,
        [c.name for c in columns if c.not_null and c.name in sent & nullable],
        "on the target has NOT NULL columns that are nullable on the publisher",
        "Rows with NULL in them fail. Columns",
    )


def _generated(pair: Pair) -> Iterator[Caution]:
    ours, sent = pair.target.columns, set(pair.sent)
    unpublished = [c.name for c in pair.source.columns.values() if c.generated and c.name not in sent]
    yield from _listing(
        pair,
        [name for name in unpublished if name in ours and not ours[name].filled],
        "has unpublished generated columns that are ordinary ones on the target",
        "They stay NULL there. Columns",
        "Make them generated on the target too, or publish them (publish_generated_columns, 18 and newer).",
    )


def _uniques(pair: Pair) -> Iterator[Caution]:
    stricter = [one for one in pair.target.unique if not any(_implies(theirs, one) for theirs in pair.source.unique)]
    yield from _listing(
        pair,
        [one.name for one in stricter],
        "on the target has unique indexes that the publisher's table lacks",
        "Rows that are equal in them fail. Indexes",
    )


def _implies(source: Unique, target: Unique) -> bool:
    """Return whether rows that satisfy the publisher's index satisfy the target's."""
    if not source.valid:
        return False
    if source.definition == target.definition:
        return True
    if source.partial or source.columns is None or target.columns is None:
        return False
    return source.columns <= target.columns and (source.nulls_equal or not target.nulls_equal)


def _constraints(pair: Pair) -> Iterator[Caution]:
    yield from _listing(
        pair,
        sorted(name for text, name in pair.target.constraints.items() if text not in pair.source.constraints),
        "on the target has constraints that the publisher's table lacks",
        "Rows that violate them fail. Constraints",
    )


def unidentified(pairs: Sequence[Pair]) -> Iterator[Caution]:
    """Yield tables whose own updates CheckCmdReplicaIdentity (execReplication.c) refuses on the publisher."""
    for what in ("UPDATE and DELETE", "UPDATE", "DELETE"):
        found = [pair.table for pair in pairs if pair.actions.words == what and _anonymous(pair)]
        names = [quoting.name(table.remote.schema, table.remote.name) for table in found]
        yield from concerning(
            [table.name for table in found],
            f"{{}} [publishes|publish] {what} without a replica identity",
            f"The publisher refuses {what} of their rows.",
            "Give them primary keys, or run this on the publisher:"
            + "".join(f"\nALTER TABLE {name} REPLICA IDENTITY FULL;" for name in names),
            stops=True,
        )


def _anonymous(pair: Pair) -> bool:
    return bool(pair.leaves) and not any(leaf.identified for leaf in pair.leaves)


def _uncovered_identity(pair: Pair) -> Iterator[Caution]:
    uncovered = sorted(pair.source.key - set(pair.sent))
    if uncovered and pair.actions.words and pair.table.remote.replica_identity != "f":
        yield _about(
            pair,
            f'the column list of table "{pair.table.name}" does not cover its replica identity',
            f"The publisher refuses {pair.actions.words} of its rows. Columns: {some(uncovered)}.",
            "Add the columns to the publication's column list.",
        )


def _lookup(pair: Pair) -> Iterator[Caution]:
    """Check how rows will be found, like the server's check_relation_updatable and FindReplTupleInLocalRel."""
    if not pair.actions.words or _anonymous(pair):
        return
    remote = pair.table.remote
    full = remote.replica_identity == "f"
    columns = tuple(Column(full or one.is_key, one.name, one.type_oid, one.typmod) for one in remote.columns)
    relation = Relation(remote.oid, remote.schema, remote.name, remote.replica_identity, columns)
    try:
        mapped = map_relation(relation, pair.table.target)
        check_updatable(mapped)
    except SchemaFault as fault:
        detail = "UPDATE and DELETE of its rows stop apply."
        yield _about(pair, fault.message, detail, fault.hint or _STOPS, stops=True)
        return
    unequal = sorted({mapped.columns[i].type_name for i in mapped.lookup if mapped.columns[i].equality is None})
    if unequal:
        yield _about(
            pair,
            f"could not identify an equality operator for type {unequal[0]}",
            f'UPDATE and DELETE of rows of "{pair.table.name}", which are found by all columns, stop apply.',
            "Give the target's table a primary key.",
        )
    elif full and mapped.target.keyed_leaves and not mapped.by_identity:
        yield _about(
            pair,
            f'rows of table "{pair.table.name}" are found by all columns, not by the key of their partition',
            f"{pair.actions.words} of rows that differ on the target, also in columns that are not published, count as"
            " conflicts and are left out.",
            "Give all partitions of the target the same primary key, and publish its columns and those of the partition"
            " keys.",
        )
