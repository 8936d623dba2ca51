"""Predicts the result of storing a publisher's value in a target column of another type. It asks no server.

In text format, one type's output function writes the value and the other's input function reads it. In binary format,
send and receive functions do, which rarely accept another type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pgsub.commands.preflight.catalog_facts import Column, Type

_HEADER = 4  #: VARHDRSZ, which typmods of character and numeric types include
_INTEGERS = {"int2": 5, "int4": 10, "int8": 19}  #: number of decimal digits
_FLOATS = {"float4": 6, "float8": 15}  #: number of decimal digits that are preserved
_TEXTS = ("text", "varchar", "bpchar", "citext", "name")
_STAMPS = ("timestamp", "timestamptz")
_TIMES = (*_STAMPS, "time", "timetz", "interval")
_BITS = ("bit", "varbit")
#: Maximum length of a value as text.
_LENGTHS = {
    **{"bool": 1, "char": 4, "int2": 6, "int4": 11, "int8": 20, "oid": 10, "float4": 15, "float8": 24, "uuid": 36},
    **{"date": 13, "time": 15, "timetz": 24, "timestamp": 32, "timestamptz": 41, "inet": 49, "cidr": 49},
}
#: Groups of types with the same binary format.
_SAME_BINARY = (frozenset(_TEXTS), frozenset(_BITS), frozenset(_STAMPS))
_BUILT_IN = "pg_catalog"
_UNREADABLE = "values that the target's type cannot read fail"
#: The effect of storing values of the first type in the second, None if every value fits.
_PAIRS = {
    **{("bool", number): "every value fails: t and f are not numbers" for number in (*_INTEGERS, "numeric")},
    ("jsonb", "json"): None,
    ("json", "jsonb"): "values with \\u0000 or other unpaired escapes fail",
    ("timestamp", "timestamptz"): "values are taken as local times of the target's time zone",
    ("date", "timestamptz"): "values are taken as local times of the target's time zone",
    ("time", "timetz"): "values are taken as local times of the target's time zone",
    ("timestamptz", "timestamp"): "values lose their time zone",
    ("timetz", "time"): "values lose their time zone",
    ("date", "timestamp"): None,
    **{(stamp, "date"): "values lose their time of day" for stamp in _STAMPS},
    **{(stamp, "time"): "values lose their date" for stamp in _STAMPS},
}


@dataclass(frozen=True, slots=True)
class Resolved:
    """A column's type without domains."""

    type: Type
    typmod: int
    array: bool
    element: Type  #: the type itself if it is not an array

    @property
    def name(self) -> str:
        """The name of the element type, qualified unless it is built-in or citext."""
        known = self.element.schema == _BUILT_IN or self.element.name == "citext"
        return self.element.name if known else f"{self.element.schema}.{self.element.name}"


def resolve(types: Mapping[int, Type], column: Column) -> Resolved:
    """Return the type of a column's values without domains.

    :param types: the types of the column's server.
    """
    found, typmod = types[column.type_oid], column.typmod
    while found.base:
        typmod = found.base_typmod if typmod < 0 else typmod
        found = types[found.base]
    array = found.element != 0
    element = types[found.element] if array else found
    while element.base:
        element = types[element.base]
    return Resolved(found, typmod, array, element)


def difference(source: Resolved, target: Resolved, *, binary: bool) -> str | None:
    """Return why a value may fail or change in a column of the other type, None if every value fits.

    :return: a clause that follows the names of the two types.
    """
    if source.array != target.array:
        return None if not binary and not target.array and _room(target) is None else "one is an array"
    if binary and source.array and source.element.schema != _BUILT_IN:
        return "binary arrays name their element type by its OID, which differs between the servers"
    if (source.element.schema, source.element.name) == (target.element.schema, target.element.name):
        return _labels(source.element, target.element) or _modifiers(source, target)
    if binary and not any({source.name, target.name} <= same for same in _SAME_BINARY):
        return "binary values fit only the same type"
    return _across(source, target)


def _labels(source: Type, target: Type) -> str | None:
    missing = [f'"{label}"' for label in source.labels if label not in target.labels]
    return f"the target lacks {', '.join(sorted(missing))}" if missing else None


