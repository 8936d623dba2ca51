"""Records what was decided about a conflict, and keeps the change that a rule skips."""

from __future__ import annotations

import secrets
from typing import Any

from pgsub.apply.conflicts import conflict
from pgsub.apply.conflicts.conflict import ResolvedConflict
from pgsub.apply.conflicts.conflict_record import ConflictRecord
from pgsub.apply.conflicts.error_context import Place
from pgsub.apply.resolve.winner import Action
from pgsub.apply.rows.writer import RowWriter
from pgsub.common.conflict_rules import Rule
from pgsub.protocol.messages import Message

_DETAIL = {
    Action.APPLY: "The remote change was applied",
    Action.KEEP: "The target was left unchanged",
    Action.SKIP: "The remote change was skipped and is in pgsub.skipped_change",
}


class SingleChange:
    """A change that is applied separately, with the outcome of its conflicts.

    :ivar conflicted: it had a conflict that did not stop apply.
    :ivar left: it was not made because of existing rows.
    :ivar pending: recorded once the change is made.
    """

    def __init__(self, place: Place, message: Message) -> None:
        self.place = place
        self.relation = place.mapped
        self.message = message
        self.conflicted = self.left = False
        self.pending: ResolvedConflict | None = None


class Records:
    """The recorder of decisions, which also stops apply where a decision says so.

    :param rows: takes the records.
    """

    def __init__(self, rows: RowWriter) -> None:
        self._rows = rows
        self._relations = rows.relations

    def note(self, change: SingleChange, record: ConflictRecord, rule: Rule | None, action: Action) -> None:
        """Record the decision about a conflict, or stop apply."""
        if action is Action.STOP:
            error = conflict.stop_error(self._relations.subid, record, change.place)
            error.hint = conflict.hint("Change the target, or the rule", self._relations.subname)
            raise error
        self.add(change, self.resolved(change, record, rule, action))

    def resolved(
        self, change: SingleChange, record: ConflictRecord, rule: Rule | None, action: Action
    ) -> ResolvedConflict:
        """Add the decision to a record, and the change if it is skipped.

        :param rule: the rule that decided, None if none did.
        """
        skipped = None
        if rule is not None:
            record.action = action.value
            record.detail += f"\n{_DETAIL[action]} by the rule {rule.conflict}={rule.resolution}."
            record.quiet = rule.limit is not None
        if action is Action.SKIP:
            record.skipped_ref = secrets.token_hex(8)
            reason: dict[str, Any] = {
                "skipped": "rule",
                "ref": record.skipped_ref,
                "error": record.message,
                "detail": record.detail,
                "sqlstate": None,
                "conflict": record.conflict_type,
            }
            skipped = change.relation.remote, change.message, reason
        return ResolvedConflict(change.place.transaction, record, skipped, rule)

    def add(self, change: SingleChange, resolved: ResolvedConflict) -> None:
        """Record a resolved conflict, and count it against the limit of its rule."""
        change.conflicted = True
        if resolved.rule is not None:
            self._relations.rules.use(resolved.rule)
        self._rows.conflicts.record(resolved)
