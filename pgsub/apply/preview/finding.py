"""The prediction for one change of a transaction."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pgsub.target.sql.row_lookup import Row


class Outcome(StrEnum):
    """The result that is predicted for a change, in the order in which outcomes are shown."""

    WOULD_APPLY = "would_apply"
    CONFLICT = "conflict"
    DEPENDENT = "dependent"
    ERROR = "error"
    KEPT = "kept"  #: by a rule, as ``SKIPPED``
    SKIPPED = "skipped"
    MISSING = "missing"
    IDENTICAL = "identical"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Existing:
    """A row of the target that has the unique key of a remote row."""

    index: str
    row: Row
    differs: tuple[str, ...]  #: columns in which it differs from what was sent
    place: str | None = None  #: where it is; None: this very transaction has written it
    xid: str | None = None  #: transaction on the target that wrote it


@dataclass(frozen=True, slots=True)
class Finding:
    """The prediction for one change.

    :ivar conflict: the server's type, where apply would report or stop with one.
    :ivar key: the columns that find the row, with their values.
    :ivar remote: the row as it would be written; None of a DELETE or TRUNCATE.
    :ivar local: the row that it would change, as the target has it when its turn comes.
    :ivar existing: rows that stand in the way.
    :ivar reason: of an error, or why the change is left to others.
    :ivar rule: for the conflict, which decides.
    """

    number: int  #: its place in the transaction, from 1
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
        """Whether apply stops at it."""
        unruled = self.outcome == Outcome.IDENTICAL and self.conflict is not None and self.rule is None
        return unruled or self.outcome in (Outcome.CONFLICT, Outcome.DEPENDENT, Outcome.ERROR)

    @property
    def differs(self) -> tuple[str, ...]:
        """Columns in which the two versions of the row differ."""
        return differences(self.remote, self.local) if self.remote is not None and self.local is not None else ()


def differences(new: Row, present: Row) -> tuple[str, ...]:
    """Return the columns of a new row that another one has, too, with other values."""
    return tuple(name for name, value in new.items() if name in present and present[name] != value)
