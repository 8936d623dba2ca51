"""Changes of held tables, kept on the target in the transaction that would have made them (``pgsub.held_change``).

Part of one executor: what is kept has its place among the changes that are made, and is undone with them.
"""

from __future__ import annotations

from collections.abc import Callable

import psycopg

from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.protocol import kept
from pgsub.protocol.encoder import encode
from pgsub.protocol.messages import Relation, Truncate
from pgsub.target.ledger import held_tables
from pgsub.target.ledger.held_tables import HeldChanges

#: Bytes of messages in one row of the ledger, and bytes and rows that are written together.
STRETCH_BYTES = 256 << 10
WRITE_BYTES, WRITE_ROWS = 4 << 20, 10_000


class Keeping:
    """Keeps changes through one target session.

    :param holds: whether any table is held.
    """

    def __init__(self, connection: psycopg.Connection, subid: int, holds: Callable[[], bool]) -> None:
        self._connection = connection
        self._subid = subid
        self._holds = holds
        self._descriptions: dict[Relation, bytes] = {}
        self.begin()

    @property
    def active(self) -> bool:
        """Whether a change may have to be kept."""
        return self._holds()

    def begin(self) -> None:
        """A target transaction was opened, or what was not written yet is undone."""
        self._stretches: list[HeldChanges] = []
        self._bytes = 0  #: of these and the open one
        self._open: tuple[RemoteTransaction, Relation, int] | None = None
        self._payloads: list[bytes] = []
        self._length = 0

    @property
    def empty(self) -> bool:
        """Whether there is nothing to :meth:`write`."""
        return self._open is None and not self._stretches

    @property
    def full(self) -> bool:
        """Whether it is time to :meth:`write`."""
        return self._bytes >= WRITE_BYTES or len(self._stretches) >= WRITE_ROWS

    def keep(self, transaction: RemoteTransaction, relation: Relation, srrelid: int, payload: bytes) -> None:
        """A row message.

        :param relation: as the publisher described it then.
        :param srrelid: the held table.
        """
        self._add(transaction, relation, srrelid, kept.row(payload, in_stream=transaction.in_stream))

    def keep_truncate(
        self, transaction: RemoteTransaction, relation: Relation, srrelid: int, message: Truncate
    ) -> None:
        """TRUNCATE of the held table, and perhaps of others."""
        self._add(transaction, relation, srrelid, encode(message._replace(relids=(relation.relid,))))

    def _add(self, transaction: RemoteTransaction, relation: Relation, srrelid: int, payload: bytes) -> None:
        now = self._open
        if now is None or now[0] is not transaction or now[1] is not relation or self._length >= STRETCH_BYTES:
            self._end_stretch()
            self._open = transaction, relation, srrelid
        self._payloads.append(payload)
        self._length += len(payload)
        self._bytes += len(payload)

    def _end_stretch(self) -> None:
        if self._open is None:
            return
        (transaction, relation, srrelid), payloads = self._open, self._payloads
        self._open, self._payloads, self._length = None, [], 0
        described = self._descriptions.get(relation)
        if described is None:
            described = self._descriptions[relation] = kept.relation(relation)
        place = (transaction.xid, transaction.finish_lsn, transaction.commit_ts)
        self._stretches.append(HeldChanges(0, srrelid, *place, described, kept.joined(payloads), len(payloads)))

    def write(self) -> None:
        """Into the open transaction; the session is out of its pipeline and in its own role.

        :raises psycopg.Error: the transaction is aborted.
        """
        self._end_stretch()
        stretches = self._stretches
        self.begin()
        if stretches:
            held_tables.store(self._connection, self._subid, stretches)
