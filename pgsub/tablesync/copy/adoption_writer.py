"""The writer of an adoption: it writes differences to the target while the comparison goes on.

Replaced and deleted rows are kept, up to a maximum number (:mod:`pgsub.reconcile.replaced`).

NOTES
Each transaction writes some rows, and is fenced like a chunk of a copy. So nothing has to be undone after an attempt
that was killed: the next attempt finds these rows equal.

The order of rows ignores unique indexes. A transaction that meets a value which another row still has is postponed
until all others are done. Then all postponed old rows are deleted before any new one is inserted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import psycopg

from pgsub.apply.conflicts import conflict
from pgsub.apply.conflicts.conflict import RowConflict
from pgsub.apply.conflicts.unique_violation import complete_errors
from pgsub.apply.execute.executor import Executor
from pgsub.apply.rows.relation_cache import RelationCache
from pgsub.apply.rows.table_state_filter import Decision
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common import failpoints
from pgsub.common.errors import ApplyError, log_text
from pgsub.common.plural import counted
from pgsub.common.query import leave_transaction
from pgsub.common.subscription import Subscription
from pgsub.protocol.encoder import encode
from pgsub.protocol.messages import KEY_COLUMN, Column, Delete, Insert, Relation, Tuple, Update
from pgsub.protocol.reader import NULL, TEXT
from pgsub.reconcile import expressions
from pgsub.reconcile.equality import Values
from pgsub.reconcile.expressions import ComparedTable
from pgsub.reconcile.rows import DIFFERENT, EXTRA, MISSING, Difference, Differences
from pgsub.tablesync.copy.adoption import UNPUBLISHED
from pgsub.tablesync.copy.replaced_rows import ReplacedRows
from pgsub.tablesync.copy.spilled_values import SpilledValues
from pgsub.target.ledger import events
from pgsub.target.ledger.tables import states
from pgsub.target.ledger.tables.chunks import ChunkKey
from pgsub.target.session import connect as target

#: Maximum rows and bytes of a transaction.
ROWS, BYTES = 2000, 4 << 20
_TAKEN = ("23505", "23P01")  #: unique_violation, exclusion_violation
_KINDS = (MISSING, EXTRA, DIFFERENT)
#: Rows are found by an index if there is one, as apply finds them.
_SETTINGS = "SET LOCAL enable_seqscan = off"

Change = Insert | Update | Delete


class Bringing(Differences):
    """The differences that are written to the target as they are found.

    :param session: the writing session, outside of a transaction.
    :param patience: a statement that limits how long a transaction waits for locks.
    :param alive: called for each transaction.
    """

    def __init__(
        self,
        session: psycopg.Connection,
        sub: Subscription,
        key: ChunkKey,
        table: ComparedTable,
        *,
        patience: str,
        alive: Callable[[], None],
    ) -> None:
        super().__init__()
        # the publisher's row wins, whatever the conflict rules are
        self._sub = replace(sub, on_conflict=())
        self._session, self._key, self._patience, self._alive = session, key, patience, alive
        replica = target.is_replica(session)
        self._relations = RelationCache(session, self._sub, replica=replica, compared=True)
        self._executor = Executor(session, self._relations, set_based=False)
        self._rows = RowChanges(table, replica=replica)
        self._kept = ReplacedRows(session, sub, key, table)
        self._waiting: list[Difference] = []
        self._size = 0
        self._put_off = _PutOff()
        self.left = 0

    def add(self, one: Difference) -> None:
        """Write a difference, together with others, or count it if it stays."""
        if one.explained is not None:
            self.left += 1
            return
        self.counts[one.kind] += 1
        self._waiting.append(one)
        self._size += sum(len(value or "") for value in (*(one.publisher or ()), *(one.target or ())))
        if len(self._waiting) >= ROWS or self._size >= BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the waiting differences."""
        waiting, self._waiting, self._size = self._waiting, [], 0
        if not waiting:
            return
        try:
            self._commit(self._rows.changes(waiting), waiting)
        except ApplyError as error:
            if error.sqlstate in _TAKEN:
                self._put_off.add(waiting)
            else:
                self._commit(self._rows.changes(waiting), waiting, naming=True)

    def finish(self) -> None:
        """Write all that is left.

        :raises ApplyError: the target rejects a row.
        """
        self.flush()
        if self._put_off:
            self._commit(self._rows.anew(self._put_off), self._put_off, naming=True)

    def record(self) -> None:
        """Record in the open transaction how many rows were transferred, including earlier attempts."""
        missing, extra, different = states.count_adopted(self._session, self._key.claim, (0, 0, 0))
        text = (
            f'table "{self._rows.relation.namespace}.{self._rows.relation.name}" of subscription "{self._sub.name}" was'
            f" adopted: {counted(missing, 'row')} missing, {extra} extra, {different} different"
        )
        more = f"{counted(self.left, 'row')} that {UNPUBLISHED} differ still." if self.left else None
        kept, replaced = states.kept(self._session, self._key.claim), extra + different
        if kept < replaced:
            lacking = f"Of {counted(replaced, 'row')} that were replaced or deleted, {kept} are kept."
            more = f"{more} {lacking}" if more else lacking
        events.add(self._session, self._sub.subid, events.log_entry("LOG", log_text(text, detail=more)))

    def _commit(self, changes: Iterable[Change], brought: Iterable[Difference], *, naming: bool = False) -> None:
        """Make changes in one transaction.

        :param naming: whether an error must name the row.
        """
        session, executor = self._session, self._executor
        counts = dict.fromkeys(_KINDS, 0)
        self._alive()
        with complete_errors(session, self._sub) if naming else contextlib.nullcontext():
            try:
                session.execute(f"BEGIN; {_SETTINGS}; {self._patience}".encode())
                with executor.row_by_row() if naming else contextlib.nullcontext():
                    self._execute(changes)
                session.execute("SET LOCAL lock_timeout = 0")  # other sessions hold the ledger's rows for longer
                for one in brought:
                    counts[one.kind] += 1
                states.count_adopted(session, self._key.claim, list(counts.values()))
                self._kept.keep(brought, counts[EXTRA] + counts[DIFFERENT])
                failpoints.point("adopt.before_commit")
                session.execute("COMMIT")
            except BaseException as error:
                with contextlib.suppress(psycopg.Error):
                    executor.abandon()
                leave_transaction(session)
                executor.forget()
                if isinstance(error, psycopg.Error):
                    raise target.translate(error, "adopt rows on the target") from None
                raise
        failpoints.point("adopt.after_commit")

    def _execute(self, changes: Iterable[Change]) -> None:
        self._relations.learn(self._rows.relation)
        self._executor.begin(lambda relation, oid, finish_lsn: Decision(self._key.claim.worker))
        transaction = RemoteTransaction(0, 0)
        for change in changes:
            self._executor.change(transaction, encode(change))
        for one in self._executor.finish():
            # a row to delete may be gone already; if a row to update is, somebody has removed it
            if isinstance(one, RowConflict) and one.place.message_type == "UPDATE":
                raise conflict.stop_error(self._sub.subid, one.record(self._sub.subid), one.place)


