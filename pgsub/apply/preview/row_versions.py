"""Simulated effects of a transaction on a table, over the rows of the target."""

from __future__ import annotations

from dataclasses import dataclass, field

from pgsub.apply.preview.finding import sent
from pgsub.protocol.messages import Tuple
from pgsub.protocol.reader import UNCHANGED
from pgsub.target.catalog.relation_map import RelationMap
from pgsub.target.sql.row_equality import Fingerprint
from pgsub.target.sql.row_lookup import Row, TableLookup


@dataclass(slots=True)
class Version:
    """A row as the transaction has left it; ``row`` is None if it is deleted.

    :ivar place: its location on the target; ``xid`` is the transaction that wrote it. None if the previewed one did.
    """

    row: Row | None
    place: str | None = None
    xid: str | None = None


@dataclass(slots=True)
class Done:
    """The effects of a transaction on a table so far.

    :ivar versions: rows by key; ``taken`` has the keys of existing rows by unique index and its values.
    :ivar superseded: locations of target rows that the transaction has changed or deleted.
    :ivar tainted: keys of rows that an earlier change could not write.
    """

    versions: dict[Fingerprint, Version] = field(default_factory=dict)
    taken: dict[tuple[str, Fingerprint], Fingerprint] = field(default_factory=dict)
    superseded: set[str] = field(default_factory=set)
    tainted: set[Fingerprint] = field(default_factory=set)
    emptied: bool = False

    def empty(self) -> None:
        """Delete all rows."""
        for one in (self.versions, self.taken, self.superseded, self.tainted):
            one.clear()
        self.emptied = True

    def put(self, key: Fingerprint, version: Version, unique: list[tuple[str, Fingerprint]]) -> None:
        """Write or delete a row."""
        self.versions[key] = version
        for one in unique:
            if version.row is not None:
                self.taken[one] = key
            elif self.taken.get(one) == key:
                del self.taken[one]


@dataclass(slots=True)
class Table:
    """A target table, and the effects of the transaction on it so far."""

    relation: RelationMap
    lookup: TableLookup
    done: Done

    @property
    def key_columns(self) -> list[str]:
        names = [self.relation.columns[i].name for i in self.relation.lookup]
        return [*names, *(c.name for c in self.relation.local_only)]

    def key(self, row: Row) -> Fingerprint:
        """Return a fingerprint of a row's key; it is equal for keys that the target considers equal."""
        return self.lookup.fingerprints.of(row, self.key_columns)

    def sent(self, values: Tuple, *, nulls: bool = False) -> Row:
        """Return sent values as the target reads them; unchanged TOAST values are left out, or NULL in a whole row."""
        columns = self.relation.columns
        wanted = [i for i in range(len(columns)) if nulls or values.kinds[i] != UNCHANGED]
        return self.lookup.read({columns[i].name: sent(values, i, columns[i]) for i in wanted})

    def gone(self, key: Fingerprint, found: Version) -> None:
        """Delete the row that was found."""
        assert found.row is not None
        if found.place is not None:
            self.done.superseded.add(found.place)
        self.done.put(key, Version(None), self.lookup.fingerprints.unique(found.row))
