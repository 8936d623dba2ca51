"""The plan of a table's copy: one transaction, or a list of chunks. No I/O except the check under the lock."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import psycopg
from psycopg import sql

from pgsub.common import conflict_rules, table_lock
from pgsub.common.query import scalar
from pgsub.common.subscription import Subscription
from pgsub.publisher.copy_statements import copy_statement
from pgsub.publisher.tables import Leaf, RemoteTable
from pgsub.target.catalog.relation import TargetRelation
from pgsub.target.ledger.tables.chunks import Part
from pgsub.target.session import roles
from pgsub.target.sql import statements
from pgsub.target.sql.statement_builder import only, table_name

#: Maximum size of a chunk. PGSUB_CHUNK_BYTES is for tests, so that small tables have chunks too.
CHUNK_BYTES = int(os.environ.get("PGSUB_CHUNK_BYTES", 64 << 20))
#: A smaller table is copied in one transaction, as by the server.
CHUNKED_FROM_BYTES = CHUNK_BYTES
#: Maximum wait for local writers.
LOCK_TIMEOUT = "5s"
#: Minimum number of chunks for each task, so that the last task does not run alone for long.
CHUNKS_PER_TASK = 4
#: The minimum size of a chunk is the maximum divided by this, because each chunk costs some round trips.
_SMALLEST = 8
_OF_INSERTS = frozenset({"insert_exists", "multiple_unique_conflicts", conflict_rules.IDENTICAL})


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a table: the publisher's COPY and its expected result."""

    number: int
    copy_out: str
    bytes: int
    rows: int | None  #: estimate; None: the table was never analyzed
    leaf: Leaf | None = None  #: partition or table whose blocks it reads; None: the whole table
    part: Part | None = None  #: these blocks, if the rows can be compared with them later


def atomic_reason(sub: Subscription, remote: RemoteTable, target: TargetRelation, *, replica: bool) -> str | None:
    """Return why a table must be copied in one transaction; None if chunks are safe, provided that it is empty.

    While chunks commit, a part of the table is visible, and the effects of a trigger cannot be undone. Rows that
    conflict rules decide are written by subtransactions, so nobody could tell later which chunk they belong to.
    """
    if sub.copy_atomic:
        return "copy_atomic is set"
    if remote.bytes < CHUNKED_FROM_BYTES:
        return "the table is small"
    if not all(leaf.readable for leaf in remote.leaves):
        return "a partition cannot be read by itself"
    if not replica:
        return "session_replication_role cannot be set"
    if target.fires:
        return "a trigger on the target table would fire"
    if target.rules:
        return "a rule on the target table would apply"
    if rules_of(sub, target):
        return "rules decide about conflicts of its rows"
    return None


def binary_copy(sub: Subscription, remote: RemoteTable, target: TargetRelation, publisher_version: int) -> bool:
    """Return whether the copy uses the binary format, by the rules of the server's copy_table."""
    if not sub.binary or publisher_version < 160000:
        return False
    types = {c.name: c.type_oid for c in target.columns}
    # OIDs of other than built-in types have no meaning on another server
    return all(c.type_oid < 10000 and types.get(c.name) == c.type_oid for c in remote.columns)


def rules_of(sub: Subscription, target: TargetRelation) -> tuple[tuple[str, str], ...]:
    """Return the conflict rules that may apply to a copied row."""
    found = conflict_rules.of_table(sub.on_conflict, target.schema, target.name)
    return tuple(rule for rule in found if rule[0] in _OF_INSERTS)


def make(
    sub: Subscription,
    remote: RemoteTable,
    target: TargetRelation,
    *,
    atomic: bool,
    publisher_version: int,
    done: Collection[Part] = (),
    number: int = 0,
) -> tuple[str, list[Chunk]]:
    """Compose the statements of a copy.

    :param atomic: make one chunk, whose rows commit together with ``f``.
    :param done: parts that need no chunk.
    :param number: number of the first chunk.
    :return: the target's COPY, and the chunks.
    """
    names = [c.name for c in remote.columns]
    rules = rules_of(sub, target)
    binary = not rules and binary_copy(sub, remote, target, publisher_version)
    times = any(resolution in conflict_rules.BY_TIME for _, resolution in rules)
    copy_in = statements.copy_in(target, names, binary=binary).as_string(None)
    copy_out = partial(copy_statement, remote, columns=names, binary=binary, times=times)
    if atomic:
        return copy_in, [Chunk(0, copy_out().as_string(None), remote.bytes, _rows(remote.reltuples))]
    chunks = []
    for at, (leaf, start, stop) in enumerate(chunk_ranges(sub, remote, done), number):
        text = copy_out(leaf=leaf, ctid_from=start, ctid_to=stop).as_string(None)
        until = stop or max(leaf.pages, start + 1)
        share = (until - start) / max(leaf.pages, 1)
        # a row that a rule may have changed cannot be compared
        part = None if rules else Part(leaf.schema, leaf.name, start, until, tuple(names))
        chunks.append(Chunk(at, text, int(leaf.bytes * share), _rows(leaf.reltuples * share), leaf, part))
    return copy_in, chunks


