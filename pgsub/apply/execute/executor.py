"""Executes changes in order inside one open target transaction, at once or while they are received.

It receives transactions and a filter, and does not use the ledger. Changes are collected into blocks. A block is
executed as sets where the result is known to be the same, else row by row. Mirrors apply_spooled_messages (worker.c),
and for savepoints pa_start_subtrans and pa_stream_abort (applyparallelworker.c).
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import psycopg

from pgsub.apply.conflicts import conflict
from pgsub.apply.conflicts.conflict import Record
from pgsub.apply.conflicts.error_context import Place
from pgsub.apply.execute.block_sets import BlockSets
from pgsub.apply.execute.dispatch import Dispatch
from pgsub.apply.execute.held_changes import HeldChangeWriter
from pgsub.apply.resolve.resolver import Change, Resolver
from pgsub.apply.rows.change_block import ChangeBlock
from pgsub.apply.rows.relation_cache import RelationCache
from pgsub.apply.rows.set_fallback import SetFallback
from pgsub.apply.rows.table_state_filter import Filter, TableStateFilter
from pgsub.apply.rows.writer import RowWriter
from pgsub.apply.sets import writer
from pgsub.apply.stream.transaction_batch import Item, TransactionRun
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common.errors import PgsubError
from pgsub.common.server_words import is_moved_row
from pgsub.protocol.decoder import decode_change
from pgsub.protocol.frames import Segment
from pgsub.protocol.messages import Relation
from pgsub.protocol.parse_changes import BETWEEN_ROWS, ROW_CHANGES
from pgsub.target.catalog.relation_map import RelationMap
from pgsub.target.sql.pipeline import StatementFailed

#: Matches one message that changes no row, or a stretch of messages that change rows or delimit transactions.
_STRETCH = re.compile(b"[%b]|[^%b]+" % (BETWEEN_ROWS, BETWEEN_ROWS))
#: Number of missing rows and messages that are kept in memory before they are spilled.
RECORDS = 1000

#: Function that takes missing rows and messages during a transaction; it may run other statements in the session.
Spill = Callable[[Sequence[Record]], None]


class Executor:
    """The executor of one target session.

    :param connection: autocommit; the caller opens and ends transactions around :meth:`run`.
    :param set_based: changes may be executed as sets.
    :param spill: takes missing rows and messages when there are many; :meth:`finish` returns the rest.
    :param holds: returns whether any table is held; its changes are then kept.
    :param looks_again: see :class:`RowWriter`.
    :ivar counters: changes by method, named as in :class:`~pgsub.common.worker_heartbeat.Heartbeat`.
    """

    def __init__(
        self,
        connection: psycopg.Connection,
        relations: RelationCache,
        spill: Spill | None = None,
        *,
        set_based: bool = True,
        holds: Callable[[], bool] = lambda: False,
        looks_again: bool = False,
    ) -> None:
        self._relations = relations
        self._rows = RowWriter(connection, relations, looks_again=looks_again)
        self._set_based, self._looks_again = set_based, looks_again
        self._spill = spill
        self._filter = TableStateFilter(self._rows)
        self._sets = BlockSets(self._rows, self._filter, replica=relations.replica)
        self._held = HeldChangeWriter(self._rows, self._filter, holds)
        self._block = ChangeBlock(in_stream=False)
        self._naming = False  #: row by row, so that a failed row is located
        self._dispatch = Dispatch(self._rows, self._filter, self._held, self._spill_many)
        self._resolver = Resolver(self._rows, self._filter, self._dispatch.row)
        self.counters: Counter[str] = Counter()

    @property
    def changes(self) -> int:
        """Number of applied rows, for statistics."""
        return self._rows.changes

    @property
    def names_rows(self) -> bool:
        """Whether :meth:`row_by_row` is active."""
        return self._naming

    @contextlib.contextmanager
    def row_by_row(self) -> Iterator[None]:
        """Execute row by row to locate a failed row: no sets, and no COPY, which reports only the first of many.

        Conflicts are resolved if there are rules.
        """
        before, self._naming, self._rows.copies = self._naming, True, False
        try:
            yield
        finally:
            self._naming, self._rows.copies = before, not before

    def run(self, items: Iterable[Item], should_apply: Filter) -> list[Record]:
        """Apply everything; return once every statement has succeeded.

        :param should_apply: called for each relation, with a transaction's finish LSN.
        :return: messages, and changes that were skipped because their row is missing.
        :raises SetFallback: a set needs to be executed row by row, or a row must be searched again.
        """
        self.begin(should_apply)
        for item in items:
            self._gather(item, item.segments())
            if isinstance(item, RemoteTransaction) and item.leaves:
                self._leave(item)
        return self.finish()

    def _leave(self, transaction: RemoteTransaction) -> None:
        """Learn the descriptions at the end of a transaction, after executing the changes that use older ones."""
        with self._locating():
            self._execute()
            self._rows.flush()
        self._relations.learn_from(transaction)
        self._filter.forget()

    def begin(self, should_apply: Filter) -> None:
        """Begin with an opened target transaction.

        :param should_apply: see :meth:`run`.
        """
        self._rows.begin()
        self._sets.begin()
        self._held.begin()
        self._block = ChangeBlock(in_stream=False)
        self._filter.begin(should_apply)
        self._resolver.begin()
        # guard: DDL on the target is detected
        self._relations.notice_ddl()

    def feed(self, transaction: RemoteTransaction, segments: Iterable[Segment]) -> None:
        """Apply further changes of a transaction; :meth:`finish` reports their success.

        :param segments: pgoutput messages in order.
        """
        self._gather(transaction, segments)
        with self._locating():
            self._execute()

    def _gather(self, item: Item, segments: Iterable[Segment]) -> None:
        with self._locating():
            for segment in segments:
                for match in _STRETCH.finditer(segment.codes):
                    stretch = segment.frames.range(segment.start + match.start(), segment.start + match.end())
                    if segment.codes[match.start()] in BETWEEN_ROWS:
                        self._other(item, stretch)
                    else:
                        self._add(item, stretch)

    def _add(self, item: Item, stretch: Segment) -> None:
        if self._block.in_stream != item.in_stream:
            self._execute()
            self._block = ChangeBlock(in_stream=item.in_stream)
        self._block.add(item, stretch)
        if self._block.full:
            self._execute()

    def _other(self, item: Item, message: Segment) -> None:
        """Apply a message that changes no row. Execute the block first, because the message may affect its changes."""
        transaction = item.transaction_of(message.start) if isinstance(item, TransactionRun) else item
        decoded = decode_change(message.payloads()[0], transaction.in_stream)
        if not isinstance(decoded, Relation) or self._relations.described(decoded.relid) != decoded:
            self._execute()
        self._dispatch.message(transaction, decoded)

    def _execute(self) -> None:
        """Execute the block: as sets whatever can be, the rest row by row."""
        block, self._block = self._block, ChangeBlock(in_stream=self._block.in_stream)
        block = self._held.split_off(block)
        pays = self._set_based and not self._naming and len(block) >= writer.PAYS_FROM
        left = self._sets.apply(block, self.counters) if pays else None
        if self._resolves:
            self._resolver.run(list(block.rows(left)), self._spill_some)
            return
        row = self._dispatch.row
        for transaction, payload in block.rows(left):
            row(transaction, payload)

    @property
    def _resolves(self) -> bool:
        return self._naming and bool(self._relations.rules)

    def _spill_many(self) -> None:
        if len(self._rows.conflicts.records) >= RECORDS and self._spill is not None:
            self._sets.finish()
            self._spill(self.taken())

    def _spill_some(self) -> None:
        """Spill outside any savepoint, before the limit would force a spill inside one."""
        if len(self._rows.conflicts.records) >= RECORDS // 2 and self._spill is not None:
            self._spill(self.taken())

    @contextlib.contextmanager
    def undoing(self) -> Iterator[None]:
        """Undo the body if it fails; the target transaction continues."""
        with self._locating():
            self._held.write()
            with self._rows.undoing():
                try:
                    yield
                    self._held.write()
                except BaseException:
                    self._held.begin()
                    raise

    def change(self, transaction: RemoteTransaction, payload: bytes) -> None:
        """Apply one message; :meth:`finish` or the end of :meth:`undoing` reports its success."""
        if self._held.keep(transaction, payload):
            return
        if self._resolves and payload[0] in ROW_CHANGES:
            self._resolver.run([(transaction, payload)], lambda: None)
        else:
            self._dispatch.row(transaction, payload)

    def target(self, transaction: RemoteTransaction, message_type: str, relid: int) -> RelationMap | None:
        """Return the table for a change; None if it is not applied. It may query the catalogs."""
        return self._filter.target(transaction, message_type, relid)

    def copied(self, changes: Sequence[Change]) -> None:
        """Insert rows of a copy, all of one relation; :meth:`finish` reports their success.

        :param changes: INSERT messages.
        """
        with self._locating():
            self._rows.copies = True
            try:
                done = self._resolver.together(changes)
            finally:
                self._rows.copies = not self._naming
            if not done:
                self._resolver.run(changes, self._spill_some)

    def finish(self) -> list[Record]:
        """Wait until every statement has succeeded.

        :return: see :meth:`run`.
        :raises SetFallback: see :meth:`run`.
        """
        with self._locating():
            self._execute()
            self._rows.flush()
            self._held.write()
            self._filter.check_tables()
            self._sets.finish()
            # guard: names are verified before the commit
            self._filter.refuse_others()
        return self.taken()

    def wait(self) -> None:
        """Wait until all statements have succeeded; then other statements may be run."""
        with self._locating():
            self._sets.finish()

    def abandon(self) -> None:
        """Leave the pipeline, because the target transaction is about to be rolled back."""
        with contextlib.suppress(StatementFailed):
            self._rows.leave()

    def settled(self) -> None:
        """Note that the target transaction is committed or finally given up."""
        self._rows.conflicts.missing.settled()

    def forget(self) -> None:
        """Forget prepared statements, which psycopg may have deallocated after a rollback."""
        self._rows.forget()

    def savepoint(self) -> None:
        """Set a savepoint for :meth:`rollback_to`."""
        self._execute()
        self._rows.savepoint()

    def rollback_to(self, depth: int) -> None:
        """Undo everything since the savepoint that has ``depth`` others before it, and release it.

        :raises PgsubError: an earlier statement failed; the target transaction is aborted.
        """
        with self._locating():
            self._execute()
            self._sets.finish()
            self._rows.rollback_to(depth)

    def taken(self) -> list[Record]:
        """Return the missing rows and messages so far, and clear them."""
        return self._rows.conflicts.taken()

    @contextlib.contextmanager
    def _locating(self) -> Iterator[None]:
        try:
            yield
        except StatementFailed as failure:
            raise self._located(failure) from None
        except (PgsubError, SetFallback):
            self.abandon()  # the session can roll back only outside the pipeline
            raise

    def _located(self, failure: StatementFailed) -> PgsubError | SetFallback:
        place = failure.tag if isinstance(failure.tag, Place) else None
        relation = failure.tag if place is None else place.relation
        # guard: a row that moved to another partition while its change waited is searched again
        if self._looks_again and isinstance(relation, RelationMap) and is_moved_row(failure.error):
            return SetFallback(relation, "a row was moved to another partition")
        return conflict.fault(self._relations.subid, failure.error, place, failure.statement)
