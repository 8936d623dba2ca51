"""The prediction for one change of a transaction, and the values of its row as the publisher sent them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from pgsub.apply.conflicts import conflict_text
from pgsub.common.query import Binary
from pgsub.protocol.messages import Column, Delete, Insert, Message, Relation, Tuple, Update
from pgsub.protocol.reader import BINARY, UNCHANGED
from pgsub.target.catalog.relation import TargetColumn
from pgsub.target.sql.row_lookup import Row


class Outcome(StrEnum):
    """The predicted result of a change, in the order in which outcomes are shown."""

    WOULD_APPLY = "would_apply"
    CONFLICT = "conflict"
    DEPENDENT = "dependent"
    ERROR = "error"
    KEPT = "kept"  #: by a rule, like ``SKIPPED``
    SKIPPED = "skipped"
    MISSING = "missing"
    IDENTICAL = "identical"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Existing:
    """An existing row of the target with a unique key of the remote row."""

    index: str
    row: Row
    differs: tuple[str, ...]  #: columns whose values differ from the sent ones
    place: str | None = None  #: its location; None if this transaction wrote it
    xid: str | None = None  #: the target's transaction that wrote it


@dataclass(frozen=True, slots=True)
class Finding:
    """The prediction for one change.

    :ivar conflict: the server's conflict type, if apply would report or stop with one.
    :ivar key: the columns that find the row, with their values.
    :ivar remote: the row to be written; None for DELETE and TRUNCATE.
    :ivar local: the row to be changed, as of that point of the transaction.
    :ivar existing: the conflicting rows.
    :ivar reason: why it is an error, or why the change is left to others.
    :ivar rule: the rule that decides the conflict.
    """

    number: int  #: its number in the transaction, from 1
    message_type: str
    schemaname: str
    relname: str
    outcome: Outcome
    conflict: str | None = None
    key: Row | None = None
    remote: Row | None = None
    local: Row | None = None
    existing: tuple[Existing, ...] = ()
    reason: str | None = None
    rule: str | None = None

    @property
    def stops(self) -> bool:
        """Whether apply would stop at it."""
        unruled = self.outcome == Outcome.IDENTICAL and self.conflict is not None and self.rule is None
        return unruled or self.outcome in (Outcome.CONFLICT, Outcome.DEPENDENT, Outcome.ERROR)

    @property
    def differs(self) -> tuple[str, ...]:
        """Columns in which the two versions of the row differ."""
        return differences(self.remote, self.local) if self.remote is not None and self.local is not None else ()


def differences(new: Row, present: Row) -> tuple[str, ...]:
    """Return the columns of a new row whose values differ in another row that has them."""
    return tuple(name for name, value in new.items() if name in present and present[name] != value)


def with_sent(finding: Finding, remote: Relation, message: Message) -> Finding:
    """Add the row as the publisher sent it, which is all that is known if the target's table does not match."""
    if not isinstance(message, Insert | Update | Delete):
        return finding
    new = None if isinstance(message, Delete) else message.new
    searched = new if isinstance(message, Insert) else message.old or new
    assert searched is not None
    sent = [
        {c.name: _shown(one, i, c) for i, c in enumerate(remote.columns) if one.kinds[i] != UNCHANGED}
        for one in (searched, new)
        if one is not None
    ]
    key = {c.name: sent[0][c.name] for c in remote.columns if c.is_key and c.name in sent[0]}
    return replace(finding, key=key, remote=None if new is None else sent[-1])


def sent(values: Tuple, position: int, column: TargetColumn) -> str | Binary | None:
    """Return one value as the publisher sent it, for the target to read; None for NULL."""
    raw = values.values[position]
    if raw is not None and values.kinds[position] == BINARY:
        return Binary(column.type_oid, raw)
    return None if raw is None else raw.decode("utf-8", "replace")


def _shown(values: Tuple, position: int, column: Column) -> str | None:
    raw = values.values[position]
    if raw is not None and values.kinds[position] == BINARY:
        return conflict_text.of_binary(raw, column.type_oid)
    return None if raw is None else raw.decode("utf-8", "replace")
