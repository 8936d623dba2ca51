"""Values under the modifier of their column: numeric(10,2), varchar(5), interval hour.

The server's subscriber passes a column's modifier to the input function (slot_store_data, worker.c). A parameter of a
statement is read without a modifier, and a later explicit cast can give another value: ``varchar(3)`` truncates, and
``interval hour`` makes 0 hours of 5 seconds, where the input function reads 5 hours.
"""

from __future__ import annotations

from psycopg import sql

from pgsub.protocol.messages import Column
from pgsub.target.catalog.relation import TargetColumn

_INTERVALS = (1186, 1187)  #: interval and its array
#: Types for which a modifier that is not smaller changes no value: time, timestamp, timestamptz, timetz, char, varchar,
#: varbit.
_WIDENED = (1083, 1114, 1184, 1266, 1042, 1043, 1562)
_BUILT_IN = 16384  #: types with smaller OIDs are the same on every server


def read(column: TargetColumn, text: sql.Composable) -> sql.Composed:
    """Compose the value that a column's input function reads from a text, with the column's modifier.

    No cast does that. ``json_to_record`` does: it passes a string to the input function (populate_scalar, jsonfuncs.c).

    :param text: an expression of type text.
    """
    # the catalog query wrote the type as SQL
    return sql.SQL(
        "(SELECT pgsub_r.pgsub_v FROM pg_catalog.json_to_record(pg_catalog.json_build_object('pgsub_v'::text, {}))"
        " AS pgsub_r (pgsub_v {}))"
    ).format(text, sql.SQL(column.full_type))


def is_read_by(column: TargetColumn) -> bool:
    """Return whether an assignment can give another value than the column's input function.

    That is so for intervals with fields, and for types that have no cast to themselves.
    """
    if not column.fits:
        return True
    fields = column.typmod >> 16 & 0x7FFF  # INTERVAL_RANGE; all bits are INTERVAL_FULL_RANGE
    return column.type_oid in _INTERVALS and column.typmod >= 0 and fields != 0x7FFF


def value(column: TargetColumn, text: sql.Composable) -> sql.Composed:
    """Compose the value of a column for a text; see :func:`read` for the parameters."""
    if is_read_by(column):
        return read(column, sql.SQL("{}::text").format(text))
    # the catalog query wrote the type as SQL; a parameter takes that type here and is never text
    return sql.SQL("CAST({} AS {})").format(text, sql.SQL(column.full_type))


def changes(remote: Column, column: TargetColumn) -> bool:
    """Return whether a column's modifier may change the value that the publisher sends."""
    if column.typmod < 0:
        return False
    if remote.type_oid != column.type_oid or column.type_oid >= _BUILT_IN:
        return True
    if remote.typmod == column.typmod:
        return False
    return column.type_oid not in _WIDENED or not 0 <= remote.typmod <= column.typmod
