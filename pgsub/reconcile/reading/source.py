"""A table on one server as SQL: pieces of it, and their rows as hashes and texts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from psycopg import sql

HASH_BITS = 64
#: OID, schema and name of a table.
Named = tuple[int, str, str]


@dataclass(frozen=True, slots=True)
class KeyRange:
    """A range of rows by the first column of their key, from one value up to another.

    :ivar type: type as which the bounds are read: one of pg_catalog, which both servers sort alike.
    :ivar low: lower bound, included; ``high``: upper bound, excluded. None: no bound.
    """

    column: str
    type: str
    low: str | None
    high: str | None

    @property
    def conditions(self) -> tuple[sql.Composed, ...]:
        """The conditions that select exactly these rows."""
        name = sql.Identifier(self.column)
        low, high = (
            sql.SQL("{}::pg_catalog.{}").format(sql.Literal(bound), sql.Identifier(self.type))
            for bound in (self.low, self.high)
        )
        above, below = sql.SQL("{} >= {}").format(name, low), sql.SQL("{} < {}").format(name, high)
        if self.low is not None:
            return (above,) if self.high is None else (above, below)
        # every row must be in a range: the publisher's column may be null
        return () if self.high is None else (sql.SQL("({} OR {} IS NULL)").format(below, name),)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a table that one statement reads: blocks of it or of one of its partitions, a range of its key, or all.

    :ivar table: table of the blocks; None: the whole source.
    :ivar until: the block after the last one; None: the end of the table.
    :ivar blocks: number of blocks to read, including TOAST, when the table was divided; 0: unknown.
    :ivar addresses: ctids of the only rows to read; None: all rows.
    :ivar keys: range of the rows, if they are not read by blocks.
    """

    table: Named | None = None
    first: int = 0
    until: int | None = None
    blocks: int = 0
    addresses: tuple[str, ...] | None = None
    keys: KeyRange | None = None

    @property
    def small(self) -> bool:
        """Whether it is known to be small. The last range of a key may have any number of rows."""
        return self.table is not None and (self.keys is None or self.keys.high is not None)

    @property
    def leaf(self) -> sql.Composed | None:
        """The table as SQL; None: the whole source."""
        return None if self.table is None else sql.SQL("ONLY {}").format(sql.Identifier(*self.table[1:]))


@dataclass(frozen=True, slots=True)
class Source:
    """A table on one server.

    :ivar oid: OID on that server.
    :ivar relation: the table as SQL, with ONLY unless it is partitioned.
    :ivar name: schema and name in ``relation``.
    :ivar conditions: conditions for the rows to compare.
    :ivar values: texts of the compared columns.
    :ivar key_hash: hash of a row's key; ``row_hash``: hash of the row.
    :ivar loose: one key may have several texts, so its hash cannot select a sample.
    :ivar more: texts that are read with the values, but not compared.
    """

    oid: int
    name: tuple[str, str]
    relation: sql.Composable
    conditions: tuple[sql.Composable, ...]
    values: tuple[sql.Composable, ...]
    key_hash: sql.Composable
    row_hash: sql.Composable
    loose: bool = False
    more: tuple[sql.Composable, ...] = ()

    def named(self, pieces: Iterable[Piece] = ()) -> set[Named]:
        """Return the tables that a statement names if it reads these pieces; with none, it reads the whole table."""
        return {piece.table or (self.oid, *self.name) for piece in pieces} or {(self.oid, *self.name)}

    def in_lock_order(self, pieces: Iterable[Piece]) -> list[Named]:
        """Return the table and the pieces' partitions in the server's lock order (find_all_inheritors, pg_inherits.c).

        In another order, a deadlock with TRUNCATE or ALTER TABLE of the table would be possible.
        """
        return [*self.named(), *sorted(self.named(pieces) - self.named())]

    def rows(self, piece: Piece, sample: float | None, *, values: bool = False) -> sql.Composed:
        """Compose the rows of a piece as hashes ``k`` and ``r`` and, with ``values``, texts ``v1`` and so on.

        :param sample: percentage of the keys; None: all. Ignored if equal keys may have different hashes.
        """
        texts = [
            sql.SQL("{} AS {}").format(v, sql.Identifier(f"v{n}")) for n, v in enumerate((*self.values, *self.more), 1)
        ]
        columns = [sql.SQL("{} AS k").format(self.key_hash), sql.SQL("{} AS r").format(self.row_hash)]
        conditions = [*self.conditions, *_chosen_rows(piece)]
        if sample is not None and not self.loose:  # by other bits than those of the bucket
            limit = sql.Literal(int(sample * 10_000))
            conditions.append(sql.SQL("(({}) & 2147483647) % 1000000 < {}").format(self.key_hash, limit))
        return sql.SQL("SELECT {} FROM {}{}").format(
            sql.SQL(", ").join([*columns, *(texts if values else [])]),
            self.relation if piece.leaf is None else piece.leaf,
            sql.SQL(" WHERE {}" if conditions else "").format(sql.SQL(" AND ").join(conditions)),
        )


def _chosen_rows(piece: Piece) -> Iterator[sql.Composed]:
    if piece.first:
        yield sql.SQL("ctid >= {}::pg_catalog.tid").format(f"({piece.first},0)")
    if piece.until is not None:
        yield sql.SQL("ctid < {}::pg_catalog.tid").format(f"({piece.until},0)")
    if piece.addresses is not None:
        yield sql.SQL("ctid = ANY ({}::pg_catalog.tid[])").format(list(piece.addresses))
    if piece.keys is not None:
        yield from piece.keys.conditions


def chosen(bits: int, prefixes: Collection[int]) -> sql.Composed:
    """Compose the condition that a row's key hash begins with a prefix. A prefix of all bits is the row's own hash.

    :param bits: number of bits of each prefix.
    """
    if bits == HASH_BITS:
        return sql.SQL("r = ANY ({}::pg_catalog.int8[])").format(_array(sorted(prefixes)))
    return sql.SQL("{} = ANY ({}::pg_catalog.int8[])").format(prefix(bits), _array(sorted(prefixes)))


def prefix(bits: int) -> sql.Composed:
    """Compose the first bits of the key's hash."""
    return sql.SQL("((k >> {}) & {}::pg_catalog.int8)").format(
        sql.Literal(HASH_BITS - bits), sql.Literal((1 << bits) - 1)
    )


def _array(numbers: Sequence[int]) -> sql.Literal:
    return sql.Literal("{" + ",".join(map(str, numbers)) + "}")
