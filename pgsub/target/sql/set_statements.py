"""SQL of change sets: one statement for all rows of a relation, over ``unnest`` of one array per column.

Binary values form arrays of the column's type, which its receive function reads. Text values form arrays of text, cast
as the input function would read them; :class:`~pgsub.target.catalog.relation.TargetColumn` tells for which types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psycopg import sql

from pgsub.target.catalog.relation import TargetColumn
from pgsub.target.catalog.relation_map import RelationMap
from pgsub.target.sql.row_queries import foreign_origin
from pgsub.target.sql.statement_builder import Statement, table_name
from pgsub.target.sql.statements import unassigned

#: The arrays are small compared with a table, but the planner knows the size of neither. With these settings each
#: array element finds its row by the key's index, no table is scanned for a few rows, and one generic plan serves all.
PLAN = {
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "plan_cache_mode": "force_generic_plan",
}

TEXT, TEXT_ARRAY = 25, 1009


@dataclass(frozen=True, slots=True)
class Parameter:
    """An array of values of a column; ``position`` is that of the remote column."""

    position: int
    binary: bool


def plan(*, pinned: bool) -> Statement:
    """Compose the statement that pins the planner's settings for this transaction, or restores the previous ones.

    The previous values are saved in custom settings: NULL would restore the session's default, not its SET values.
    """
    text = "set_config({setting}, current_setting({kept}), true)"
    if pinned:
        text = "set_config({kept}, current_setting({setting}), true), set_config({setting}, {value}, true)"
    text = text.replace("set_config", "pg_catalog.set_config").replace("current_", "pg_catalog.current_")
    calls = [
        sql.SQL(text).format(setting=sql.Literal(name), kept=sql.Literal(f"pgsub.{name}"), value=sql.Literal(value))
        for name, value in PLAN.items()
    ]
    return Statement(sql.SQL("SELECT {}").format(sql.SQL(", ").join(calls)), (), ())


def element_type(column: TargetColumn, *, binary: bool) -> int:
    """Return the OID of the array element type for a column's values."""
    return column.type_oid if binary else TEXT


def present(relation: RelationMap, keys: Sequence[Parameter]) -> Statement:
    """Compose a SELECT that returns a row for each key that exists."""
    return _statement(relation, "SELECT FROM", sql.SQL(", "), keys)


def delete(relation: RelationMap, keys: Sequence[Parameter]) -> Statement:
    """Compose a DELETE of the rows with these keys."""
    return _statement(relation, "DELETE FROM", sql.SQL(" USING "), keys)


def update(relation: RelationMap, keys: Sequence[Parameter], values: Sequence[Parameter]) -> Statement:
    """Compose an UPDATE of the rows with these keys.

    :param values: values of the columns to set; if there are none, nothing changes, but the rows are counted.
    """
    assignments = [
        sql.SQL("{} = {}").format(sql.Identifier(relation.columns[value.position].name), _value(relation, value, i))
        for i, value in enumerate(values, len(keys))
    ]
    if not assignments:
        column = unassigned(relation.target)
        assert column is not None
        assignments = [sql.SQL("{} = {}").format(sql.Identifier(column), sql.Identifier("t", column))]
    between = sql.SQL(" SET {} FROM ").format(sql.SQL(", ").join(assignments))
    return _statement(relation, "UPDATE", between, keys, values)


def _statement(
    relation: RelationMap,
    verb: str,
    between: sql.Composable,
    keys: Sequence[Parameter],
    values: Sequence[Parameter] = (),
) -> Statement:
    """Compose a statement over the table as t and the arrays as u.

    :param verb: SQL before the table.
    :param between: SQL between table and arrays.
    """
    parameters = [*keys, *values]
    # in a select list the arrays advance in step; in FROM each would first be stored in a tuplestore of its own
    arrays = sql.SQL(", ").join(sql.SQL(f"pg_catalog.unnest(${i + 1})") for i in range(len(parameters)))
    names = sql.SQL(", ").join(sql.SQL(f"c{i}") for i in range(len(parameters)))
    found = [(relation.columns[key.position], _value(relation, key, i)) for i, key in enumerate(keys)]
    conditions: list[sql.Composable] = [column.equal(sql.Identifier("t", column.name), one) for column, one in found]
    if relation.target.origins_of and not verb.startswith("SELECT"):
        # rows of other origins are not counted: each is a conflict, which the execution row by row records
        foreign = foreign_origin(relation, sql.Identifier("t", "xmin"))
        conditions.append(sql.SQL("NOT EXISTS ({})").format(foreign))
    text = sql.SQL("{} ONLY {} AS t{}(SELECT {}) AS u ({}) WHERE {}").format(
        sql.SQL(verb), table_name(relation.target), between, arrays, names, sql.SQL(" AND ").join(conditions)
    )
    columns = [(relation.columns[parameter.position], parameter) for parameter in parameters]
    types = tuple(column.array_oid if parameter.binary else TEXT_ARRAY for column, parameter in columns)
    return Statement(text, types, ())


def _value(relation: RelationMap, parameter: Parameter, number: int) -> sql.SQL:
    column = relation.columns[parameter.position]
    if parameter.binary or column.type_oid == TEXT:
        return sql.SQL(f"u.c{number}")
    return sql.SQL(f"u.c{number}::{column.cast_type}")  # quoted by format_type()
