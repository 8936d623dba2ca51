"""Writes single rows: one statement per row, many per round trip. Runs of inserts use COPY.

Mirrors apply_handle_insert/update/delete_internal (worker.c) and the single-row operations of execReplication.c.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import psycopg

from pgsub.apply.conflicts.conflict import RowConflict
from pgsub.apply.conflicts.error_context import Place
from pgsub.apply.rows.insert_run import InsertRun
from pgsub.apply.rows.missing_and_origin_differs import AT, FoundConflicts, in_doubt, locks
from pgsub.apply.rows.owner_pipeline import OwnerPipeline
from pgsub.apply.rows.relation_cache import RelationCache
from pgsub.apply.rows.statements_by_shape import RowStatements
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common import table_lock
from pgsub.common.errors import TargetUnavailable
from pgsub.protocol.columnar_copy import Stream
from pgsub.protocol.decoder import decode_change
from pgsub.protocol.messages import Insert
from pgsub.target.catalog.relation import TargetRelation
from pgsub.target.catalog.relation_map import RelationMap
from pgsub.target.sql import statements
from pgsub.target.sql.pipeline import RowCount, StatementFailed
from pgsub.target.sql.statement_builder import Statement
from pgsub.target.sql.verified_names import Used, may_lock

#: Maximum number of attempts for a row while other sessions change it or conflicting rows.
TRIES = 10


class RowWriter:
    """A writer of rows in one target session, in the given order.

    :param connection: autocommit; the caller opens and ends transactions.
    :ivar copies: runs of inserts may use COPY; off while a failed row is being located.
    :ivar changes: number of applied rows, for statistics.
    :ivar conflicts: conflicts that did not make a change fail.
    :param looks_again: search for missing rows once more; the caller handles :class:`SetFallback`.
    """

    def __init__(self, connection: psycopg.Connection, relations: RelationCache, *, looks_again: bool = False) -> None:
        self.connection, self.relations = connection, relations
        self._pipeline = OwnerPipeline(connection)
        self._statements = RowStatements(relations)
        self.conflicts = FoundConflicts(self._pipeline, self._statements, relations, looks_again=looks_again)
        self._inserts = InsertRun()
        self.copies = True
        self.changes = 0

    def begin(self) -> None:
        """Begin a target transaction, and forget inserts of an earlier one."""
        self._inserts = InsertRun()
        self._pipeline.begin()
        self.conflicts.begin()

    def insert(self, transaction: RemoteTransaction, relation: RelationMap, payload: bytes) -> None:
        """Insert the row of a message, possibly together with those of later messages.

        :param payload: an INSERT message; a malformed one is refused when it is written.
        """
        if not self.copies:
            self._insert(transaction, relation, [payload])
            return
        if not self._inserts.takes(transaction, relation):
            self.flush()
        if self._inserts.add(transaction, relation, payload):
            self.flush()

    def flush(self) -> None:
        """Write the pending inserts, because the next change may depend on them."""
        run = self._inserts
        if run.first is None:
            return
        self._inserts = InsertRun()
        (transaction, relation), found = run.first, run.copy_stream()
        if found is None:
            self._insert(transaction, relation, run.payloads)
            return
        stream, binary = found
        self._pipeline.copy(relation, stream, Place(transaction, "INSERT", relation), binary=binary)
        self.changes += len(run.payloads)

    def _insert(self, transaction: RemoteTransaction, relation: RelationMap, payloads: Sequence[bytes]) -> None:
        for payload in payloads:
            message = decode_change(payload, transaction.in_stream)
            assert isinstance(message, Insert)
            self.insert_row(Place(transaction, "INSERT", relation, message.new))

    def insert_row(self, place: Place) -> None:
        """Insert ``place.new`` by a single statement."""
        self._pipeline.send_row(self._statements.insert(place), place, None)
        self.changes += 1

    def update(self, place: Place) -> None:
        """Update the row that is found by ``place.old`` or the key of ``place.new``."""
        self.flush()
        self._change(self._statements.update(place, leaves=self._leaves_partition(place)), place)

    def _leaves_partition(self, place: Place) -> bool:
        """Return whether the row moves to another partition and triggers fire (apply_handle_tuple_routing)."""
        if place.mapped.target.relkind != "p" or not place.mapped.target.fires:
            return False
        found: list[str | None] = []
        for again in (False, True):
            self.sync()
            statement = self._statements.leaves(place, again=again)
            self._pipeline.send_row(statement, place, None, lambda row: found.append(row[0]))
            self.sync()
            if found[-1:] != [None]:  # else the row's partition was not known, but is locked now
                break
        return found[-1:] == ["t"]

    def delete(self, place: Place) -> None:
        """Delete the row that is found by ``place.old``."""
        self.flush()
        self._change(self._statements.delete(place), place)

    def _change(self, statement: Statement, place: Place) -> None:
        conflicts = self.conflicts
        missed = conflicts.if_missing(place)
        searches = conflicts.missing.searches(resolving=conflicts.resolving)
        self.changes += 1
        if not searches:
            conflicts.check_origin(place)
        elif not self._asked(place):
            missed(0)
            return
        for _ in range(searches):
            found = self._count(statement, place)
            # guard: a row that came while its deletion waited is deleted also by a role that may not lock it
            if found == in_doubt(place) and self._count(self._statements.untouched(place), place):
                continue
            if found:
                conflicts.counted(place, found)
                return
        self._pipeline.send_row(statement, place, missed)

    def _asked(self, place: Place) -> bool:
        """Ask who wrote the row of a change last, and wait for the answer; return False if the row is missing."""
        if not self.conflicts.asks(place):
            return True
        lock = locks(place)
        differs, locked = self.written_by_others(place, lock=lock)
        if differs is not None:
            self.conflicts.differs(place, differs, self.conflicts.depth)
        return locked or not lock

    def _count(self, statement: Statement, place: Place) -> int:
        """Execute a statement of a change, and wait for its row count."""
        counts: list[int] = []
        self._pipeline.send_row(statement, place, counts.append)
        self.sync()
        return counts[0]

    def truncate(self, place: Place, targets: Sequence[TargetRelation], *, restart_identity: bool) -> None:
        """Truncate the tables together, as the session's own role (apply_handle_truncate switches to no owner)."""
        text = statements.truncate(targets, restart_identity=restart_identity)
        self.flush()
        self._pipeline.become(None)
        for target in targets:
            self._pipeline.names.verify(target, place, locks=may_lock(target, None), purpose=table_lock.EMPTYING)
        self.sync()
        try:
            self.connection.execute(text)  # not prepared: prepared statements stay with the session
        except psycopg.Error as error:
            raise StatementFailed(place, error, None) from None
        self.changes += 1

    def used(self) -> Collection[Used]:
        """Return the tables that this transaction has changed, and the definitions from which statements were made."""
        return self._pipeline.names.used

    def command(self, statement: Statement, values: Sequence[bytes] = (), on_count: RowCount | None = None) -> None:
        """Send a statement that changes no row, in order, as the session's own role.

        :param values: parameters as text.
        """
        self.flush()
        # guard: the ledger is written by the session's own role
        self._pipeline.become(None)
        self._pipeline.send(statement, values, [0] * len(values), None, on_count)

    def setting(self, statement: Statement) -> None:
        """Send a statement that any role may run, in order."""
        self.flush()
        self._pipeline.send(statement, (), (), None)

    def set_statement(
        self, relation: RelationMap, statement: Statement, values: Sequence[bytearray], on_count: RowCount
    ) -> None:
        """Send a statement for many rows of a relation, in order; the relation is its tag.

        :param values: parameters in binary form.
        """
        self.flush()
        self._pipeline.enter(relation, relation)
        self._pipeline.send(statement, values, [1] * len(values), relation, on_count)

    def copy_set(self, relation: RelationMap, stream: Stream, *, binary: bool) -> None:
        """Copy rows into a relation, which is the tag: see :meth:`OwnerPipeline.copy`."""
        self.flush()
        self._pipeline.copy(relation, stream, relation, binary=binary)

    def sync(self) -> None:
        """Wait for all statements; leave the pipeline and return to the session's own role.

        :raises StatementFailed: the first failed statement.
        :raises SetFallback: a rule must decide a conflict, or a missing row has appeared; the target transaction is not
            aborted.
        """
        self.flush()
        # guard: the ledger is written by the session's own role
        self._pipeline.become(None)
        self._pipeline.sync()
        self.conflicts.check()

    def savepoint(self) -> None:
        """Set a savepoint for :meth:`rollback_to`."""
        self.command(statements.SAVEPOINT)
        self.conflicts.depth += 1

    def rollback_to(self, depth: int) -> None:
        """Roll back to the savepoint that has ``depth`` others before it, and release it."""
        while self.conflicts.depth > depth:  # all have the same name: the newest hides the others
            self.command(statements.ROLLBACK_TO)
            self.command(statements.RELEASE)
            self.conflicts.depth -= 1
        self._pipeline.names.forget()  # locks taken since the savepoint are gone
        self.sync()
        self.conflicts.drop_behind(depth)

    def leave(self) -> None:
        """Leave the pipeline, whatever failed in it, because the session is about to roll back."""
        self._inserts = InsertRun()
        self._pipeline.sync()

    @contextlib.contextmanager
    def undoing(self) -> Iterator[None]:
        """Undo the body if it fails; the target transaction continues.

        :raises StatementFailed: the first failed statement; the body is undone.
        :raises SetFallback: a rule must decide a conflict; the body is undone.
        """
        self.sync()
        found, changes, outer = len(self.conflicts.records), self.changes, self._pipeline.undo
        names = self._pipeline.names.known()
        self.connection.execute("SAVEPOINT pgsub_undo")
        self._pipeline.undo = "ROLLBACK TO SAVEPOINT pgsub_undo"
        try:
            yield
            self.sync()
        except BaseException:
            with contextlib.suppress(StatementFailed):
                self.leave()
            self._pipeline.role, self.changes = None, changes
            self._pipeline.names.forget(names)
            self.conflicts.undo(found)
            self._pipeline.reset()  # rolls back, and forgets statements that psycopg may have deallocated
            self.connection.execute("RELEASE SAVEPOINT pgsub_undo")  # it would hide that of an enclosing block
            raise
        finally:
            self._pipeline.undo = outer
        self.connection.execute("RELEASE SAVEPOINT pgsub_undo")

    def forget(self) -> None:
        """Forget every prepared statement."""
        self._pipeline.reset()

    def hold(self, place: Place, table: TargetRelation) -> None:
        """Lock the table or partition of a change and verify its name, so that other statements may name it.

        :raises StatementFailed: another table has the name, or an earlier statement failed.
        """
        role = place.mapped.target.acts_as
        if self._pipeline.names.verified(table):
            return
        self.flush()
        self._pipeline.become(role, place)
        self._pipeline.names.verify(table, place, locks=may_lock(table, role))
        self.sync()

    def written_by_others(self, place: Place, *, lock: bool) -> tuple[RowConflict | None, bool]:
        """Return the row to be changed if another origin wrote it last, and whether a row was locked.

        :param lock: lock the row, whoever wrote it.
        :raises TargetUnavailable: other sessions replace the row again and again.
        """
        statement = self._statements.written_elsewhere(place, lock=lock)
        for _ in range(TRIES):
            found: list[list[str | None]] = []
            self._pipeline.send_row(statement, place, None, found.append)
            self.sync()
            if found:
                return (RowConflict.of(place, found[0]) if found[0][AT] is not None else None), lock
            if not lock or not self._count(self._statements.present(place), place):
                return None, False
        raise changed_again(place)


def changed_again(place: Place) -> TargetUnavailable:
    """Return the error for a row that other sessions changed in each of :data:`TRIES` attempts."""
    return TargetUnavailable(f'rows of "{place.name}" are changed by others again and again', sqlstate="40001")
