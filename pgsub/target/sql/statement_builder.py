"""Parts of statements about single rows: parameters with their types, assignments, the condition that finds a row.

Parameters are declared with the *target* column's type. So a value is read by the same input (or receive) function that
the server's own apply would call. :mod:`~pgsub.target.catalog.typmod` handles the column's modifier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import LiteralString

from psycopg import sql

from pgsub.common.errors import SchemaFault
from pgsub.protocol.reader import BINARY, NULL, UNCHANGED
from pgsub.target.catalog import typmod
from pgsub.target.catalog.relation import KeyEquality, TargetColumn, TargetRelation, equal
from pgsub.target.catalog.relation_map import RelationMap

_TEXT = 25
_NEW, _OLD = "n", "o"


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement to prepare: text, parameter types, and the values for its parameters, in order.

    ``takes``: pairs of tuple ('n'ew or 'o'ld) and remote column position.

    :ivar replanned: it is planned for each execution. It finds a row of a partitioned table, and a generic plan would
        lock all partitions, so that whoever locks one of them would hold up the changes of the others. A plan for the
        values locks only the partitions that may have the row, as the server's subscriber does.
    """

    text: sql.Composed
    types: tuple[int, ...]
    takes: tuple[tuple[str, int], ...]
    replanned: bool = False

    @classmethod
    def fixed(cls, text: LiteralString) -> Statement:
        """Return a statement without values of a row. The server derives the types of its parameters."""
        return cls(sql.Composed([sql.SQL(text)]), (), ())


def table_name(target: TargetRelation) -> sql.Identifier:
    """Return the table's qualified name as an identifier."""
    return sql.Identifier(target.schema, target.name)


def only(target: TargetRelation) -> sql.Composed:
    """Compose the table for FROM, UPDATE and TRUNCATE, without its inheritance children."""
    # inheritance children are subscribed on their own; a partitioned table has no rows without its partitions
    # guard: a statement about a table leaves its inheritance children alone, without "ONLY "
    prefix = sql.SQL("") if target.relkind == "p" else sql.SQL("ONLY ")
    return sql.Composed([prefix, table_name(target)])


def check_equality(column: TargetColumn) -> None:
    """Check that a row can be found by this column.

    :raises SchemaFault: its type has no equality operator, as in tuples_equal (execReplication.c).
    """
    if column.equality is None:
        raise SchemaFault(
            f"could not identify an equality operator for type {column.type_name}",
            detail=f'Without a replica identity index or primary key, rows are found by every column, "{column.name}"'
            " too.",
            sqlstate="42883",
        )


def found_by(
    column: TargetColumn, name: sql.Composable, value: sql.Composable, key: Sequence[KeyEquality] = ()
) -> sql.Composed:
    """Compose the condition that finds rows by a value of this column.

    :param key: columns that the key's index compares in another way, if rows are found by that index
        (build_replindex_scan_key, execReplication.c).
    :raises SchemaFault: see :func:`check_equality`.
    """
    check_equality(column)
    by_index = next((one for one in key if one.name == column.name), None)
    # guard: rows are found as the key's index compares them
    if by_index is not None:
        collation = sql.SQL(f" COLLATE {by_index.collation}" if by_index.collation else "")
        name, operator = sql.Composed([name, collation]), by_index.operator
        return equal(operator or column.equality or "", by_index.operand if operator else column.operand, name, value)
    return column.equal(name, value)


