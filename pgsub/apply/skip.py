"""What apply does of ``subskiplsn``: a transaction is left out, or those of its rows that cannot be applied.

Mirrors maybe_start_skipping_changes, stop_skipping_changes and clear_subscription_skip_lsn (worker.c): a transaction
matches by its finish LSN, and the first one with changes consumes it whether it matches or not. A sync worker obeys it
and leaves it to apply to clear it. What is left out is kept in the same commit (:mod:`pgsub.apply.dead_letter`).
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from pgsub import failpoints
from pgsub.apply.commit import Consumed, LedgerCommit
from pgsub.apply.dead_letter import DeadLetters
from pgsub.apply.executor import Executor, Filter
from pgsub.apply.relations import NEVER, local_name
from pgsub.apply.runs import Batch
from pgsub.apply.streams import TargetSession
from pgsub.apply.transactions import RemoteTransaction
from pgsub.errors import ApplyError
from pgsub.protocol.decoder import decode_change
from pgsub.protocol.lsn import format_lsn
from pgsub.protocol.messages import Delete, Insert, Message, Relation, Truncate, Tuple, TypeName, Update
from pgsub.target.look import TableLook, Within
from pgsub.target.mapping import RelationMap
from pgsub.target.skip import WHOLE, Skip

#: Rows that are tried together: one that fails is found by halving.
TRIED = 256
_DEALLOCATED = "26000"  #: no fault of a row: psycopg took away what was prepared
_UNCHANGED, _BINARY = b"ub"
_NUMERIC = 1700
_ROWS = frozenset(b"IUD")
_Key = tuple[int, tuple[object, ...]]


class Skipping:
    """Deals with the transactions that meet a skip, inside the caller's target transaction.

    :param executor: of that session.
    """

    def __init__(self, session: TargetSession, ending: LedgerCommit, executor: Executor, subid: int) -> None:
        self._session = session
        self._ending = ending
        self._executor = executor
        self._subid = subid

    def part(self, skip: Skip, batch: Batch) -> Batch:
        """The first transactions of a batch that :meth:`run` takes at once: up to one with changes, and with it."""
        if not self._session.progress.applies:
            lsns = [one.finish_lsn for one in batch.transactions()]
            before = lsns.index(skip.lsn) if skip.lsn in lsns else len(lsns)
            return batch.cut(max(before, 1))[0]
        for number, transaction in enumerate(batch.transactions()):
            if transaction.relids():
                return batch.cut(number + 1)[0]
        return batch

    def run(self, skip: Skip, batch: Batch, admits: Filter) -> None:
        """Apply a :meth:`part`, but for what is to be skipped of its last transaction; record what is to be recorded.

        :raises PgsubError: located; the target transaction is aborted.
        """
        last = batch.last
        clears = self._session.progress.applies and bool(last.relids())
        if last.finish_lsn != skip.lsn or not last.relids():
            self._ending.record(self._executor.run(batch.items, admits))
            if clears:
                self._ending.consume(Consumed(skip, (self._mismatch(skip, last),)))
            return
        before = batch.cut(len(batch) - 1)[0]
        self._ending.record(self._executor.run(before.items, admits))
        left = DeadLetters(self._session.connection, self._subid, last)
        if skip.rows == WHOLE:
            self._whole(last, left, admits)
        else:
            _Salvage(self._session, self._executor, self._ending, left, admits).run(last)
        left.write()
        failpoints.point("apply.skipped")
        if clears:
            self._ending.consume(Consumed(skip, self._skipped(skip, left.count), done=True))

    def _mismatch(self, skip: Skip, transaction: RemoteTransaction) -> tuple[str, str]:
        return (
            "WARNING",
            f'skip-LSN of subscription "{self._session.relations.subname}" cleared\n'
            f"DETAIL:  Remote transaction's finish WAL location (LSN) {format_lsn(transaction.finish_lsn)}"
            f" did not match skip-LSN {format_lsn(skip.lsn)}.",
        )

    def _skipped(self, skip: Skip, count: int) -> tuple[tuple[str, str], ...]:
        lsn = format_lsn(skip.lsn)
        what = "whole" if skip.rows == WHOLE else "its conflicting rows"
        return (
            ("LOG", f"logical replication starts skipping transaction at LSN {lsn}"),
            (
                "LOG",
                f"logical replication completed skipping transaction at LSN {lsn}\n"
                f"DETAIL:  Skipped {what}: {count} changes were not applied and are in pgsub.skipped_change.",
            ),
        )

    def _whole(self, transaction: RemoteTransaction, left: DeadLetters, admits: Filter) -> None:
        """Nothing is applied, and the target need not even have the tables."""
        relations = self._session.relations
        taken: dict[int, bool] = {}
        for payload in transaction.payloads():
            message = decode_change(payload, transaction.in_stream)
            if isinstance(message, Relation):
                relations.learn(message)
                taken.pop(message.relid, None)
            elif isinstance(message, TypeName):
                relations.learn_type(message)
            for relid in _relids(message):
                if relid not in taken:
                    taken[relid] = self._taken(relations.remote(relid), transaction, admits)
                if taken[relid]:
                    left.keep(relations.remote(relid), message, {"skipped": WHOLE})
            if left.full:
                left.write()
        transaction.applied(relations)

    def _taken(self, remote: Relation, transaction: RemoteTransaction, admits: Filter) -> bool:
        """Whether apply would have made the changes of a relation; those of one that the target lacks stop it."""
        oids = self._session.relations.oids([local_name(remote)])
        if not oids:
            return self._session.progress.applies
        [oid] = oids
        return oid != NEVER and admits(remote, oid, transaction.decided_by) is not None


class _Salvage:
    """Applies what can be applied of one transaction."""

    def __init__(
        self, session: TargetSession, executor: Executor, ending: LedgerCommit, left: DeadLetters, admits: Filter
    ) -> None:
        self._session = session
        self._executor = executor
        self._ending = ending
        self._left = left
        self._admits = admits
        self._tainted: set[_Key] = set()  #: keys of rows that are not as the publisher has them

    def run(self, transaction: RemoteTransaction) -> None:
        """Row by row, as far as it must be."""
        self._transaction = transaction
        self._executor.begin()
        with self._executor.naming_rows():
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
            self._ending.record(self._executor.finish())
        transaction.applied(self._session.relations)

    def _try(self, payloads: Sequence[bytes]) -> None:
        """All of them or, where that fails, each half; and in the end the one that is to blame not at all."""
        applicable = self._without_tainted(payloads)
        if applicable:
            try:
                with self._executor.undoing():
                    for payload in applicable:
                        self._executor.change(self._transaction, payload, self._admits)
            except ApplyError as error:
                if error.sqlstate == _DEALLOCATED:
                    raise
                if len(applicable) == 1 and not self._identical(applicable[0], error):
                    self._leave(applicable[0], {"error": error.message, "detail": error.detail} | _told(error))
                elif len(applicable) > 1:
                    half = len(applicable) // 2
                    self._try(applicable[:half])
                    self._try(applicable[half:])
                return
        self._ending.record(self._executor.taken())
        if self._left.full:
            self._left.write()

    def _identical(self, payload: bytes, error: ApplyError) -> bool:
        """Whether the row that could not be inserted is there already: nothing of it is missing then."""
        message = decode_change(payload, self._transaction.in_stream)
        if error.conflict is None or not isinstance(message, Insert) or _BINARY in message.new.kinds:
            return False
        relation = self._session.relations.known(message.relid)
        if relation is None:
            return False
        look = TableLook(Within(self._session.connection), relation.target)
        row = look.read({c.name: _text(message.new.values[i]) for i, c in enumerate(relation.columns)})
        there = look.taken(row)
        return bool(there) and all(one.values[name] == value for _, one in there for name, value in row.items())

    def _without_tainted(self, payloads: Sequence[bytes]) -> Sequence[bytes]:
        """Left out is what changes a row that an earlier change could not bring: it depends on it."""
        if not self._tainted:
            return payloads
        applicable = []
        for payload in payloads:
            message = decode_change(payload, self._transaction.in_stream)
            if isinstance(message, Truncate):
                self._tainted = {key for key in self._tainted if key[0] not in message.relids}
            keys = self._keys(message)
            if keys and keys[0] in self._tainted and not isinstance(message, Insert):
                self._leave(payload, {"error": "it depends on a change that was skipped"})
            else:
                applicable.append(payload)
        return applicable

    def _leave(self, payload: bytes, reason: dict[str, str | None]) -> None:
        message = decode_change(payload, self._transaction.in_stream)
        self._tainted.update(self._keys(message))
        for relid in _relids(message):
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
        value = (searched if row.kinds[i] == _UNCHANGED else row).values[i]
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


def _relids(message: Message) -> Sequence[int]:
    if isinstance(message, Truncate):
        return message.relids
    return (message.relid,) if isinstance(message, Insert | Update | Delete) else ()
