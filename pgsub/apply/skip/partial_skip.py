"""What can be applied of a transaction that stops apply, row by row as far as it must be; the rest is kept.

Rows are tried together inside a savepoint: fewer after one that failed, until it is alone, and more again after that.
What changes a row that an earlier change of the transaction could not bring depends on it and is left out too.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from pgsub.apply.commit.ledger_commit import LedgerCommit
from pgsub.apply.commit.skipped_changes import SkippedChanges, changed
from pgsub.apply.conflicts.conflict import MissingRow, ResolvedConflict
from pgsub.apply.conflicts.report import complete_report
from pgsub.apply.execute.executor import Executor
from pgsub.apply.rows.change_filter import Filter
from pgsub.apply.rows.session import TargetSession
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common.errors import ApplyError
from pgsub.protocol.decoder import decode_change
from pgsub.protocol.messages import Delete, Insert, Message, Truncate, Tuple, Update
from pgsub.protocol.reader import BINARY, UNCHANGED
from pgsub.target.catalog.mapping import RelationMap
from pgsub.target.sql.row_lookup import InTransaction, TableLookup

#: Rows that are tried together at most.
TRIED = 256
_DEALLOCATED = "26000"  #: no fault of a row: psycopg took away what was prepared
_NUMERIC = 1700
_ROWS = frozenset(b"IUD")
_Key = tuple[int, tuple[object, ...]]


class PartialSkip:
    """Applies what can be applied of one transaction."""

    def __init__(
        self,
        session: TargetSession,
        executor: Executor,
        ledger_commit: LedgerCommit,
        left: SkippedChanges,
    ) -> None:
        self._session = session
        self._executor = executor
        self._ledger_commit = ledger_commit
        self._left = left
        self._together = TRIED
        self._looks: dict[int, TableLookup] = {}
        self._tainted: set[_Key] = set()  #: keys of rows that are not as the publisher has them
        self._met: list[ResolvedConflict] = []  #: to be recorded

    def run(self, transaction: RemoteTransaction, should_apply: Filter) -> None:
        """Row by row, as far as it must be."""
        self._transaction = transaction
        self._executor.begin(should_apply)
        with self._executor.row_by_row():
            waiting: list[bytes] = []
            for payload in transaction.payloads():
                if payload[0] in _ROWS:
                    waiting.append(payload)
                if waiting and (payload[0] not in _ROWS or len(waiting) >= TRIED):
                    self._try(waiting)
                    waiting = []
                if payload[0] not in _ROWS:
                    self._try([payload])
            self._try(waiting)
            self._ledger_commit.record(self._executor.finish())
        self._session.relations.learn_from(transaction)

    def _try(self, payloads: Sequence[bytes]) -> None:
        """In their order; what changes a row that an earlier change could not bring depends on it, and is left out."""
        at = 0
        while at < len(payloads):
            if self._concerns_tainted(payloads[at]):
                self._on_tainted(payloads[at])
                at += 1
                continue
            end = at + 1
            while end < min(at + self._together, len(payloads)) and not self._concerns_tainted(payloads[end]):
                end += 1
            at += self._apply(payloads[at:end])
        self._ledger_commit.record(self._executor.taken())
        self._ledger_commit.record(self._met)
        self._met = []
        if self._left.full:
            self._left.write()

    def _apply(self, payloads: Sequence[bytes]) -> int:
        """All of them, or none and fewer the next time; a single one that fails is left out.

        :return: how many are dealt with.
        """
        try:
            with self._executor.undoing():
                for payload in payloads:
                    self._executor.change(self._transaction, payload)
        except ApplyError as error:
            if error.sqlstate == _DEALLOCATED:
                raise
            self._together = max(1, len(payloads) // 4)
            if len(payloads) > 1:
                return 0
            self._refused(payloads[0], error)
            return 1
        self._together = min(TRIED, 2 * self._together)
        return len(payloads)

    def _refused(self, payload: bytes, error: ApplyError) -> None:
        """A change that cannot be applied, which is known by itself now."""
        identical, ref = self._identical(payload, error), None
        complete_report(self._session.connection, error)
        if not identical:
            ref = uuid.uuid4().hex if error.record is not None else None
            self._leave(payload, {"error": error.message, "detail": error.detail, "ref": ref} | _told(error))
        if error.record is not None:
            error.record.action, error.record.letter = "skipped", ref
            self._met.append(ResolvedConflict(self._transaction, error.record))

    def _on_tainted(self, payload: bytes) -> None:
        # guard: what depends on a skipped row is skipped
        if self._depends(payload):
            self._leave(payload, {"error": "it depends on a change that was skipped"})
        else:
            self._apply_on_tainted(payload)

    def _apply_on_tainted(self, payload: bytes) -> None:
        """A change that may leave the publisher's row where the target had another: that is nobody's fault any more."""
        self._ledger_commit.record(self._executor.taken())
        before = self._left.count
        self._apply([payload])
        records = self._executor.taken()
        self._ledger_commit.record(records)
        if self._left.count > before or any(isinstance(one, MissingRow) for one in records):
            return
        message = self._decoded(payload)
        if isinstance(message, Truncate):
            self._tainted = {key for key in self._tainted if key[0] not in message.relids}
        self._tainted.difference_update(self._keys(message)[-1:])

    def _concerns_tainted(self, payload: bytes) -> bool:
        if not self._tainted:
            return False
        message = self._decoded(payload)
        return isinstance(message, Truncate) or not self._tainted.isdisjoint(self._keys(message))

    def _depends(self, payload: bytes) -> bool:
        message = self._decoded(payload)
        return isinstance(message, Update | Delete) and not self._tainted.isdisjoint(self._keys(message)[:1])

    def _decoded(self, payload: bytes) -> Message:
        return decode_change(payload, self._transaction.in_stream)

    def _identical(self, payload: bytes, error: ApplyError) -> bool:
        """Whether the row that could not be inserted is there already: nothing of it is missing then."""
        message = self._decoded(payload)
        if error.conflict is None or not isinstance(message, Insert) or BINARY in message.new.kinds:
            return False
        relation = self._session.relations.known(message.relid)
        if relation is None:
            return False
        look = self._looks.get(relation.target.oid)
        if look is None:
            within = InTransaction(self._session.connection)
            look = self._looks[relation.target.oid] = TableLookup(within, relation.target)
        row = look.read({c.name: _text(message.new.values[i]) for i, c in enumerate(relation.columns)})
        there = look.taken(row)
        return bool(there) and all(one.values[name] == value for _, one in there for name, value in row.items())

    def _leave(self, payload: bytes, reason: dict[str, str | None]) -> None:
        message = self._decoded(payload)
        self._tainted.update(self._keys(message))
        for relid in changed(message):
            self._left.keep(self._session.relations.remote(relid), message, {"skipped": "row", **reason})

    def _keys(self, message: Message) -> list[_Key]:
        """Which rows a change is about: the one that it looks for, then the one that it leaves."""
        match message:
            case Insert():
                rows: list[Tuple] = [message.new]
            case Update():
                rows = [message.old or message.new, message.new]
            case Delete():
                rows = [message.old]
            case _:
                return []
        relation = self._session.relations.known(message.relid)
        if relation is None:
            return []
        return [(message.relid, _key(relation, row, rows[0])) for row in rows]


def _key(relation: RelationMap, row: Tuple, searched: Tuple) -> tuple[object, ...]:
    values: list[object] = []
    for i in relation.lookup:
        value = (searched if row.kinds[i] == UNCHANGED else row).values[i]
        values.append(_number(value) if relation.columns[i].type_oid == _NUMERIC and value else value)
    return tuple(values)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")


def _number(value: bytes) -> object:
    """1.0 and 1.00 are one key."""
    try:
        number = Decimal(value.decode())
    except (InvalidOperation, UnicodeDecodeError):
        return value
    return number if number.is_finite() else value


def _told(error: ApplyError) -> dict[str, str | None]:
    return {"sqlstate": error.sqlstate, "conflict": error.conflict}