def copy_of_rows(remote: RemoteTable, leaf: Leaf, ctids: Sequence[str], *, binary: bool) -> str:
    """Compose the publisher's COPY of some rows of a leaf, by ctid."""
    names = [c.name for c in remote.columns]
    return copy_statement(remote, columns=names, leaf=leaf, ctids=ctids, binary=binary).as_string(None)


def _rows(reltuples: float) -> int | None:
    return int(reltuples) if reltuples >= 0 else None


def chunk_ranges(
    sub: Subscription, remote: RemoteTable, done: Collection[Part] = ()
) -> list[tuple[Leaf, int, int | None]]:
    """Divide a table into chunks small enough for all tasks: leaf, first block, block after the last.

    :param done: parts that are left out.
    """
    size = min(CHUNK_BYTES, max(CHUNK_BYTES // _SMALLEST, remote.bytes // (CHUNKS_PER_TASK * sub.copy_workers)))
    return [
        (leaf, start, stop)
        for leaf in remote.leaves
        for first, until in gaps(leaf, done)
        for start, stop in ranges(leaf, size, first, until)
    ]


def gaps(leaf: Leaf, done: Collection[Part]) -> list[tuple[int, int | None]]:
    """Return the ranges of blocks of a leaf that are in none of the parts. The last one is open-ended."""
    ours = sorted((part.first, part.until) for part in done if (part.schema, part.name) == (leaf.schema, leaf.name))
    found: list[tuple[int, int | None]] = []
    at = 0
    for first, until in ours:
        if first > at:
            found.append((at, first))
        at = max(at, until)
    return [*found, (at, None)]


def ranges(leaf: Leaf, size: int, first: int = 0, until: int | None = None) -> Sequence[tuple[int, int | None]]:
    """Divide a leaf into block ranges of roughly equal size, TOAST included.

    :param size: bytes of a range; a block is not divided.
    :param first: first block.
    :param until: block after the last; None: the last range is open-ended.
    """
    pages = (max(leaf.pages, first) if until is None else until) - first
    count = max(1, min(pages, -(-leaf.bytes * pages // max(leaf.pages, 1) // size)))
    bounds = [first + pages * i // count for i in range(count)]
    return [(start, bounds[i + 1] if i + 1 < count else until) for i, start in enumerate(bounds)]


def empty_under_lock(connection: psycopg.Connection, target: TargetRelation) -> bool:
    """Return whether the table is known to be empty; others are kept from writing until the transaction ends.

    False also if a local transaction keeps it locked, or the role may not lock or read it: then it is copied in one
    transaction, beside that one. Otherwise everybody who may write to the table could keep it from being copied.
    """
    hindered = (psycopg.errors.LockNotAvailable, psycopg.errors.InsufficientPrivilege)
    with contextlib.suppress(*hindered), connection.transaction():
        lock_out_writers(connection, target)
        return is_empty(connection, target)
    return False


def lock_out_writers(connection: psycopg.Connection, target: TargetRelation) -> None:
    """Lock a table against writers until the caller's transaction ends.

    :raises psycopg.errors.LockNotAvailable: after :data:`LOCK_TIMEOUT`; other sessions queue behind a waiting lock.
    """
    connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(LOCK_TIMEOUT)))
    with roles.using(connection, target, table_lock.ALONE):
        lock = sql.SQL("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE")
        connection.execute(lock.format(table_name(target)))


def is_empty(connection: psycopg.Connection, target: TargetRelation) -> bool:
    """Return whether a table is empty. Its inheritance children do not count."""
    query = sql.SQL("SELECT true FROM {} LIMIT 1").format(only(target))
    with connection.transaction(), roles.using(connection, target, table_lock.READING):
        return scalar(connection, query) is None
