"""Keeps changes of held tables on the target (``pgsub.held_change``) instead of applying them.

It belongs to one executor: kept changes are written in order with the applied ones, and undone with them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import psycopg

from pgsub.apply.rows.change_block import ChangeBlock
from pgsub.apply.rows.table_state_filter import TableStateFilter
from pgsub.apply.rows.writer import RowWriter
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.protocol import encoder
from pgsub.protocol.encoder import encode
from pgsub.protocol.messages import Relation, Truncate
from pgsub.protocol.parse_changes import relid_of
from pgsub.target.ledger.tables import held_tables
from pgsub.target.ledger.tables.held_tables import HeldChanges
from pgsub.target.sql.pipeline import StatementFailed

#: Bytes of messages in one row of the ledger, and bytes and messages that are written together.
STRETCH_BYTES = 256 << 10
WRITE_BYTES, WRITE_MESSAGES = 4 << 20, 10_000

_TYPES = {ord("I"): "INSERT", ord("U"): "UPDATE", ord("D"): "DELETE"}


class HeldChangeWriter:
    """A writer of the changes of held tables, in one target session.

    :param rows: writer of that session; its role and pipeline are left before anything is written.
    :param holds: returns whether any table is held.
    """

    def __init__(self, rows: RowWriter, changes: TableStateFilter, holds: Callable[[], bool]) -> None:
        self._rows = rows
        self._relations = rows.relations
        self._filter = changes
        self._holds = holds
        self._descriptions: dict[Relation, bytes] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a target transaction, or discard unwritten changes that were undone."""
        self._kept: list[tuple[RemoteTransaction, Relation, int, int, bytes]] = []
        self._bytes = 0

    def split_off(self, block: ChangeBlock) -> ChangeBlock:
        """Keep the changes of held tables; return the rest of the block."""
        relids = self._filter.held_relations(block) if len(block) and self._holds() else None
        if not relids:
            return block
        held, rest = block.split(relids)
        for transaction, payload in held.rows():
            self._keep_row(transaction, payload)
        return rest

    def keep(self, transaction: RemoteTransaction, payload: bytes) -> bool:
        """Keep a row message of a held table; return whether it was kept."""
        return payload[0] in _TYPES and self._holds() and self._keep_row(transaction, payload)

    def _keep_row(self, transaction: RemoteTransaction, payload: bytes) -> bool:
        relid = relid_of(payload, in_stream=transaction.in_stream)
        srrelid = self._filter.held_table(transaction, _TYPES[payload[0]], relid)
        if srrelid is None:
            return False
        row = encoder.outside_stream(payload, in_stream=transaction.in_stream)
        self._add(transaction, self._relations.remote(relid), srrelid, row)
        if self._bytes >= WRITE_BYTES or len(self._kept) >= WRITE_MESSAGES:
            self.write()
        return True

    def keep_truncate(self, transaction: RemoteTransaction, message: Truncate) -> None:
        """Keep a TRUNCATE for each of its tables that is held."""
        for relid in message.relids if self._holds() else ():
            srrelid = self._filter.held_table(transaction, "TRUNCATE", relid)
            if srrelid is not None:
                alone = encode(message._replace(relids=(relid,)))
                self._add(transaction, self._relations.remote(relid), srrelid, alone)

    def _add(self, transaction: RemoteTransaction, relation: Relation, srrelid: int, payload: bytes) -> None:
        self._kept.append((transaction, relation, srrelid, self._bytes // STRETCH_BYTES, payload))
        self._bytes += len(payload)

    def _stretch(self, kept: list[tuple[RemoteTransaction, Relation, int, int, bytes]]) -> HeldChanges:
        transaction, relation, srrelid, *_ = kept[0]
        described = self._descriptions.get(relation)
        if described is None:
            described = self._descriptions[relation] = encoder.relation(relation)
        place = (transaction.xid, transaction.finish_lsn, transaction.commit_ts)
        payloads = [payload for *_, payload in kept]
        return HeldChanges(0, srrelid, *place, described, encoder.joined(payloads), len(payloads))

    def write(self) -> None:
        """Write the kept changes in the open transaction, one row per transaction, relation and stretch.

        :raises StatementFailed: the transaction is aborted.
        """
        kept = self._kept
        if not kept:
            return
        self.begin()
        self._rows.sync()
        groups = groupby(kept, lambda one: (id(one[0]), id(one[1]), one[3]))
        stretches = [self._stretch(list(group)) for _, group in groups]
        try:
            held_tables.store(self._rows.connection, self._relations.subid, stretches)
        except psycopg.Error as error:
            raise StatementFailed(None, error, None) from None
