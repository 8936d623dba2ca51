"""The adoption of a table: the rows that exist on the target are compared with the publisher's.

The server has nothing like it: its copy_table (tablesync.c) adds all rows to the existing ones. Adoption transfers only
the differences (:mod:`~pgsub.tablesync.copy.adoption_writer`).

NOTES
On the publisher, the comparison uses the snapshot of the table's slot; on the target, a snapshot taken here. Apply
leaves the table's changes out, as during a copy. Only one session writes at a time, and it takes its snapshot after it
has obtained the right to write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import psycopg

from pgsub.common.connections.exported_snapshot import ExportedSnapshot
from pgsub.common.query import leave_transaction, scalar
from pgsub.common.subscription import Subscription
from pgsub.publisher.server_errors import translate as publisher_fault
from pgsub.reconcile.comparison import Comparison, sources
from pgsub.reconcile.expressions import ComparedTable
from pgsub.reconcile.reading.side import Side, date_order
from pgsub.reconcile.rows import Differences
from pgsub.target.ledger import worker_takeover
from pgsub.target.ledger.tables.chunks import ChunkKey
from pgsub.target.session import advisory_locks
from pgsub.target.session import connect as target
from pgsub.target.session.connect import SessionName

UNPUBLISHED = "unpublished changes have left"
_LOCK_CLASS = 0x70677361  #: "pgsa"


@dataclass(frozen=True, slots=True)
class Adoption:
    """A table that has rows on the target.

    :ivar left: kinds of differences that stay, because the changes that cause them are not published.
    """

    table: ComparedTable
    left: frozenset[str]


class Adopter:
    """The sessions that compare tables of one slot, for all tables that a task adopts.

    :param session: a session on the target, for queries about it.
    :param snapshot: the slot's snapshot.
    :param there: opens sessions on the publisher.
    :param name: name of the sessions on the target.
    :ivar in_utf8: whether the databases have different encodings.
    """

    def __init__(
        self,
        session: psycopg.Connection,
        sub: Subscription,
        snapshot: ExportedSnapshot,
        *,
        there: Callable[[], psycopg.Connection],
        name: SessionName,
    ) -> None:
        order = date_order(session)
        here = partial(target.open_session, sub, name, views=False)
        self._publisher = Side("publisher", there, snapshot, publisher_fault, order)
        self._target = Side("target", here, None, target.translate, order)
        self._comparison = Comparison((self._publisher, self._target), jobs=sub.copy_workers)
        ours = scalar(session, "SHOW server_encoding")
        self.in_utf8 = ours != self._comparison.on(self._publisher, lambda one: scalar(one, "SHOW server_encoding"))
        self._holder = here()

    def close(self) -> None:
        """Close the sessions."""
        self._comparison.__exit__()
        self._holder.close()

    def compare(self, adoption: Adoption, found: Differences, progress: Callable[[int, int], None]) -> int:
        """Compare a table with its present state on the target, and return the number of the publisher's rows.

        :param found: receives the differences. Those that stay are explained.
        """
        table = adoption.table
        read = sources(table, in_utf8=self.in_utf8, as_sent=True)
        with self.seeing() as comparison:
            result = comparison.compare(
                table, read, lambda key, kind, row: UNPUBLISHED if kind in adoption.left else None, progress, found
            )
        if result.error is not None:
            raise result.error
        return result.publisher_rows

    @contextlib.contextmanager
    def seeing(self) -> Iterator[Comparison]:
        """Take a snapshot of the target as of now; yield the comparison with the slot's snapshot."""
        self._holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        self._target.snapshot = ExportedSnapshot.of(self._holder)
        try:
            yield self._comparison
        finally:
            leave_transaction(self._holder)


@contextlib.contextmanager
def alone(session: psycopg.Connection, key: ChunkKey) -> Iterator[bool]:
    """Make the session the only one that adopts a table; a take-over of the table ends it. Yield whether it is alone.

    :raises LockHeld: the holder of the lock is no worker of the subscription, so no take-over ends it.
    """
    relid = key.claim.worker
    lock = (_LOCK_CLASS, relid - (1 << 32 if relid >> 31 else 0))
    before = scalar(session, "SHOW application_name")
    _call_itself(session, str(SessionName(key.claim.subid, f"copy:{relid}", key.claim.epoch)))
    try:
        with advisory_locks.holding(session, lock, seconds=0.0) as taken:
            if not taken:
                _check_holder(session, key.claim.subid, lock)
            yield taken
    finally:
        with contextlib.suppress(psycopg.Error):
            _call_itself(session, before)


def _check_holder(session: psycopg.Connection, subid: int, lock: tuple[int, int]) -> None:
    found = advisory_locks.holder(session, lock)
    if found is not None and (found.pid is None or not worker_takeover.is_worker(session, found.pid, subid)):
        raise advisory_locks.held(session, lock, "could not obtain the lock for the adoption of a table")


def _call_itself(session: psycopg.Connection, name: str) -> None:
    session.execute("SELECT pg_catalog.set_config('application_name', %s, false)", (name,))
