"""Predicts what :mod:`pgsub.apply.resolve.resolver` would do with a change by the rules for conflicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psycopg

from pgsub.apply.resolve import winner
from pgsub.apply.resolve.rules import Decisions
from pgsub.apply.resolve.winner import Action
from pgsub.apply.rows.relation_map import RelationCache
from pgsub.common.conflict_rules import IDENTICAL, Rule
from pgsub.target.catalog.mapping import RelationMap
from pgsub.target.sql import conflict_search
from pgsub.target.sql.conflict_search import ConflictingRow


@dataclass(frozen=True, slots=True)
class Decision:
    """The action for a change with a conflict, and the rule that decides it, as the command line has it."""

    action: Action
    rule: str


class RulesPreview:
    """The rules of a subscription, asked in the order in which the changes of one transaction would.

    :param session: of the target; anything but what the changes are looked at with.
    :ivar commit_ts: of the transaction, microseconds since 2000.
    """

    def __init__(self, session: psycopg.Connection, relations: RelationCache) -> None:
        self._session = session
        self._relations = relations
        self._decisions = Decisions(session, relations)
        self.commit_ts = 0

    def existing(
        self, relation: RelationMap, kind: str, xids: Iterable[str | None], *, identical: bool
    ) -> Decision | None:
        """Decide about rows in the way; None: there is no rule.

        :param xids: the transactions that wrote them, None for the one that is looked at.
        :param identical: all of them are the one row that was to be inserted.
        """
        own = self._decisions.rule(relation, IDENTICAL) if identical else None
        if own is not None:
            return self._decision(own, ())
        rule = self._decisions.rule(relation, kind)
        return None if rule is None else self._decision(rule, [self._written(xid) for xid in xids])

    def missing(self, relation: RelationMap, kind: str) -> Decision | None:
        """Decide about a row that is missing; None: there is no rule."""
        rule = self._decisions.rule(relation, kind)
        return None if rule is None else self._decision(rule, ())

    def differing(self, relation: RelationMap, kind: str, xid: str | None) -> Decision | None:
        """Decide about a row to be changed; None: there is no rule, or the subscription wrote the row itself."""
        rule = self._decisions.rule(relation, kind)
        if xid is None or rule is None:
            return None
        found = self._written(xid)
        if found.at is None or winner.own(found, self._relations.subid):
            return None
        return self._decision(rule, [found])

    def _written(self, xid: str | None) -> ConflictingRow:
        return conflict_search.written(self._session, ConflictingRow("", xid=None if xid is None else int(xid)))

    def _decision(self, rule: Rule, local: Sequence[ConflictingRow]) -> Decision:
        self._relations.rules.use(rule)
        return Decision(self._decisions.action(rule, self.commit_ts, local), f"{rule.conflict}={rule.resolution}")
