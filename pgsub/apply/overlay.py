"""What a transaction that is only looked at has done to a table so far, over what the target has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation

from pgsub.target.look import Row, TableLook
from pgsub.target.mapping import RelationMap
from pgsub.target.relation import TargetColumn

_NUMERIC = 1700

#: Values of columns that can be compared here, whatever their types.
Values = tuple[object, ...]


@dataclass(slots=True)
class Version:
    """A row as the transaction has left it so far; ``row`` None: it is gone.

    :ivar place: where it was on the target; ``xid`` which transaction wrote it there. None: this very one.
    """

    row: Row | None
    place: str | None = None
    xid: str | None = None


@dataclass(slots=True)
class Done:
    """What a transaction did to a table so far.

    :ivar versions: rows by key; ``taken`` the keys of those that are there, by unique index and its values.
    :ivar superseded: places of rows of the target that are not what they are there any more.
    :ivar tainted: keys of rows that an earlier change could not bring.
    """

    versions: dict[Values, Version] = field(default_factory=dict)
    taken: dict[tuple[str, Values], Values] = field(default_factory=dict)
    superseded: set[str] = field(default_factory=set)
    tainted: set[Values] = field(default_factory=set)
    emptied: bool = False

    def put(self, key: Values, version: Version, unique: list[tuple[str, Values]]) -> None:
        """A row has been written, or is gone."""
        self.versions[key] = version
        for one in unique:
            if version.row is not None:
                self.taken[one] = key
            elif self.taken.get(one) == key:
                del self.taken[one]


@dataclass(slots=True)
class Table:
    """A target table, and what the transaction did to it so far."""

    relation: RelationMap
    look: TableLook
    done: Done = field(default_factory=Done)

    @property
    def key_columns(self) -> list[str]:
        names = [self.relation.columns[i].name for i in self.relation.lookup]
        return [*names, *(c.name for c in self.relation.local_only)]

    def key(self, row: Row, columns: Sequence[str] | None = None) -> Values:
        """Values that can be compared here."""
        target = self.relation.target
        names = self.key_columns if columns is None else columns
        return tuple(_comparable(target.column(name), row.get(name)) for name in names)

    def unique(self, row: Row) -> list[tuple[str, Values]]:
        """What no other row may have, by unique index; of indexes on expressions only the target knows."""
        found = []
        for index in self.look.indexes:
            values = self.key(row, index.columns)
            if index.plain and (None not in values or index.nulls_not_distinct):
                found.append((index.name, values))
        return found

    def gone(self, key: Values, found: Version) -> None:
        """The row that was found is not there any more."""
        assert found.row is not None
        if found.place is not None:
            self.done.superseded.add(found.place)
        self.done.put(key, Version(None), self.unique(found.row))


def _comparable(column: TargetColumn | None, value: str | None) -> object:
    """A value whose equality is the type's, as far as its text can tell."""
    if column is None or value is None:
        return value
    if column.type_oid == _NUMERIC:
        try:
            number = Decimal(value)
        except InvalidOperation:
            return value
        return number if number.is_finite() else value
    return value.lower() if column.type_name.endswith("citext") else value
