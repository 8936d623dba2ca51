"""Predicts how :mod:`pgsub.apply.resolve.resolver` would resolve the conflicts of a change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import psycopg

from pgsub.apply.resolve import winner
from pgsub.apply.resolve.winner import Action
from pgsub.apply.rows.relation_cache import RelationCache
from pgsub.common.conflict_rules import IDENTICAL, Rule
from pgsub.target.catalog.relation_map import RelationMap
from pgsub.target.sql import conflict_search
from pgsub.target.sql.conflict_search import ConflictingRow

#: The predicted action and the rule in the command line's form; None for both if no rule decides.
Prediction = tuple[Action | None, str | None]


class RulesPreview:
    """The rules of a subscription, asked for the changes of one transaction in their order.

    :param session: a target session, other than the one that reads the rows.
    :ivar commit_ts: commit time of the transaction, in microseconds since 2000.
    """

    def __init__(self, session: psycopg.Connection, relations: RelationCache) -> None:
        self._session = session
        self._relations = relations
        self.commit_ts = 0

    def existing(self, relation: RelationMap, kind: str, xids: Iterable[str | None], *, identical: bool) -> Prediction:
        """Predict the decision about existing rows in conflict.

        :param xids: the transactions that wrote them, None for the previewed transaction.
        :param identical: all of them are the one row that was to be inserted.
        """
        own = self._relations.rule(relation, IDENTICAL) if identical else None
        rule = own or self._relations.rule(relation, kind)
        return self._decided(rule, [self._written(xid) for xid in xids] if rule is not None and own is None else ())

    def missing(self, relation: RelationMap, kind: str) -> Prediction:
        """Predict the decision about a missing row."""
        return self._decided(self._relations.rule(relation, kind), ())

    def differing(self, relation: RelationMap, kind: str, xid: str | None) -> Prediction:
        """Predict the decision about a row to be changed; no rule decides if the subscription itself wrote the row."""
        rule = self._relations.rule(relation, kind)
        found = None if xid is None or rule is None else self._written(xid)
        if found is None or found.at is None or winner.own(found, self._relations.subid):
            return None, None
        return self._decided(rule, [found])

    def _written(self, xid: str | None) -> ConflictingRow:
        return conflict_search.written(self._session, ConflictingRow("", xid=None if xid is None else int(xid)))

    def _decided(self, rule: Rule | None, local: Sequence[ConflictingRow]) -> Prediction:
        if rule is None:
            return None, None
        self._relations.rules.use(rule)
        action = winner.decide(self._session, self._relations.subid, rule, self.commit_ts, local)
        return action, f"{rule.conflict}={rule.resolution}"