class RowChanges:
    """The changes that turn the target's rows into the publisher's.

    :param replica: triggers and foreign keys do not fire.
    """

    def __init__(self, table: ComparedTable, *, replica: bool) -> None:
        self._table = table
        self._replica = replica
        self._key = frozenset(table.key)
        self._sent = tuple(expressions.rewritten(table))
        compared = {column.name for column in table.columns}
        #: Whether a row can be deleted and inserted. The value of a column that only the target has would be lost.
        self._whole = all(column.generated or column.name in compared for column in table.target.columns)
        columns = (
            Column(KEY_COLUMN if number in self._key else 0, column.name, column.type_oid, -1)
            for number, column in enumerate(table.columns)
        )
        local = table.target
        self.relation = Relation(1, local.schema, local.name, "d" if table.keyed else "f", tuple(columns))

    def changes(self, rows: Iterable[Difference]) -> Iterator[Change]:
        """Yield the changes for some rows. Deletions come first to make way, and inserts come together."""
        yield from map(self._change, sorted(rows, key=lambda one: (EXTRA, DIFFERENT, MISSING).index(one.kind)))

    def anew(self, rows: Iterable[Difference]) -> Iterator[Change]:
        """Yield the changes for rows that may exchange values: all are deleted before one is inserted."""
        # guard: a row is not deleted and inserted again where foreign keys would act
        apart = self._whole and self._replica
        yield from (self._delete(one) for one in rows if one.kind == EXTRA or (apart and one.kind == DIFFERENT))
        yield from (self._change(one) for one in rows if one.kind == DIFFERENT and not apart)
        yield from (self._insert(one) for one in rows if one.kind == MISSING or (apart and one.kind == DIFFERENT))

    def _change(self, one: Difference) -> Change:
        if one.kind == MISSING:
            return self._insert(one)
        if one.kind == EXTRA:
            return self._delete(one)
        return Update(1, "K", self._old(one), self._new(one))

    def _insert(self, one: Difference) -> Insert:
        return Insert(1, self._new(one))

    def _delete(self, one: Difference) -> Delete:
        return Delete(1, "K" if self._table.keyed else "O", self._old(one))

    def _new(self, one: Difference) -> Tuple:
        assert one.publisher is not None
        count = len(self._table.columns)
        values, sent = list(one.publisher[:count]), one.publisher[count:]
        for position, value in zip(self._sent, sent, strict=True):
            values[position] = value
        return _tuple(values)

    def _old(self, one: Difference) -> Tuple:
        assert one.target is not None
        values = one.target[: len(self._table.columns)]
        return _tuple([value if number in self._key else None for number, value in enumerate(values)])


def _tuple(values: Sequence[str | None]) -> Tuple:
    kinds = bytes(NULL if value is None else TEXT for value in values)
    return Tuple(kinds, tuple(None if value is None else value.encode() for value in values))


class _PutOff:
    """Rows that were postponed. They can be read repeatedly."""

    def __init__(self) -> None:
        self._rows = SpilledValues[list[tuple[str, Values | None, Values | None]]]()

    def __bool__(self) -> bool:
        return len(self._rows) > 0

    def add(self, rows: Sequence[Difference]) -> None:
        """Add rows. Not while they are read."""
        self._rows.add([(one.kind, one.publisher, one.target) for one in rows])

    def __iter__(self) -> Iterator[Difference]:
        for values in self._rows:
            yield from (Difference(*one) for one in values)