def _modifiers(source: Resolved, target: Resolved) -> str | None:
    """Compare modifiers of the same type. The target's may be narrower."""
    name = source.name
    if target.typmod < 0 or target.typmod == source.typmod:
        return None
    if name in _TEXTS:
        return _too_long(_longest(source), target)
    if name == "numeric":
        return _numeric(_digits(source), target)
    if name == "bit" or (name == "varbit" and (source.typmod < 0 or source.typmod > target.typmod)):
        return "bit strings of another length fail"
    if name in _TIMES and name != "interval" and (source.typmod < 0 or source.typmod > target.typmod):
        return "values are rounded"
    return None


def _across(source: Resolved, target: Resolved) -> str | None:
    """Compare two types whose values are sent as text."""
    if source.element.kind == target.element.kind == "e":
        return _labels(source.element, target.element)
    if target.name in _TEXTS:
        return _too_long(_longest(source), target)
    if (source.name, target.name) in _PAIRS:
        return _PAIRS[source.name, target.name]
    if source.name in (*_INTEGERS, *_FLOATS, "numeric"):
        return _number(source, target)
    if source.name in _BITS and target.name in _BITS:
        return None if target.name == "varbit" and target.typmod < 0 else "bit strings of another length fail"
    return "text that is not a value of the target's type fails" if source.name in _TEXTS else _UNREADABLE


def _number(source: Resolved, target: Resolved) -> str | None:
    integer = source.name in _INTEGERS
    digits = (_INTEGERS[source.name], 0) if integer else _digits(source)
    if target.name in _INTEGERS:
        if digits is None or digits[1] > 0:
            return "values that are not integers fail"
        most = _INTEGERS[target.name]
        return "values out of range fail" if digits[0] > most or (digits[0] == most and not integer) else None
    if target.name == "numeric":
        return None if target.typmod < 0 else _numeric(digits, target)
    if target.name in _FLOATS:
        exact = digits is not None and sum(digits) <= _FLOATS[target.name]
        return None if exact or (source.name, target.name) == ("float4", "float8") else "digits are lost"
    return None if integer and target.name in ("json", "jsonb") else _UNREADABLE


def _digits(resolved: Resolved) -> tuple[int, int] | None:
    """Return the maximum digits before and after a numeric's decimal point, None if unlimited."""
    if resolved.name != "numeric" or resolved.typmod < _HEADER:
        return None
    packed = resolved.typmod - _HEADER
    precision, scale = packed >> 16 & 0xFFFF, ((packed & 0x7FF) ^ 1024) - 1024
    return precision - scale, scale


def _numeric(digits: tuple[int, int] | None, target: Resolved) -> str | None:
    """Return the effect of storing numbers of these digits in a numeric, None if every number fits."""
    limits = _digits(target)
    if limits is None:
        return None
    rounded = digits is None or digits[1] > limits[1]
    if digits is None or digits[0] > limits[0]:
        return "values out of range fail" + (", others are rounded" if rounded else "")
    return "values are rounded" if rounded else None


def _room(target: Resolved) -> int | None:
    """Return how many characters a text type can store, None if unlimited, 0 for another type."""
    if target.name not in _TEXTS:
        return 0
    if target.name == "name":
        return 63
    return target.typmod - _HEADER if target.typmod >= _HEADER and target.name in ("varchar", "bpchar") else None


def _longest(source: Resolved) -> int | None:
    """Return the maximum number of characters of a value, None if unlimited."""
    if source.array:
        return None
    if source.name in _TEXTS:
        return _room(source)
    if source.element.kind == "e":
        return max(map(len, source.element.labels), default=0)
    digits = _digits(source)
    if digits is not None:  # sign, leading zero, and decimal point; at least the length of -Infinity
        return max(sum(map(abs, digits)) + 3, 9)
    if source.name == "bit":
        return max(source.typmod, 1)
    return _LENGTHS.get(source.name)


def _too_long(longest: int | None, target: Resolved) -> str | None:
    room = _room(target)
    if room is None or (longest is not None and longest <= room):
        return None
    return "values are cut" if target.name == "name" else f"values longer than {room} characters fail"
