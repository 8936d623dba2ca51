"""Executes the changes of whole transactions in order inside one open target transaction.

Serial and pipelined: a row a statement, many statements a round trip; runs of inserts into one table go as COPY.
What a batch does is handed over as transactions and a filter, and nothing here owns the ledger: a set-based
executor takes the same arguments. Mirrors apply_handle_insert/update/delete/truncate (worker.c).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import psycopg

from pgsub.apply import conflict
from pgsub.apply.conflict import ConflictRecord, Place
from pgsub.apply.relations import NEVER, RelationCache, local_name
from pgsub.apply.transactions import RemoteTransaction
from pgsub.errors import ApplyError, PgsubError, ProtocolViolation, SchemaFault
from pgsub.protocol.decoder import decode_change
from pgsub.protocol.messages import Delete, Insert, Message, Relation, Truncate, Tuple, TypeName, Update
from pgsub.target import copyin, statements
from pgsub.target.pipeline import Pipeline, StatementFailed
from pgsub.target.relation import RelationMap, check_updatable
from pgsub.target.statements import Statement

#: Inserts in a row from which COPY pays for its two extra round trips.
COPY_FROM = 50
#: Rows and bytes of one COPY: bounds memory.
COPY_ROWS, COPY_BYTES = 20_000, 4 << 20

_UNCHANGED = ord("u")
_DESCRIBING = frozenset(b"RY")

#: Decides whether a change is taken, by the remote relation, the oid of the target's table of that name, and the
#: finish LSN: the oid of the subscribed table, or None to leave it.
Filter = Callable[[Relation, int, int], int | None]


class Executor:
    """One per target session.

    :param connection: autocommit; the caller opens and ends transactions around :meth:`run`.
    :param subid: names the origin in contexts.
    :ivar copies: whether runs of inserts may go as COPY; off while a failed row is to be named.
    :ivar changes: rows applied, for statistics.
    """

    def __init__(self, connection: psycopg.Connection, subid: int, relations: RelationCache) -> None:
        self._connection = connection
        self._subid = subid
        self._relations = relations
        self._pipeline = Pipeline(connection)
        self._inserts: list[Tuple] = []
        self._insert_bytes = 0
        self._insert_place: Place | None = None
        self._conflicts: list[ConflictRecord] = []
        self._touched: dict[tuple[str, str], int] = {}
        self._replaced: list[tuple[str, str]] = []
        self.copies = True
        self.changes = 0

    def run(self, transactions: Iterable[RemoteTransaction], admits: Filter) -> list[ConflictRecord]:
        """Apply everything; returns when every statement has succeeded.

        :param admits: asked for each change, with the transaction's finish LSN.
        :return: conflicts that were skipped (missing rows).
        :raises PgsubError: located; the target transaction is aborted.
        """
        self._inserts, self._insert_place, self._insert_bytes = [], None, 0
        self._conflicts, self._touched, self._replaced = [], {}, []
        try:
            for transaction in transactions:
                for payload in transaction.payloads():
                    self._one(transaction, decode_change(payload, transaction.in_stream), admits)
            self._flush_inserts()
            self._look_for_replaced()
            self._pipeline.sync()
            self._refuse_replaced()
        except StatementFailed as failure:
            place = failure.tag if isinstance(failure.tag, Place) else None
            raise conflict.fault(self._subid, failure.error, place, failure.statement) from None
        except PgsubError:
            with contextlib.suppress(StatementFailed):
                self._pipeline.sync()  # the session must be out of the pipeline before it can roll back
            raise
        return self._conflicts

    def _look_for_replaced(self) -> None:
        """Statements find tables by name. What they found is locked now, so its oid tells whether it is still ours.

        Of tables whose changes were left too: another one that is subscribed may have got the name meanwhile.
        """
        for name, oid in self._touched.items():

            def on_count(count: int, name: tuple[str, str] = name) -> None:
                if count == 0:
                    self._replaced.append(name)

            values = (str(oid).encode(), name[0].encode(), name[1].encode())
            self._pipeline.send(statements.UNREPLACED, values, (0, 0, 0), None, on_count)

    def _refuse_replaced(self) -> None:
        for schema, name in self._replaced:
            raise SchemaFault(
                f'logical replication target relation "{schema}.{name}" was replaced by another table',
                detail=f"The changes were meant for OID {self._touched[schema, name]}.",
            )

    def skim(self, transaction: RemoteTransaction) -> None:
        """Nothing of it is applied, but what it says of relations is not said again."""
        for payload in transaction.payloads():
            if payload[0] in _DESCRIBING:
                self._learn(decode_change(payload, transaction.in_stream))

    def _learn(self, message: Message) -> None:
        if isinstance(message, TypeName):
            self._relations.learn_type(message)
        elif isinstance(message, Relation):
            self._relations.learn(message)

    def _one(self, transaction: RemoteTransaction, message: Message, admits: Filter) -> None:
        match message:
            case Insert():
                relation = self._target(transaction, "INSERT", message.relid, admits)
                if relation is not None:
                    self._insert(transaction, relation, message)
            case Update():
                relation = self._target(transaction, "UPDATE", message.relid, admits)
                if relation is not None:
                    self._flush_inserts()
                    self._update(Place(transaction, "UPDATE", relation, message.new, message.old))
            case Delete():
                relation = self._target(transaction, "DELETE", message.relid, admits)
                if relation is not None:
                    self._flush_inserts()
                    self._delete(Place(transaction, "DELETE", relation, None, message.old))
            case Relation() | TypeName():
                self._flush_inserts()
                self._learn(message)
            case Truncate():
                self._truncate(transaction, message, admits)

    def _target(
        self, transaction: RemoteTransaction, message_type: str, relid: int, admits: Filter
    ) -> RelationMap | None:
        relations, remote = self._relations, self._relations.remote(relid)
        oid = relations.oid(relid)
        if oid is None:
            with self._asking(transaction, message_type, remote):
                oid = relations.find(relid)
        taken = admits(remote, oid, transaction.finish_lsn)
        if oid != NEVER:
            self._touched[local_name(remote)] = oid
        if taken is None:
            return None
        relation = relations.known(relid)
        if relation is None:
            with self._asking(transaction, message_type, remote):
                relation = relations.make(relid, taken)
        return relation

    @contextlib.contextmanager
    def _asking(self, transaction: RemoteTransaction, message_type: str, remote: Relation) -> Iterator[None]:
        """The catalogs are read on the same session, between its statements; faults get their place."""
        self._flush_inserts()
        self._pipeline.sync()
        try:
            yield
        except PgsubError as error:
            conflict.located(error, self._subid, Place(transaction, message_type))
            if isinstance(error, ApplyError):
                error.relation = ".".join(local_name(remote))
            raise

    def _insert(self, transaction: RemoteTransaction, relation: RelationMap, message: Insert) -> None:
        _check_width(relation, message.new)
        if not self.copies:
            self.changes += 1
            place = Place(transaction, "INSERT", relation, message.new)
            self._send(self._insert_statement(place, relation), place, None)
            return
        if self._insert_place is not None and self._insert_place.relation is not relation:
            self._flush_inserts()
        if self._insert_place is None:
            self._insert_place = Place(transaction, "INSERT", relation, message.new)
        self._inserts.append(message.new)
        self._insert_bytes += sum([len(v) for v in message.new.values if v is not None])
        if len(self._inserts) >= COPY_ROWS or self._insert_bytes >= COPY_BYTES:
            self._flush_inserts()

    def _insert_statement(self, place: Place, relation: RelationMap) -> Statement:
        return self._statement(place, relation, b"I", b"", lambda: statements.insert(relation))

    def _flush_inserts(self) -> None:
        place, rows = self._insert_place, self._inserts
        if place is None or place.relation is None:
            return
        self._insert_place, self._inserts, self._insert_bytes = None, [], 0
        self.changes += len(rows)
        # COPY without a column list means all columns of the target, not none
        form = copyin.format_of(rows) if len(rows) >= COPY_FROM and place.relation.columns else None
        if form is not None:
            self._copy(place, rows, binary=form == "binary")
        else:
            statement = self._insert_statement(place, place.relation)
            for row in rows:
                self._send(statement, Place(place.transaction, "INSERT", place.relation, row), None)

    def _copy(self, place: Place, rows: list[Tuple], *, binary: bool) -> None:
        relation = place.relation
        assert relation is not None
        self._pipeline.sync()
        statement = statements.copy_in(relation.target, [c.name for c in relation.columns], binary=binary)
        try:
            copyin.run(self._connection, statement, rows, binary=binary)
        except psycopg.Error as error:
            raise StatementFailed(place, error, None) from None

    def _update(self, place: Place) -> None:
        relation, new, old = place.relation, place.new, place.old
        assert relation is not None and new is not None
        _check_width(relation, new)
        old_kinds = None
        if old is not None:
            _check_width(relation, old)
            old_kinds = old.kinds
        build = statements.move if _moves(relation, new, old) else statements.update
        statement = self._statement(
            place,
            relation,
            (b"M" if build is statements.move else b"U") + new.kinds,
            old_kinds or b"",
            lambda: _checked(relation, build(relation, new.kinds, old_kinds)),
        )
        self._send(statement, place, self._missing(place))
        self.changes += 1

    def _delete(self, place: Place) -> None:
        relation, old = place.relation, place.old
        assert relation is not None and old is not None
        _check_width(relation, old)
        statement = self._statement(
            place, relation, b"D", old.kinds, lambda: _checked(relation, statements.delete(relation, old.kinds))
        )
        self._send(statement, place, self._missing(place))
        self.changes += 1

    def _missing(self, place: Place) -> Callable[[int], None]:
        def on_count(count: int) -> None:
            if count == 0:
                self._conflicts.append(conflict.missing_row(self._subid, place))

        return on_count

    def _truncate(self, transaction: RemoteTransaction, message: Truncate, admits: Filter) -> None:
        self._flush_inserts()
        found = [self._target(transaction, "TRUNCATE", relid, admits) for relid in message.relids]
        targets = [r.target for r in found if r is not None]
        if not targets:
            return
        text = statements.truncate(targets, restart_identity=message.restart_identity)
        place = Place(transaction, "TRUNCATE", next(r for r in found if r is not None))
        self._pipeline.sync()
        try:
            self._connection.execute(text)  # not prepared: what is prepared stays with the session
        except psycopg.Error as error:
            raise StatementFailed(place, error, None) from None
        self.changes += 1

    def _statement(
        self, place: Place, relation: RelationMap, shape: bytes, old_shape: bytes, build: Callable[[], Statement]
    ) -> Statement:
        key = (relation.remote.relid, shape, old_shape)
        known = self._relations.statements.get(key)
        if known is None:
            try:
                known = self._relations.statements[key] = build()
            except PgsubError as error:
                conflict.located(error, self._subid, place)
                raise
        return known

    def _send(self, statement: Statement, place: Place, on_count: Callable[[int], None] | None) -> None:
        new, old = place.new, place.old
        values: list[bytes | None] = []
        formats: list[int] = []
        for source, position in statement.takes:
            row = new if source == "n" else old
            assert row is not None
            values.append(row.values[position])
            formats.append(row.kinds[position] == 0x62)
        self._pipeline.send(statement, values, formats, place, on_count)


def _checked(relation: RelationMap, statement: Statement) -> Statement:
    check_updatable(relation)
    return statement


def _moves(relation: RelationMap, new: Tuple, old: Tuple | None) -> bool:
    """Whether a GENERATED ALWAYS identity column may get another value, which an UPDATE cannot give it."""
    for i in relation.always:
        if new.kinds[i] == _UNCHANGED or (old is None and relation.by_identity and i in relation.lookup):
            continue
        if old is None or (old.kinds[i], old.values[i]) != (new.kinds[i], new.values[i]):
            return True
    return False


def _check_width(relation: RelationMap, row: Tuple) -> None:
    if len(row.kinds) != len(relation.columns):
        raise ProtocolViolation(
            f"row of remote relation ID {relation.remote.relid} has {len(row.kinds)} columns,"
            f" but its relation message had {len(relation.columns)}"
        )
