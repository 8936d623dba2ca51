"""Applies messages one by one. Mirrors apply_dispatch and apply_handle_* (worker.c)."""

from __future__ import annotations

from collections.abc import Callable

from pgsub.apply.conflicts.error_context import Place
from pgsub.apply.conflicts.logical_messages import LoggedMessage
from pgsub.apply.execute.held_changes import HeldChangeWriter
from pgsub.apply.rows.table_state_filter import TableStateFilter
from pgsub.apply.rows.writer import RowWriter
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.protocol.decoder import decode_change
from pgsub.protocol.messages import Delete, LogicalMessage, Message, Relation, Truncate, TypeName, Update
from pgsub.protocol.parse_changes import relid_of

_INSERT = ord("I")


class Dispatch:
    """The dispatch of the messages of one executor.

    All methods raise PgsubError, located, or StatementFailed of an earlier statement.

    :param dealt: called after each message other than INSERT; it may take the records.
    """

    def __init__(
        self, rows: RowWriter, changes: TableStateFilter, held: HeldChangeWriter, dealt: Callable[[], None]
    ) -> None:
        self._rows = rows
        self._filter = changes
        self._held = held
        self._dealt = dealt

    def row(self, transaction: RemoteTransaction, payload: bytes) -> None:
        """Apply an encoded message. An INSERT stays encoded, because several may become one COPY."""
        if payload[0] == _INSERT:
            relation = self._filter.target(transaction, "INSERT", relid_of(payload, in_stream=transaction.in_stream))
            if relation is not None:
                self._rows.insert(transaction, relation, payload)
            return
        self.message(transaction, decode_change(payload, transaction.in_stream))

    def message(self, transaction: RemoteTransaction, message: Message) -> None:
        """Apply a message other than INSERT."""
        match message:
            case Update():
                relation = self._filter.target(transaction, "UPDATE", message.relid)
                if relation is not None:
                    self._rows.update(Place(transaction, "UPDATE", relation, message.new, message.old))
            case Delete():
                relation = self._filter.target(transaction, "DELETE", message.relid)
                if relation is not None:
                    self._rows.delete(Place(transaction, "DELETE", relation, None, message.old))
            case Relation() | TypeName():
                self._rows.flush()
                self._rows.relations.learn(message)
                if isinstance(message, Relation):
                    self._filter.forget(message.relid)
            case Truncate():
                self._truncate(transaction, message)
            case LogicalMessage():
                self._rows.conflicts.record(LoggedMessage.of(message, transaction.xid))
            case _:
                raise TypeError(f"{type(message).__name__} cannot be applied")
        self._dealt()

    def _truncate(self, transaction: RemoteTransaction, message: Truncate) -> None:
        self._rows.flush()
        self._held.keep_truncate(transaction, message)
        found = [self._filter.target(transaction, "TRUNCATE", relid) for relid in message.relids]
        relations = [relation for relation in found if relation is not None]
        if relations:
            place, targets = Place(transaction, "TRUNCATE", relations[0]), [one.target for one in relations]
            self._rows.truncate(place, targets, restart_identity=message.restart_identity)
