"""Keeps changes that are not applied on the target (``pgsub.skipped_change``), in the commit that passes them.

Values are the publisher's texts by column, in a form that any encoding of the target can store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from pgsub.apply.rows.relation_cache import local_name
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.protocol.lsn import format_lsn
from pgsub.protocol.messages import Delete, Insert, Message, Relation, Truncate, Tuple, Update
from pgsub.protocol.reader import BINARY, UNCHANGED
from pgsub.target.sql import jsonb

#: Maximum number and bytes of changes that are written together.
WRITE_ROWS, WRITE_BYTES = 1000, 4 << 20
#: Bytes of a change above which its large values are not kept: a jsonb is limited to 256 MB, and values may be stored
#: in hexadecimal. The length of such a value is stored instead.
KEEPABLE = 100 << 20
CUT = "bytes"


class SkippedChanges:
    """A writer of the skipped changes of one transaction.

    :param connection: the session that applies the data; it is between two statements when changes are written.
    :ivar count: number of changes kept so far.
    :ivar cut: number of values that were too large to be kept.
    """

    def __init__(self, connection: psycopg.Connection, subid: int, transaction: RemoteTransaction) -> None:
        self._connection = connection
        self._subid = subid
        self.transaction = transaction
        self._encoding = jsonb.encoding(connection)
        self._waiting: list[tuple[str, str, str]] = []
        self._bytes = 0
        self.count = 0
        self.cut = 0
        self._longest: int | None = None  #: longest value of the present change to keep, None for no limit

    def keep(self, relation: Relation, message: Message, reason: dict[str, Any]) -> None:
        """Keep one change of one relation.

        :param relation: as the publisher described it at that time.
        :param reason: why it is not applied; ``ref`` links it to the record of its conflict.
        """
        body: dict[str, Any] = {
            "operation": type(message).__name__.upper(),
            "commit_ts": self.transaction.commit_ts,
            "kind": self.transaction.kind.value,
            "replica_identity": relation.replica_identity,
            "identity": [c.name for c in relation.columns if c.is_key],
            **reason,
        }
        self._longest = _longest(message)
        if isinstance(message, Insert | Update):
            body["new"] = self._row(relation, message.new)
            body["unchanged"] = [c.name for i, c in enumerate(relation.columns) if message.new.kinds[i] == UNCHANGED]
        if isinstance(message, Update | Delete) and message.old is not None:
            body["old"], body["old_kind"] = self._row(relation, message.old), message.old_kind
        if isinstance(message, Truncate):
            body["restart_identity"] = message.restart_identity
        text = jsonb.text(body, self._encoding)
        self._waiting.append((*local_name(relation), text))
        self._bytes += len(text)
        self.count += 1
        if len(self._waiting) >= WRITE_ROWS or self._bytes >= WRITE_BYTES:
            self.write()

    def _row(self, relation: Relation, values: Tuple) -> dict[str, Any]:
        return {
            column.name: self._value(values.kinds[i], values.values[i])
            for i, column in enumerate(relation.columns)
            if values.kinds[i] != UNCHANGED
        }

    def _value(self, kind: int, value: bytes | None) -> str | dict[str, str] | None:
        """Return text unchanged; return binary values, and text that the target's encoding may lack, as hexadecimal."""
        if value is None:
            return None
        if self._longest is not None and len(value) > self._longest:
            self.cut += 1
            return {CUT: str(len(value))}
        if kind == BINARY:
            return {"binary": value.hex()}
        try:
            text = value.decode("utf-8" if self._encoding == "UTF8" else "ascii")
        except UnicodeDecodeError:
            return {"text": value.hex()}
        return text

    def write(self) -> None:
        """Write the pending changes in the open transaction."""
        if not self._waiting:
            return
        place = (self._subid, format_lsn(self.transaction.finish_lsn), self.transaction.xid)
        query = "COPY pgsub.skipped_change (subid, finish_lsn, xid, schemaname, relname, body) FROM STDIN"
        with self._connection.cursor() as cursor, cursor.copy(query) as copy:
            for row in self._waiting:
                copy.write_row((*place, *row))
        self._waiting, self._bytes = [], 0


def _longest(message: Message) -> int | None:
    tuples = [message.new] if isinstance(message, Insert | Update) else []
    if isinstance(message, Update | Delete) and message.old is not None:
        tuples.append(message.old)
    values = [len(value) for row in tuples for value in row.values if value is not None]
    return KEEPABLE // (2 * len(values)) if sum(values) > KEEPABLE else None


def changed(message: Message) -> Sequence[int]:
    """Return the remote relations that a message changes."""
    if isinstance(message, Truncate):
        return message.relids
    return (message.relid,) if isinstance(message, Insert | Update | Delete) else ()
