"""Differences that the ledger explains: rows that were skipped, held or kept by a rule, by the hashes of their keys.

The ledger keeps changes that were skipped and not replayed, and changes of a held table. Their rows differ because
these changes wait there. A row that a rule kept differs because an operator set the rule. A change that a conflict left
out without being kept is lost. It is recorded, but it is no explanation.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import psycopg
from psycopg import sql

from pgsub.common import table_lock
from pgsub.protocol import encoder
from pgsub.protocol.decoder import decode_change
from pgsub.protocol.messages import Delete, Insert, Relation, Tuple, Update
from pgsub.protocol.reader import TEXT
from pgsub.reconcile import expressions
from pgsub.reconcile.equality import unnested
from pgsub.reconcile.expressions import ComparedTable
from pgsub.reconcile.hashes import hashes
from pgsub.reconcile.rows import LEFT_OUT

_BATCH = 1000
#: Maximum number of changes of one table that are read. Further ones do not explain anything.
MOST = 200_000

SKIPPED, HELD, CONFLICT = "skipped_change", "held_change", "conflict"

#: Values of a row by column, texts only.
Values = Mapping[str, Any]


def explained(
    connection: psycopg.Connection,
    subid: int,
    table: ComparedTable,
    conflicts: Iterable[tuple[str, Values]],
    *,
    names: Sequence[tuple[str, str]],
    in_utf8: bool,
) -> dict[int, str]:
    """Read which rows of a table the ledger and the record of conflicts explain, or have as left out.

    :param connection: on the target, in a transaction that sees the snapshot.
    :param conflicts: rows of conflicts whose change was not applied: with :data:`CONFLICT` if a rule kept the existing
        row, otherwise with :data:`~pgsub.reconcile.rows.LEFT_OUT`.
    :param names: schemas and names under which rows may be recorded: the subscription's, the table's, its partitions'.
    :return: reasons by the hash of the key.
    """
    found: dict[int, str] = {}
    recorded = list(conflicts)
    sources = (
        (LEFT_OUT, (row for reason, row in recorded if reason == LEFT_OUT)),
        (CONFLICT, (row for reason, row in recorded if reason == CONFLICT)),
        (SKIPPED, _skipped(connection, subid, names)),
        (HELD, _held(connection, subid, table.target.oid)),
    )
    for reason, rows in sources:
        keys = (_key(table, row) for row in itertools.islice(rows, MOST))
        for some in _batches(key for key in keys if key is not None):
            found.update(dict.fromkeys(_hashed(connection, table, some, in_utf8=in_utf8), reason))
    return found


def _skipped(connection: psycopg.Connection, subid: int, names: Sequence[tuple[str, str]]) -> Iterator[Values]:
    schemas, tables = map(list, zip(*names, strict=True))
    rows = connection.execute(
        "SELECT body->'old', body->'new' FROM pgsub.skipped_change WHERE subid = %s AND replayed_at IS NULL"
        " AND (schemaname, relname) IN (SELECT * FROM ROWS FROM (unnest(%s::text[]), unnest(%s::text[])) AS n)",
        (subid, schemas, tables),
    )
    for row in rows:
        yield from (one for one in row if one)


def _held(connection: psycopg.Connection, subid: int, relid: int) -> Iterator[Values]:
    rows = connection.execute(
        "SELECT relation, messages FROM pgsub.held_change WHERE subid = %s AND srrelid = %s", (subid, relid)
    )
    for described, messages in rows:
        relation = decode_change(bytes(described), False)
        assert isinstance(relation, Relation)
        for payload in encoder.split(bytes(messages)):
            message = decode_change(payload, False)
            if isinstance(message, Insert | Update):
                yield _texts(relation, message.new)
            if isinstance(message, Update | Delete) and message.old is not None:
                yield _texts(relation, message.old)


def _texts(relation: Relation, row: Tuple) -> Values:
    named = zip(relation.columns, row.kinds, row.values, strict=True)
    return {c.name: value.decode(errors="replace") for c, kind, value in named if kind == TEXT and value is not None}


def _key(table: ComparedTable, row: Values) -> tuple[str | None, ...] | None:
    names = [table.columns[position].name for position in table.key]
    if table.keyed:
        values = tuple(row.get(name) for name in names)
        return values if all(isinstance(value, str) for value in values) else None
    return tuple(value if isinstance(value, str) else None for value in (row.get(name) for name in names))


def _batches(keys: Iterator[tuple[str | None, ...]]) -> Iterator[list[tuple[str | None, ...]]]:
    while some := list(itertools.islice(keys, _BATCH)):
        yield some


def _hashed(
    connection: psycopg.Connection, table: ComparedTable, keys: list[tuple[str | None, ...]], *, in_utf8: bool
) -> list[int]:
    """Hash keys on the target, as its rows' keys are hashed; return none if a value is invalid for its type.

    :raises TableReplaced: a type was renamed.
    """
    columns = [table.columns[position] for position in table.key]
    values = [expressions.target_values(table)[position] for position in table.key]
    hashed, _ = hashes(values, range(len(values)), in_utf8=in_utf8)
    read = [
        sql.SQL("u.{}::{} AS {}").format(
            sql.Identifier(f"a{n}"), sql.SQL(c.uncut or c.full_type), sql.Identifier(c.name)
        )
        for n, c in enumerate(columns)
    ]
    names = [sql.Identifier(f"a{n}") for n in range(len(columns))]
    query = sql.SQL("SELECT {} FROM (SELECT {} FROM ROWS FROM ({}) AS u ({})) AS s").format(
        hashed,
        sql.SQL(", ").join(read),
        unnested(len(columns)),
        sql.SQL(", ").join(names),
    )
    with contextlib.suppress(psycopg.DataError), connection.transaction():
        table_lock.verify_types(connection, table.target.named_types, table.target.schema, table.target.name)
        arrays = [list(one) for one in zip(*keys, strict=True)]
        return [row[0] for row in psycopg.RawCursor(connection).execute(query, arrays)]
    return []
