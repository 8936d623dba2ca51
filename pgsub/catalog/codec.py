"""Conversions between row types and columns: how values are stored, and which stored values are accepted.

The file may have been edited or damaged, so nothing is trusted. A value of the wrong type or outside its domain raises
:class:`~pgsub.common.errors.StateStoreError`. Statements are built here, only from names that the row types declare.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from pgsub.common.errors import StateStoreError
from pgsub.protocol.lsn import format_lsn, parse_lsn

Row = TypeVar("Row")


class Kind(NamedTuple):
    """The two directions of a conversion: to the stored form, and back (ValueError for an invalid value)."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _typed(value: Any, expected: type) -> Any:
    if not isinstance(value, expected):
        raise ValueError(value)
    return value


def _positive(value: Any) -> int:
    if _typed(value, int) < 1:
        raise ValueError(value)
    return int(value)


def _decode_bool(value: Any) -> bool:
    if value not in (0, 1):
        raise ValueError(value)
    return bool(value)


def _encode_text(value: str) -> str:
    # Data of a server with a broken encoding may contain lone surrogates, which SQLite cannot store.
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()


def _decode_names(value: Any) -> tuple[str, ...]:
    names = _typed(json.loads(_typed(value, str)), list)
    return tuple(_typed(name, str) for name in names)


def optional(kind: Kind) -> Kind:
    """Return the same kind with NULL allowed."""
    return Kind(
        lambda value: None if value is None else kind.encode(value),
        lambda value: None if value is None else kind.decode(value),
    )


def choice(*words: str, **letters: str) -> Kind:
    """Return the kind of a closed set of words.

    :param words: words that are stored unchanged.
    :param letters: words that are stored as the server's letter, with that letter.
    """
    stored = {**dict(zip(words, words)), **letters}
    back = {letter: word for word, letter in stored.items()}

    def look_up(table: dict[str, str], value: Any) -> str:
        if value not in table:
            raise ValueError(value)
        return table[value]

    return Kind(lambda word: look_up(stored, word), lambda value: look_up(back, value))


INT = Kind(int, lambda value: _typed(value, int))
#: A number of sessions. 0 stands for an automatic number, and is stored as that word.
SESSIONS = Kind(lambda number: int(number) or "auto", lambda value: 0 if value == "auto" else _positive(value))
TEXT = Kind(_encode_text, lambda value: _typed(value, str))
BOOL = Kind(int, _decode_bool)
LSN = Kind(format_lsn, lambda value: parse_lsn(_typed(value, str)))
NAMES = Kind(lambda names: json.dumps(list(names), ensure_ascii=False), _decode_names)
JSON = Kind(
    lambda value: _encode_text(json.dumps(value, ensure_ascii=False, default=str)),
    lambda value: _typed(json.loads(_typed(value, str)), dict),
)
ROWS = Kind(JSON.encode, lambda value: [_typed(row, dict) for row in _typed(json.loads(_typed(value, str)), list)])
_KINDS = {"int": INT, "str": TEXT, "bool": BOOL, "Lsn": LSN, "Time": TEXT, "Json": JSON, "Rows": ROWS}


def decoded(kind: Kind, table: str, column: str, value: Any) -> Any:
    """Decode one value.

    :raises StateStoreError: pgsub would not have written it.
    """
    try:
        return kind.decode(value)
    except (ValueError, TypeError):
        raise StateStoreError(
            "state store holds an invalid value", detail=f'Column "{column}" of "{table}" holds {value!r:.80}.'
        ) from None


@dataclass(frozen=True)
class Table(Generic[Row]):
    """A table of the state store whose rows are values of a dataclass.

    :param row: the dataclass, whose fields are the columns (``class_`` is column ``class``).
    :param owner: the column with the subscription's ID if that is not a field of ``row``.
    """

    name: str
    row: type[Row]
    owner: str | None = None

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """The columns in the order of the fields."""
        found = {}
        for field in fields(self.row):  # type: ignore[arg-type]
            word, _, null = str(field.type).partition(" | ")
            found[field.name.rstrip("_")] = optional(_KINDS[word]) if null else _KINDS[word]
        return found

    @cached_property
    def columns(self) -> str:
        """The columns of a row for a SELECT."""
        return ", ".join(f'"{column}"' for column in self.kinds)

    @cached_property
    def select(self) -> str:
        """A SELECT of one subscription's rows, with its ID as the parameter."""
        return f'SELECT {self.columns} FROM "{self.name}" WHERE "{self.owner or "subid"}" = ?'

    @cached_property
    def insert(self) -> str:
        """An INSERT OR REPLACE of one row: the owner, then the fields."""
        names = f'"{self.owner}", {self.columns}' if self.owner else self.columns
        marks = ", ".join("?" * (len(self.kinds) + bool(self.owner)))
        return f'INSERT OR REPLACE INTO "{self.name}" ({names}) VALUES ({marks})'

    @cached_property
    def _fields(self) -> list[tuple[str, Kind]]:
        return list(zip((field.name for field in fields(self.row)), self.kinds.values()))  # type: ignore[arg-type]

    def encode(self, row: Row) -> tuple[Any, ...]:
        """Return the stored values of a row."""
        return tuple([kind.encode(getattr(row, name)) for name, kind in self._fields])

    def decode(self, values: Sequence[Any]) -> Row:
        """Return the row of stored values.

        :raises StateStoreError: pgsub would not have written one of them.
        """
        try:  # finding the wrong value is slow, and there may be thousands of rows
            return self.row(*[kind.decode(value) for (_, kind), value in zip(self._fields, values, strict=True)])
        except (ValueError, TypeError):
            pairs = zip(self.kinds.items(), values, strict=True)
            return self.row(*(decoded(kind, self.name, column, value) for (column, kind), value in pairs))
