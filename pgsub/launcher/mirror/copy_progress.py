"""The progress of running copies: pg_stat_progress_copy from the ledger's chunks and the heartbeats.

Totals are estimates. The catalog has the size of a table on disk, but the copy moves text. Each finished chunk shows
the ratio of the two, so the totals become more exact as the copy continues.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import psycopg

from pgsub.catalog.rows import COMPARE, COPY, CopyRow
from pgsub.catalog.times import utc_now
from pgsub.common.worker_heartbeat import Heartbeat
from pgsub.target.ledger.subscriptions import RelationState

#: Seconds over which the rate is measured.
WINDOW = 10.0
_SHORTEST = 0.5  #: minimum seconds for a rate; shorter spans give only noise

# A chunk may be finished while its last heartbeat is still remembered. Its bytes are then those in the ledger.
_CHUNKS = """
SELECT c.srrelid::bigint, count(*), count(c.xid),
       coalesce(sum(c.bytes_total), 0)::bigint,
       coalesce(sum(c.bytes_total) FILTER (WHERE c.xid IS NOT NULL), 0)::bigint,
       coalesce(sum(c.rows_total), 0)::bigint, coalesce(sum(c.bytes_done), 0)::bigint,
       coalesce(sum(c.rows_done), 0)::bigint,
       array_agg(c.chunk) FILTER (WHERE c.xid IS NULL AND (c.srrelid, c.chunk) IN (
           SELECT l.relid, l.chunk FROM unnest(%s::bigint[]::oid[], %s::int[]) AS l (relid, chunk)))
  FROM pgsub.copy_chunk c WHERE c.subid = %s AND c.srrelid = ANY (%s::bigint[]::oid[]) GROUP BY c.srrelid
"""


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of one table's copy. ``estimated`` values are the catalog's from before the copy, 0 if unknown."""

    relid: int
    total: int
    done: int
    estimated_bytes: int
    estimated_bytes_done: int  #: of the finished chunks
    estimated_rows: int
    bytes_done: int
    rows_done: int
    running: Sequence[int] | None  #: numbers of the chunks that report progress by heartbeats


class CopyProgress:
    """The start and the speed of each copy. The start is the first time that it was seen.

    :param clock: returns seconds, never going backwards.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started: dict[int, str] = {}
        self._seen: dict[int, deque[tuple[float, int]]] = {}

    def read(
        self,
        session: psycopg.Connection,
        subid: int,
        relations: Collection[RelationState],
        heartbeats: Sequence[Heartbeat],
    ) -> list[CopyRow]:
        """Read the progress of copies.

        :param relations: the tables whose sync worker runs.
        :param heartbeats: the subscription's newest heartbeats.
        """
        copying = {one.srrelid: one for one in relations if one.srsubstate == "d"}
        for relid in self._seen.keys() - copying.keys():
            del self._seen[relid], self._started[relid]
        if not copying:
            return []
        live = [heartbeat for heartbeat in heartbeats if heartbeat.chunk >= 0 and heartbeat.worker in copying]
        rows = session.execute(
            _CHUNKS.encode(), ([p.worker for p in live], [p.chunk for p in live], subid, list(copying))
        ).fetchall()
        return [
            self._row(copying[relid], Chunks(relid, *values), [p for p in live if p.worker == relid])
            for relid, *values in rows
        ]

    def _row(self, relation: RelationState, chunks: Chunks, heartbeats: Sequence[Heartbeat]) -> CopyRow:
        moving = sum(heartbeat.bytes_done for heartbeat in heartbeats if heartbeat.chunk in (chunks.running or ()))
        processed = chunks.bytes_done + moving
        return CopyRow(
            relation.srrelid,
            relation.schemaname,
            relation.relname,
            pid=heartbeats[0].pid if heartbeats else None,
            command=COMPARE if relation.adopt else COPY,
            bytes_processed=processed,
            bytes_total=total_bytes(chunks, processed),
            tuples_processed=processed_rows(chunks, moving),
            tuples_total=chunks.estimated_rows,
            chunks_done=chunks.done,
            chunks_total=chunks.total,
            started_at=self._started.setdefault(relation.srrelid, utc_now()),
            bytes_per_second=self._rate(relation.srrelid, processed),
        )

    def _rate(self, relid: int, processed: int) -> int | None:
        """Return the rate over the last seconds in bytes per second, None before it can be measured."""
        seen, now = self._seen.setdefault(relid, deque()), self._clock()
        if seen and processed < seen[-1][1]:
            seen.clear()  # a new attempt
        seen.append((now, processed))
        while len(seen) > 2 and now - seen[1][0] >= WINDOW:
            seen.popleft()
        span = now - seen[0][0]
        return int((processed - seen[0][1]) / span) if span >= _SHORTEST else None


def total_bytes(chunks: Chunks, processed: int) -> int:
    """Return the bytes that the copy will move in all, 0 if unknown.

    :param processed: bytes moved so far.
    """
    if chunks.done == chunks.total:
        return chunks.bytes_done
    scale = chunks.bytes_done / chunks.estimated_bytes_done if chunks.bytes_done and chunks.estimated_bytes_done else 1
    left = (chunks.estimated_bytes - chunks.estimated_bytes_done) * scale
    total = chunks.bytes_done + int(left)
    return max(total, processed) if total else 0


def processed_rows(chunks: Chunks, moving: int) -> int:
    """Return the rows copied so far: those of finished chunks, and an estimate from the bytes of running ones.

    :param moving: bytes moved of unfinished chunks.
    """
    if chunks.rows_done and chunks.bytes_done:
        return chunks.rows_done + moving * chunks.rows_done // chunks.bytes_done
    if not chunks.estimated_bytes:
        return chunks.rows_done
    rows = moving * chunks.estimated_rows // chunks.estimated_bytes
    return chunks.rows_done + min(rows, max(chunks.estimated_rows - chunks.rows_done, 0))
