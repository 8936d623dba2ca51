"""One message after another, each to what deals with it. Mirrors apply_dispatch and apply_handle_* (worker.c)."""

from __future__ import annotations

from collections.abc import Callable

from pgsub.apply.conflicts.conflict import Place
from pgsub.apply.conflicts.logical_messages import LoggedMessage
from pgsub.apply.execute.held_tables import HeldChanges
from pgsub.apply.rows.change_filter import ChangeFilter, Filter
from pgsub.apply.rows.relation_map import RelationCache
from pgsub.apply.rows.writer import RowWriter
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.protocol.decoder import decode_change
from pgsub.protocol.messages import Delete, LogicalMessage, Message, Relation, Truncate, TypeName, Update
from pgsub.protocol.reader import INT32
from pgsub.target.catalog.mapping import RelationMap

_DESCRIBING = frozenset(b"RY")
_INSERT = ord("I")
_RELID = INT32.unpack_from


def _nothing(relation: Relation, oid: int, finish_lsn: int) -> int | None:
    return None


class Dispatch:
    """Of one executor.

    All of it raises PgsubError, located, or StatementFailed of a statement before.

    :param dealt: called after each message that is no INSERT; what is recorded may be taken away then.
    :ivar admits: says of what follows which relations' changes are made.
    """

    def __init__(
        self,
        rows: RowWriter,
        relations: RelationCache,
        admission: ChangeFilter,
        held: HeldChanges,
        dealt: Callable[[], None],
    ) -> None:
        self._rows = rows
        self._relations = relations
        self._admission = admission
        self._held = held
        self._dealt = dealt
        self.admits: Filter = _nothing

    def target(self, transaction: RemoteTransaction, message_type: str, relid: int) -> RelationMap | None:
        """Where a change goes; None: it is left out."""
        return self._admission.target(transaction, message_type, relid, self.admits)

    def row(self, transaction: RemoteTransaction, payload: bytes) -> None:
        """A message as it came; an INSERT is not decoded yet, for many of them may become one COPY."""
        relid_at = 5 if transaction.in_stream else 1
        if payload[0] == _INSERT and len(payload) >= relid_at + 4:
            relation = self.target(transaction, "INSERT", _RELID(payload, relid_at)[0])
            if relation is not None:
                self._rows.insert(transaction, relation, payload)
            return
        self.message(transaction, decode_change(payload, transaction.in_stream))

    def message(self, transaction: RemoteTransaction, message: Message) -> None:
        """A message that is no INSERT."""
        match message:
            case Update():
                relation = self.target(transaction, "UPDATE", message.relid)
                if relation is not None:
                    self._rows.update(Place(transaction, "UPDATE", relation, message.new, message.old))
            case Delete():
                relation = self.target(transaction, "DELETE", message.relid)
                if relation is not None:
                    self._rows.delete(Place(transaction, "DELETE", relation, None, message.old))
            case Relation() | TypeName():
                self._rows.flush()
                self._learn(message)
            case Truncate():
                self._truncate(transaction, message)
            case LogicalMessage():
                self._rows.records.append((self._rows.depth, LoggedMessage.of(message, transaction.xid)))
        self._dealt()

    def learn_relations(self, transaction: RemoteTransaction) -> None:
        """Nothing of it is applied, but what it says of relations is not said again."""
        for payload in transaction.payloads():
            if payload[0] in _DESCRIBING:
                self._learn(decode_change(payload, transaction.in_stream))
        self._relations.learn_from(transaction)

    def _learn(self, message: Message) -> None:
        if isinstance(message, TypeName):
            self._relations.learn_type(message)
        elif isinstance(message, Relation):
            self._relations.learn(message)
            self._admission.forget(message.relid)

    def _truncate(self, transaction: RemoteTransaction, message: Truncate) -> None:
        self._rows.flush()
        self._held.truncated(transaction, message, self.admits)
        found = [self.target(transaction, "TRUNCATE", relid) for relid in message.relids]
        relations = [relation for relation in found if relation is not None]
        if relations:
            place, targets = Place(transaction, "TRUNCATE", relations[0]), [one.target for one in relations]
            self._rows.truncate(place, targets, restart_identity=message.restart_identity)
