"""Built-in types as SQL, composed from numbers alone, for a server other than the one with the column.

NOTES
A server's answer may be anything, because its superuser can replace ``format_type()``. So no text from the target, not
even the name of a type, becomes SQL for the publisher. The OIDs of built-in types are the same on every server.
"""

from __future__ import annotations

from psycopg import sql
from psycopg.postgres import types

_NUMERIC, _INTERVAL = 1700, 1186
_WITH_PRECISION = frozenset({1083, 1114, 1184, 1266})  #: time, timestamp, timestamptz, timetz
#: char, varchar, bit, varbit: a cast to a length truncates them.
_WITH_LENGTH = frozenset({1042, 1043, 1560, 1562})
_VARHDRSZ = 4
_ANY_PRECISION = 0xFFFF  #: INTERVAL_FULL_PRECISION

#: Name of each type, and the OID of the type that its modifier belongs to: its own, or its element type.
_TYPES = {
    oid: (prefix + one.name.strip('"'), one.oid)
    for one in types
    for prefix, oid in (("", one.oid), ("_", one.array_oid))
    if oid
}


def has_length(type_oid: int) -> bool:
    """Return whether the type's modifier is a length to which an explicit cast truncates a value."""
    return type_oid in _TYPES and _TYPES[type_oid][1] in _WITH_LENGTH


def written(type_oid: int, typmod: int) -> sql.Composed | None:
    """Compose a built-in type with its modifier; return None for another type or modifier.

    A length is left out, because a cast to it would truncate a value.
    """
    if type_oid not in _TYPES:
        return None
    name, element = _TYPES[type_oid]
    modifiers = () if typmod < 0 else _modifiers(element, typmod)
    if modifiers is None:
        return None
    numbers = sql.SQL(", ").join(sql.Literal(int(one)) for one in modifiers)
    shown = sql.SQL("({})").format(numbers) if modifiers else sql.SQL("")
    return sql.Composed([sql.Identifier("pg_catalog", name), shown])


def _modifiers(type_oid: int, typmod: int) -> tuple[int, ...] | None:
    """Return the arguments of the type's typmodin (numerictypmodin, anytime_typmodin, intervaltypmodin)."""
    if type_oid in _WITH_LENGTH:
        return ()
    if type_oid in _WITH_PRECISION:
        return (typmod,)
    if type_oid == _NUMERIC:
        precision, scale = divmod(typmod - _VARHDRSZ, 1 << 16)
        return precision, ((scale & 0x7FF) ^ 0x400) - 0x400
    if type_oid == _INTERVAL:
        fields, precision = divmod(typmod, 1 << 16)
        return (fields,) if precision == _ANY_PRECISION else (fields, precision)
    return None
