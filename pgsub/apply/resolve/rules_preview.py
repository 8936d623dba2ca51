"""What the rules for conflicts would do with a change; :mod:`pgsub.apply.resolve.resolver` does it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psycopg

from pgsub.apply.resolve import policy
from pgsub.apply.resolve.policy import Verdict
from pgsub.common import conflict_rules as rules
from pgsub.target.catalog.mapping import RelationMap
from pgsub.target.ledger.skip import SkipRule
from pgsub.target.sql import conflict_search
from pgsub.target.sql.conflict_search import ConflictingRow


@dataclass(frozen=True, slots=True)
class Ruling:
    """What becomes of a change that meets a conflict, and the rule that says so, as the command line has it."""

    verdict: Verdict
    rule: str


class Foresight:
    """Asks the rules of a subscription in the order in which the changes of one transaction would.

    :param session: of the target; anything but what the changes are looked at with.
    :param on_conflict: the subscription's rules, which last.
    :param floods: those that end by themselves, and go before them.
    :ivar commit_ts: of the transaction, microseconds since 2000.
    """

    def __init__(
        self, session: psycopg.Connection, subid: int, on_conflict: Sequence[str], floods: Iterable[SkipRule]
    ) -> None:
        self._session = session
        self._subid = subid
        self._lasting = on_conflict
        self._limits = {one.place: one.limit for one in floods}
        self.commit_ts = 0

    def existing(
        self, relation: RelationMap, kind: str, xids: Iterable[str | None], *, identical: bool
    ) -> Ruling | None:
        """Of rows in the way; None: no rule is asked.

        :param xids: the transactions that wrote them, None for the one that is looked at.
        :param identical: all of them are the one row that was to be inserted.
        """
        own = relation.rule(rules.IDENTICAL) if identical else None
        if own is not None:
            return Ruling(self._decide(own, ()), f"{rules.IDENTICAL}={own}")
        return self._ruling(relation, kind, [self._written(xid) for xid in xids])

    def missing(self, relation: RelationMap, kind: str) -> Ruling | None:
        """Of a row that is not there."""
        return self._ruling(relation, kind, ())

    def differing(self, relation: RelationMap, kind: str, xid: str | None) -> Ruling | None:
        """Of a row that is to be changed; None: no rule is asked, or nobody else wrote it last."""
        if xid is None or relation.rule(kind) is None:
            return None
        found = self._written(xid)
        if found.at is None or policy.own(found, self._subid):
            return None
        return self._ruling(relation, kind, [found])

    def _written(self, xid: str | None) -> ConflictingRow:
        return conflict_search.written(self._session, ConflictingRow("", xid=None if xid is None else int(xid)))

    def _ruling(self, relation: RelationMap, kind: str, local: Sequence[ConflictingRow]) -> Ruling | None:
        """The rule for a flood goes first, as long as it lasts."""
        schema, name = relation.target.schema, relation.target.name
        place = f"{schema}.{name}", kind
        if self._limits.get(place):
            self._limits[place] -= 1
            return Ruling(Verdict.SKIP, f"{kind}={rules.SKIP}")
        lasting = dict(rules.of_table(self._lasting, schema, name)).get(kind)
        return None if lasting is None else Ruling(self._decide(lasting, local), f"{kind}={lasting}")

    def _decide(self, how: str, local: Sequence[ConflictingRow]) -> Verdict:
        return policy.decide(how, self.commit_ts, local, self._subid, lambda: policy.tie(self._session, self._subid))
