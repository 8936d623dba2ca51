"""Types as SQL of a server that is not the one with the column: written here, of numbers alone.

NOTES
What a server answers may be anything: its superuser can replace ``format_type()``. So no text of the target, not even
the name of a type, becomes SQL of the publisher. The oids of built-in types are the same on every server.
"""

from __future__ import annotations

from psycopg import sql
from psycopg.postgres import types

_NUMERIC, _INTERVAL = 1700, 1186
_WITH_PRECISION = frozenset({1083, 1114, 1184, 1266})  #: time, timestamp, timestamptz, timetz
#: char, varchar, bit, varbit, which a cast to a length cuts.
_WITH_LENGTH = frozenset({1042, 1043, 1560, 1562})
_VARHDRSZ = 4
_ANY_PRECISION = 0xFFFF  #: INTERVAL_FULL_PRECISION

#: Name of each type, and the oid of what its modifier is of: its own, or that of its elements.
_TYPES = {
    oid: (prefix + one.name.strip('"'), one.oid)
    for one in types
    for prefix, oid in (("", one.oid), ("_", one.array_oid))
    if oid
}


def has_length(type_oid: int) -> bool:
    """Return whether a type's modifier is a length that an explicit cast cuts a value to."""
    return type_oid in _TYPES and _TYPES[type_oid][1] in _WITH_LENGTH


def written(type_oid: int, typmod: int) -> sql.Composed | None:
    """Compose a built-in type with its modifier; None where it is another type, or has another modifier.

    A length is left out: a cast to it would cut a value.
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
    """Return what the type's typmodin takes (numerictypmodin, anytime_typmodin, intervaltypmodin)."""
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
