"""Which rule decides a conflict, what it says, and what is recorded of that. Goes beyond the server's conflict.c."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import psycopg

from pgsub.apply.conflicts import conflict
from pgsub.apply.conflicts.conflict import Place, Resolved
from pgsub.apply.conflicts.record import ConflictRecord
from pgsub.apply.resolve import policy
from pgsub.apply.resolve.policy import Verdict
from pgsub.apply.rows.relation_map import RelationCache
from pgsub.apply.rows.writer import RowWriter
from pgsub.common import conflict_rules as rules
from pgsub.protocol.messages import Message
from pgsub.target.sql.conflict_search import ConflictingRow

_TOLD = {
    Verdict.APPLY: "The remote change was applied",
    Verdict.KEEP: "What is on the target was kept",
    Verdict.SKIP: "The remote change was skipped and is in pgsub.skipped_change",
}


class Case:
    """A change that is being dealt with.

    :ivar met: it met a conflict that did not stop it.
    :ivar left: it was not made because of rows in its way.
    :ivar pending: is recorded once the change is made.
    :ivar flood: the place of the rule for a flood that decides.
    """

    def __init__(self, place: Place, message: Message) -> None:
        self.place = place
        self.message = message
        self.met = self.left = False
        self.pending: Resolved | None = None
        self.flood: tuple[str, str] | None = None

    def rule(self, kind: str) -> str | None:
        """How a type of conflict is resolved on its relation."""
        assert self.place.relation is not None
        return self.place.relation.rule(kind)


class Rulings:
    """Of one executor.

    :param connection: the session; the caller opens and ends transactions.
    :param rows: of that session; takes the records.
    """

    def __init__(self, connection: psycopg.Connection, rows: RowWriter, relations: RelationCache) -> None:
        self._connection = connection
        self._rows = rows
        self._relations = relations
        self._subid = relations.subid
        self._limits: dict[tuple[str, str], int] = {}  #: of rules for floods, what is left in this target transaction

    def begin(self) -> None:
        """A target transaction was opened."""
        self._limits = {one.place: one.limit for one in self._relations.floods}

    def rule(self, case: Case, kind: str) -> str | None:
        """How a type of conflict is resolved: by a rule for a flood as long as that lasts."""
        relation = case.place.relation
        assert relation is not None
        schema, name = relation.target.schema, relation.target.name
        place = f"{schema}.{name}", kind
        left = self._limits.get(place)
        case.flood = place if left else None
        if left is None:
            return case.rule(kind)
        return rules.SKIP if left else self._relations.lasting_rule(schema, name, kind)

    def decide(self, how: str, case: Case, local: Sequence[ConflictingRow]) -> Verdict:
        """What a rule says.

        :param how: the resolution that it names.
        :param local: the rows in the way.
        """
        return policy.decide(how, case.place.transaction.commit_ts, local, self._subid, self._tie)

    def other_ways(self) -> str:
        """The end of a hint."""
        return f"Other ways are told by:\npgsub status {self._relations.subname} --runbook"

    def _tie(self) -> Verdict:
        return policy.tie(self._connection, self._subid)

    def note(self, case: Case, record: ConflictRecord, how: str | None, verdict: Verdict) -> None:
        """Record what became of a conflict, or stop at it."""
        if verdict is Verdict.STOP:
            error = conflict.stopped(self._subid, record, case.place)
            error.hint = f"Change the target, or the rule: apply goes on by itself. {self.other_ways()}"
            raise error
        self.record(case, self.resolved(case, record, how, verdict))

    def resolved(self, case: Case, record: ConflictRecord, how: str | None, verdict: Verdict) -> Resolved:
        """A record with what became of its conflict, and what is kept of a change that is skipped.

        :param how: the resolution that decided, or ``type=resolution`` of a rule for another type; None: no rule.
        """
        letter = None
        if how is not None:
            rule = how if "=" in how else f"{record.conflict_type}={how}"
            record.action = verdict.value
            record.detail += f"\n{_TOLD[verdict]} by the rule {rule}."
            record.quiet = case.flood is not None
        if verdict is Verdict.SKIP:
            assert case.place.relation is not None
            record.letter = secrets.token_hex(8)
            reason = {
                "skipped": "rule",
                "ref": record.letter,
                "error": record.message,
                "detail": record.detail,
                "sqlstate": None,
                "conflict": record.conflict_type,
            }
            letter = case.place.relation.remote, case.message, reason
        return Resolved(case.place.transaction, record, letter, case.flood)

    def record(self, case: Case, resolved: Resolved) -> None:
        """Have it recorded; one by a rule for a flood counts."""
        case.met = True
        if resolved.flood is not None:
            self._limits[resolved.flood] -= 1
        self._rows.records.append((self._rows.depth, resolved))