class Builder:
    """A builder of a statement about one row of a relation.

    :param kinds: column kinds of the new tuple.
    :param old_kinds: column kinds of the K or O tuple; None: there is none.
    :ivar types: parameter types; ``takes``: see :class:`Statement`.
    :ivar sent: remote position of each column that the new tuple has, by name.
    """

    def __init__(self, relation: RelationMap, kinds: bytes, old_kinds: bytes | None = None) -> None:
        self._relation = relation
        self._kinds = {_NEW: kinds, _OLD: old_kinds}
        self._replanned = False
        self.types: list[int] = []
        self.takes: list[tuple[str, int]] = []
        self.sent = {relation.columns[i].name: i for i, kind in enumerate(kinds) if kind != UNCHANGED}

    def value(self, position: int) -> sql.Composable:
        """Add a value of the new tuple for an assignment, which applies the column's modifier."""
        return self._value(_NEW, position, self._relation.read)

    def _value(self, source: str, position: int, by_input: frozenset[int]) -> sql.Composable:
        """Add a value.

        :param by_input: positions of columns whose modifier only the input function applies.
        """
        column, kinds = self._relation.columns[position], self._kinds[source]
        if position not in by_input:
            return self._parameter(source, position, column.type_oid)
        if position in self._relation.read and kinds is not None and kinds[position] != BINARY:
            return typmod.read(column, self._parameter(source, position, _TEXT))
        parameter = self._parameter(source, position, column.type_oid)
        return typmod.read(column, sql.SQL("pg_catalog.format('%s', {})").format(parameter))

    def _parameter(self, source: str, position: int, type_oid: int) -> sql.SQL:
        self.types.append(type_oid)
        self.takes.append((source, position))
        return sql.SQL(f"${len(self.types)}")

    def assignments(self) -> list[sql.Composed]:
        """Compose the SET clause: every column that was sent, except GENERATED ALWAYS identities."""
        return [
            sql.SQL("{} = {}").format(sql.Identifier(name), self.value(i))
            for name, i in self.sent.items()
            if self._relation.columns[i].identity != "a"
        ]

    def has_identities(self) -> sql.Composed:
        """Compose the condition that a row has the GENERATED ALWAYS identity values that were sent (integers)."""
        sent = [(name, i) for name, i in self.sent.items() if self._relation.columns[i].identity == "a"]
        parts = [sql.SQL("{} OPERATOR(pg_catalog.=) {}").format(sql.Identifier(n), self.value(i)) for n, i in sent]
        return sql.SQL(" AND ").join(parts)

    def completed(self, old: str) -> tuple[sql.Composed, sql.Composed]:
        """Compose names and values of all insertable columns. Values that were not sent come from the row ``old``."""
        columns = [c.name for c in self._relation.target.columns if not c.generated]
        values = [self.value(self.sent[c]) if c in self.sent else sql.Identifier(old, c) for c in columns]
        return sql.SQL(", ").join(map(sql.Identifier, columns)), sql.SQL(", ").join(values)

    def condition(self) -> sql.Composed:
        """Compose the condition that finds one row, by the old tuple if there is one."""
        relation, target = self._relation, self._relation.target
        # guard: a lock on a partition holds up no change of another partition
        self._replanned = target.relkind == "p"
        source = _NEW if self._kinds[_OLD] is None else _OLD
        kinds = self._kinds[source] or b""
        parts: list[sql.Composable] = []
        key = target.key_equality if relation.by_identity else ()
        for i in relation.lookup:
            name = sql.Identifier(relation.columns[i].name)
            if kinds[i] in (NULL, UNCHANGED):
                parts.append(sql.SQL("{} IS NULL").format(name))
            else:
                parts.append(found_by(relation.columns[i], name, self._value(source, i, relation.modified), key))
        parts += [sql.SQL("{} IS NULL").format(sql.Identifier(c.name)) for c in relation.local_only]
        found = sql.SQL(" AND ").join(parts) if parts else sql.SQL("true")
        if relation.by_identity:
            return sql.Composed([found])
        # Exactly one row per message, even among duplicates. A ctid alone is ambiguous among partitions, but only a
        # ctid alone gives a TID scan. The condition is repeated: another session may have changed the row while its
        # commit was awaited, and the recheck of a TID scan (TidRecheck) accepted any row up to 17.6.
        place, places = ("(tableoid, ctid)", "t.tableoid, t.ctid") if target.relkind == "p" else ("ctid", "t.ctid")
        row = sql.SQL(f"{place} = (SELECT {places} FROM {{}} t WHERE {{}} LIMIT 1) AND {{}}")
        return row.format(only(target), found, found)

    def done(self, text: sql.Composed) -> Statement:
        """Return the statement of this text."""
        return Statement(text, tuple(self.types), tuple(self.takes), self._replanned)
