"""Applies a transaction that stops apply without its conflicting rows, which are kept (``--rows conflicting``).

Rows are tried together inside a savepoint: fewer after a failure, until the failing row is alone, then more again.

NOTES: A key is tainted while the target's row differs from the publisher's because a change was skipped. An UPDATE or
DELETE of a tainted key depends on the skipped change, so it is skipped too, and taints the new key. An INSERT of a
tainted key, or a TRUNCATE, may restore the publisher's row. It is tried alone, and success removes the taint. Keys are
equal if the target considers them equal (1.0 and 1.00), which for most types only the target can decide. They are of
the target's table, because the transaction may put another table of the publisher in the place of its table.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from itertools import groupby, islice

import psycopg

from pgsub.apply.commit.ledger_commit import LedgerCommit
from pgsub.apply.commit.skipped_writer import SkippedChanges, changed
from pgsub.apply.conflicts.conflict import ResolvedConflict, RowConflict
from pgsub.apply.conflicts.unique_violation import complete_report
from pgsub.apply.execute.executor import Executor
from pgsub.apply.resolve.resolver import TOGETHER, AttemptSize
from pgsub.apply.rows.table_state_filter import Filter
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common.errors import ApplyError, PgsubError, TableReplaced
from pgsub.protocol.decoder import decode_change
from pgsub.protocol.messages import Delete, Insert, Message, Truncate, Tuple, Update
from pgsub.protocol.parse_changes import ROW_CHANGES
from pgsub.protocol.reader import BINARY, UNCHANGED
from pgsub.target.catalog.relation_map import RelationMap
from pgsub.target.sql.prepared_statements import DEALLOCATED
from pgsub.target.sql.row_lookup import InTransaction, TableLookup

#: The target rejects the value, or its type has no hash, which aborts a transaction.
_NO_KEY = (psycopg.DataError, psycopg.ProgrammingError, psycopg.errors.InFailedSqlTransaction)
#: Table by its OID, and the values of the key.
_Key = tuple[int, tuple[bytes | str | None, ...]]


class PartialSkip:
    """The application of one transaction without its conflicting rows."""

    def __init__(self, executor: Executor, ledger_commit: LedgerCommit, left: SkippedChanges) -> None:
        self._session = ledger_commit.session
        self._executor = executor
        self._ledger_commit = ledger_commit
        self._left = left
        self._size = AttemptSize()
        self._lookups: dict[int, TableLookup] = {}
        self._tainted: set[_Key] = set()  #: keys whose rows differ from the publisher's
        self._conflicts: list[ResolvedConflict] = []  #: to be recorded

    def run(self, transaction: RemoteTransaction, should_apply: Filter) -> None:
        """Apply the transaction, row by row where necessary."""
        self._transaction = transaction
        self._executor.begin(should_apply)
        with self._executor.row_by_row():
            for is_row, group in groupby(transaction.payloads(), lambda payload: payload[0] in ROW_CHANGES):
                while payloads := list(islice(group, TOGETHER if is_row else 1)):
                    self._try(payloads)
            self._ledger_commit.record(self._executor.finish())
        self._session.relations.learn_from(transaction)

    def _try(self, payloads: Sequence[bytes]) -> None:
        """Apply messages in order, or skip them."""
        at = 0
        while at < len(payloads):
            if self._concerns_tainted(payloads[at]):
                self._on_tainted(payloads[at])
                at += 1
                continue
            end = at + 1
            while end < min(at + self._size.rows, len(payloads)) and not self._concerns_tainted(payloads[end]):
                end += 1
            at += self._apply(payloads[at:end])
        self._ledger_commit.record(self._executor.taken())
        self._ledger_commit.record(self._conflicts)
        self._conflicts = []

    def _apply(self, payloads: Sequence[bytes]) -> int:
        """Apply all messages or none; skip a single one that fails.

        :return: number of messages applied or skipped; after 0, fewer are tried.
        """
        try:
            with self._executor.undoing():
                for payload in payloads:
                    self._executor.change(self._transaction, payload)
        except ApplyError as error:
            if error.sqlstate == DEALLOCATED or isinstance(error, TableReplaced):
                raise
            self._size.failed(len(payloads))
            if len(payloads) > 1:
                return 0
            self._refused(payloads[0], error)
            return 1
        self._size.succeeded(self._size.rows)
        return len(payloads)

    def _refused(self, payload: bytes, error: ApplyError) -> None:
        """Skip a change that failed alone."""
        identical, ref = self._identical(payload, error), None
        complete_report(self._session.connection, error)
        if not identical:
            ref = uuid.uuid4().hex if error.record is not None else None
            reason = {"error": error.message, "detail": error.detail, "ref": ref}
            self._leave(payload, reason | {"sqlstate": error.sqlstate, "conflict": error.conflict})
        if error.record is not None:
            error.record.action, error.record.skipped_ref = "skipped", ref
            self._conflicts.append(ResolvedConflict(self._transaction, error.record))

    def _on_tainted(self, payload: bytes) -> None:
        """Skip a change that depends on a skipped one; try alone a change that may restore the publisher's row."""
        message = self._decoded(payload)
        # guard: changes that depend on a skipped row are skipped
        if isinstance(message, Update | Delete) and not self._tainted.isdisjoint(self._keys(message)[:1]):
            self._leave(payload, {"error": "it depends on a change that was skipped"})
            return
        self._ledger_commit.record(self._executor.taken())
        before = self._left.count
        self._apply([payload])
        records = self._executor.taken()
        self._ledger_commit.record(records)
        if self._left.count > before or any(isinstance(one, RowConflict) and one.local is None for one in records):
            return
        if isinstance(message, Truncate):
            emptied = {one.target.oid for one in map(self._session.relations.known, message.relids) if one is not None}
            self._tainted = {key for key in self._tainted if key[0] not in emptied}
        self._tainted.difference_update(self._keys(message)[-1:])

    def _concerns_tainted(self, payload: bytes) -> bool:
        if not self._tainted:
            return False
        message = self._decoded(payload)
        return isinstance(message, Truncate) or not self._tainted.isdisjoint(self._keys(message))

    def _decoded(self, payload: bytes) -> Message:
        return decode_change(payload, self._transaction.in_stream)

    def _lookup(self, relation: RelationMap) -> TableLookup:
        known = self._lookups.get(relation.target.oid)
        if known is None:
            known = TableLookup(InTransaction(self._session.connection), relation.target)
            self._lookups[relation.target.oid] = known
        return known

    def _identical(self, payload: bytes, error: ApplyError) -> bool:
        """Return whether the row that could not be inserted already exists with the same values."""
        message = self._decoded(payload)
        if error.conflict is None or not isinstance(message, Insert) or BINARY in message.new.kinds:
            return False
        relation = self._session.relations.known(message.relid)
        if relation is None:
            return False
        # the target cannot send a row with a character that UTF-8 lacks; the publisher's row has none
        with contextlib.suppress(psycopg.DataError), self._executor.undoing():
            lookup = self._lookup(relation)
            row = lookup.read({c.name: _text(message.new.values[i]) for i, c in enumerate(relation.columns)})
            there = lookup.taken(row)
            return bool(there) and all(one.values[name] == value for _, one in there for name, value in row.items())
        return False

    def _leave(self, payload: bytes, reason: dict[str, str | None]) -> None:
        message = self._decoded(payload)
        self._tainted.update(self._keys(message))
        for relid in changed(message):
            self._left.keep(self._session.relations.remote(relid), message, {"skipped": "row", **reason})

    def _keys(self, message: Message) -> list[_Key]:
        """Return the keys of a change: of the row that it searches for, then of the row that it writes."""
        match message:
            case Insert():
                rows: list[Tuple] = [message.new]
            case Update():
                rows = [message.old or message.new, message.new]
            case Delete():
                rows = [message.old]
            case _:
                return []
        relation = self._relation(message)
        return [] if relation is None else [(relation.target.oid, self._key(relation, row, rows[0])) for row in rows]

    def _relation(self, message: Insert | Update | Delete) -> RelationMap | None:
        """Return the table of a change. A relation that the transaction described anew has no map yet."""
        known = self._session.relations.known(message.relid)
        if known is None and self._tainted:
            with contextlib.suppress(PgsubError):  # raised again for the change itself
                return self._executor.target(self._transaction, type(message).__name__.upper(), message.relid)
        return known

    def _key(self, relation: RelationMap, row: Tuple, searched: Tuple) -> tuple[bytes | str | None, ...]:
        sources = {i: searched if row.kinds[i] == UNCHANGED else row for i in relation.lookup}
        if any(source.kinds[i] == BINARY for i, source in sources.items()):
            return tuple(source.values[i] for i, source in sources.items())
        values = {relation.columns[i].name: _text(source.values[i]) for i, source in sources.items()}
        prints = self._lookup(relation).fingerprints
        if prints.are_texts(values):
            return prints.of(values, list(values))
        for _ in range(2):  # a type without a hash is known to have none after the first failure
            with contextlib.suppress(*_NO_KEY), self._executor.undoing():
                return prints.of(values, list(values))
        return tuple(values.values())


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")
