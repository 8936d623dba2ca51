"""Finds the target column that refused a value, and the DDL that makes it fit: narrow types and NOT NULL.

The server's subscriber reads values column by column and so knows the column. Here the target's input functions read
them as statement parameters. Their errors name the parameter; errors of a type modifier name nothing.
"""

from __future__ import annotations

import re
import struct
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation, localcontext

import psycopg
from psycopg.adapt import Transformer
from psycopg.pq import Format

from pgsub.common import server_words
from pgsub.common.errors import ApplyError, SchemaFault
from pgsub.protocol.messages import Tuple
from pgsub.protocol.reader import BINARY
from pgsub.target.catalog import ddl_hints
from pgsub.target.catalog.relation import TargetColumn
from pgsub.target.catalog.relation_map import RelationMap
from pgsub.target.sql.statement_builder import Statement

read_numeric = Transformer().get_loader(1700, Format.BINARY).load
_HEADER = 4  #: VARHDRSZ, part of the modifier of character types and numeric
_CHARACTER, _BITS, _NUMERIC = (1042, 1043), (1560, 1562), 1700
_FIXED_BITS = 1560
_MODIFIED = {"22001": (*_CHARACTER, *_BITS), "22026": _BITS, "22003": (_NUMERIC,)}
_NOT_NULL = "23502"
_DOMAIN_CHECK = "23514"
_BINARY_FORMAT = "22P03"
#: `unnamed portal parameter $2 = '…'`, in any language; texts of user code on the target have quotes before a dollar.
_PARAMETER = re.compile(r"""^[^"'$]*\$(\d+)(?!\w)""")
_BIND_PARAMETER = re.compile(r"(\d+)\D*$")


def with_column(
    fault: ApplyError, error: psycopg.Error, relation: RelationMap, new: Tuple | None, statement: Statement | None
) -> ApplyError:
    """Return the fault with its column and the DDL that helps, as far as they can be found.

    :param fault: the translated error.
    """
    state = error.sqlstate or ""
    if state == _NOT_NULL:
        return _null(fault, error.diag, relation)
    if state[:2] != "22" and state != _DOMAIN_CHECK:
        return fault
    position = _parameter(error, statement)
    if position is None and new is not None:
        position = _by_modifier(state, relation, new)
    return fault if position is None else _narrow(fault, relation, position)


def _null(fault: ApplyError, diag: psycopg.errors.Diagnostic, relation: RelationMap) -> ApplyError:
    target, column = relation.target, diag.column_name
    if (diag.schema_name, diag.table_name) != (target.schema, target.name) or column is None:
        return fault  # a partition, or another table that a trigger writes
    fault.column = column
    if column not in target.identity:
        fault.hint = ddl_hints.hint(ddl_hints.nullable(target.schema, target.name, column))
    return fault


def _narrow(fault: ApplyError, relation: RelationMap, position: int) -> ApplyError:
    """Return a schema fault if the publisher's type differs."""
    column, target = relation.columns[position], relation.target
    fault.column = column.name
    if not relation.types or relation.types[position] == column.full_type:
        return fault
    wanted = relation.types[position]
    types = f'Column "{column.name}" is {column.full_type}, on the publisher {wanted}.'
    narrow = SchemaFault(
        fault.message,
        detail=f"{fault.detail}\n{types}" if fault.detail else types,
        hint=ddl_hints.hint(ddl_hints.retype(target.schema, target.name, column.name, wanted)),
        sqlstate=fault.sqlstate,
    )
    narrow.column = column.name
    return narrow


def _parameter(error: psycopg.Error, statement: Statement | None) -> int | None:
    """Find the remote position of the value that an input or receive function refused (bind_param_error_callback)."""
    if statement is None:
        return None
    words = server_words.fields(error.diag)
    found = _PARAMETER.match(words.context or "")
    if found is None and error.sqlstate == _BINARY_FORMAT:
        found = _BIND_PARAMETER.search(words.message)
    number = int(found[1]) if found is not None else 0
    return statement.takes[number - 1][1] if 0 < number <= len(statement.takes) else None


def _by_modifier(state: str, relation: RelationMap, row: Tuple) -> int | None:
    """Find the remote position of the value that exceeds its column's modifier; None if there is none."""
    types = _MODIFIED.get(state, ())
    return next((i for i, c in enumerate(relation.columns) if c.type_oid in types and exceeds(row, i, c)), None)


def exceeds(row: Tuple, position: int, column: TargetColumn) -> bool:
    """Return whether a value exceeds the modifier of its column, to which an explicit cast would truncate it."""
    if column.type_oid not in (*_CHARACTER, *_BITS, _NUMERIC) or column.typmod < 0:
        return False
    value, binary = row.values[position], row.kinds[position] == BINARY
    if value is None:
        return False
    if column.type_oid in _CHARACTER:
        return bool(value.decode("utf-8", "replace")[column.typmod - _HEADER :].rstrip(" "))
    if column.type_oid in _BITS:
        length = struct.unpack_from(">i", value)[0] if binary and len(value) >= _HEADER else len(value)
        return length != column.typmod if column.type_oid == _FIXED_BITS else length > column.typmod
    return _overflows(value, column.typmod, binary=binary)


def _overflows(value: bytes, typmod: int, *, binary: bool) -> bool:
    """Return whether numeric(precision, scale) refuses a number (apply_typmod in numeric.c)."""
    precision = (typmod - _HEADER) >> 16 & 0xFFFF
    scale = ((typmod - _HEADER & 0x7FF) ^ 1024) - 1024
    try:
        number: Decimal = read_numeric(value) if binary else Decimal(value.decode("ascii", "replace"))
    except (psycopg.DataError, InvalidOperation):
        return False
    if not number.is_finite():
        return number.is_infinite()
    with localcontext() as exact:
        exact.prec, exact.Emax, exact.Emin = 999_999, 999_999, -999_999
        return abs(number.quantize(Decimal(1).scaleb(-scale), ROUND_HALF_UP)) >= Decimal(10) ** (precision - scale)
