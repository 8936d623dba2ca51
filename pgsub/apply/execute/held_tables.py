"""Which of an executor's changes are those of held tables: off to where they are kept with them."""

from __future__ import annotations

import psycopg

from pgsub.apply.execute.held_changes import Keeping
from pgsub.apply.rows.change_block import ChangeBlock
from pgsub.apply.rows.change_filter import ChangeFilter, Filter
from pgsub.apply.rows.relation_map import RelationCache
from pgsub.apply.rows.writer import RowWriter
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.protocol.messages import Truncate
from pgsub.protocol.reader import INT32
from pgsub.target.sql.pipeline import StatementFailed

_TYPES = {ord("I"): "INSERT", ord("U"): "UPDATE", ord("D"): "DELETE"}
_RELID = INT32.unpack_from


class HeldChanges:
    """Of one executor.

    :param rows: of the same session: its role and pipeline are left before anything is written.
    """

    def __init__(self, keeping: Keeping, rows: RowWriter, relations: RelationCache, admission: ChangeFilter) -> None:
        self._keeping = keeping
        self._rows = rows
        self._relations = relations
        self._admission = admission

    def begin(self) -> None:
        """A target transaction was opened, or what was not written yet is undone."""
        self._keeping.begin()

    def without(self, block: ChangeBlock, admits: Filter) -> ChangeBlock:
        """Take the changes of held tables; what is left of the block."""
        relids = self._admission.keeps(block, admits) if len(block) and self._keeping.active else None
        if not relids:
            return block
        held, rest = block.split(relids)
        for transaction, payload in held.rows():
            self._keep(transaction, payload, admits)
        return rest

    def takes(self, transaction: RemoteTransaction, payload: bytes, admits: Filter) -> bool:
        """Take a message if it is a row's of a held table."""
        return payload[0] in _TYPES and self._keeping.active and self._keep(transaction, payload, admits)

    def _keep(self, transaction: RemoteTransaction, payload: bytes, admits: Filter) -> bool:
        relid = _RELID(payload, 5 if transaction.in_stream else 1)[0]
        srrelid = self._admission.kept(transaction, _TYPES[payload[0]], relid, admits)
        if srrelid is None:
            return False
        self._keeping.keep(transaction, self._relations.remote(relid), srrelid, payload)
        if self._keeping.full:
            self.write()
        return True

    def truncated(self, transaction: RemoteTransaction, message: Truncate, admits: Filter) -> None:
        """Take what TRUNCATE says of held tables."""
        if not self._keeping.active:
            return
        for relid in message.relids:
            srrelid = self._admission.kept(transaction, "TRUNCATE", relid, admits)
            if srrelid is not None:
                self._keeping.keep_truncate(transaction, self._relations.remote(relid), srrelid, message)

    def write(self) -> None:
        """Everything taken is in the open transaction then.

        :raises StatementFailed: the transaction is aborted.
        """
        if self._keeping.empty:
            return
        self._rows.sync()
        try:
            self._keeping.write()
        except psycopg.Error as error:
            raise StatementFailed(None, error, None) from None
