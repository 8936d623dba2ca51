"""What is read of a table on one server: pieces of it, and their rows as hashes and texts, as SQL."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from psycopg import sql

HASH_BITS = 64
#: Oid, schema and name of a table.
Named = tuple[int, str, str]


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Rows by the first column of their key, from one value until before another.

    :ivar type: that the bounds are read as: one of pg_catalog, which both servers order alike.
    :ivar low: None where it has no lower bound; ``high`` likewise.
    """

    column: str
    type: str
    low: str | None
    high: str | None

    @property
    def conditions(self) -> tuple[sql.Composed, ...]:
        """What holds for these rows, and for no others."""
        name = sql.Identifier(self.column)
        low, high = (
            sql.SQL("{}::pg_catalog.{}").format(sql.Literal(bound), sql.Identifier(self.type))
            for bound in (self.low, self.high)
        )
        above, below = sql.SQL("{} >= {}").format(name, low), sql.SQL("{} < {}").format(name, high)
        if self.low is not None:
            return (above,) if self.high is None else (above, below)
        # no row may be in no range: the publisher's column may be null
        return () if self.high is None else (sql.SQL("({} OR {} IS NULL)").format(below, name),)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a table that one statement reads: blocks of it or of one of its partitions, a range of its key, or all.

    :ivar table: whose blocks they are, None for all of the source.
    :ivar until: the block after the last one, None for the end.
    :ivar blocks: that are read for it, those of large values among them, as they were when the table was divided; 0
        where that is not known.
    :ivar addresses: of its only rows, where not all of them are read.
    :ivar keys: of its rows, where they are not read by blocks.
    """

    table: Named | None = None
    first: int = 0
    until: int | None = None
    blocks: int = 0
    addresses: tuple[str, ...] | None = None
    keys: KeyRange | None = None

    @property
    def small(self) -> bool:
        """Whether it is known to be one; behind the last bound of a key there may be any number of rows."""
        return self.table is not None and (self.keys is None or self.keys.high is not None)

    @property
    def leaf(self) -> sql.Composed | None:
        """The table as SQL."""
        return None if self.table is None else sql.SQL("ONLY {}").format(sql.Identifier(*self.table[1:]))


@dataclass(frozen=True, slots=True)
class Source:
    """A table on one server.

    :ivar oid: there.
    :ivar relation: as SQL, with ONLY where it is no partitioned table.
    :ivar name: schema and name that ``relation`` has.
    :ivar conditions: which of its rows are compared.
    :ivar values: texts of the compared columns.
    :ivar key_hash: of a row; ``row_hash`` likewise.
    :ivar loose: whether one key may have several texts, so that its hash chooses no sample.
    :ivar more: texts that are read with the values, and not compared.
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
        """Return the tables that a statement names, which reads these pieces, or all of it."""
        return {piece.table or (self.oid, *self.name) for piece in pieces} or {(self.oid, *self.name)}

    def in_lock_order(self, pieces: Iterable[Piece]) -> list[Named]:
        """Return the table and what pieces name of it, as the server locks a tree (find_all_inheritors, pg_inherits.c).

        In another order a TRUNCATE of the table, or an ALTER TABLE, could end in a deadlock.
        """
        return [*self.named(), *sorted(self.named(pieces) - self.named())]

    def rows(self, piece: Piece, sample: float | None, *, values: bool = False) -> sql.Composed:
        """Compose the rows of a piece as hashes ``k`` and ``r``, and texts ``v1`` and so on if they are wanted.

        :param sample: percent of the keys; all of them where equal ones may have different hashes.
        """
        texts = [
            sql.SQL("{} AS {}").format(v, sql.Identifier(f"v{n}")) for n, v in enumerate((*self.values, *self.more), 1)
        ]
        columns = [sql.SQL("{} AS k").format(self.key_hash), sql.SQL("{} AS r").format(self.row_hash)]
        conditions = [*self.conditions, *_chosen_rows(piece)]
        if sample is not None and not self.loose:  # bits that do not choose the bucket
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
    """Compose the condition that a row's key hash begins with one of some prefixes; whole hashes are of rows.

    :param bits: of each.
    """
    if bits == HASH_BITS:
        return sql.SQL("r = ANY ({}::pg_catalog.int8[])").format(_array(sorted(prefixes)))
    return sql.SQL("{} = ANY ({}::pg_catalog.int8[])").format(prefix(bits), _array(sorted(prefixes)))


def prefix(bits: int) -> sql.Composed:
    """Compose the first bits of a key's hash."""
    return sql.SQL("((k >> {}) & {}::pg_catalog.int8)").format(
        sql.Literal(HASH_BITS - bits), sql.Literal((1 << bits) - 1)
    )


def _array(numbers: Sequence[int]) -> sql.Literal:
    return sql.Literal("{" + ",".join(map(str, numbers)) + "}")
