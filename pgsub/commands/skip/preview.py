"""Previews what skipping a transaction would lose. It only reads the target (:mod:`pgsub.apply.preview.simulation`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg

from pgsub.apply.preview.finding import Finding, Outcome
from pgsub.apply.preview.simulation import Admits, Simulation
from pgsub.apply.resolve.rules_preview import RulesPreview
from pgsub.apply.rows.relation_cache import NEVER, RelationCache
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.catalog.rows import ErrorRow
from pgsub.catalog.times import wire_time
from pgsub.commands.sessions import connect_target
from pgsub.common.subscription import Subscription
from pgsub.protocol.lsn import covered, format_lsn
from pgsub.protocol.messages import Relation
from pgsub.target.ledger import skip
from pgsub.target.ledger.subscriptions import table_states
from pgsub.target.session import connect as target
from pgsub.target.session import origins
from pgsub.target.sql.row_lookup import ReadOnlySession

#: Maximum number of listed findings for each outcome.
LISTED = 2_000

SAFE, CAUTION, RISKY = "safe", "caution", "risky"
_LOST = {
    skip.WHOLE: (Outcome.WOULD_APPLY, Outcome.CONFLICT, Outcome.DEPENDENT, Outcome.ERROR),
    skip.CONFLICTING: (Outcome.CONFLICT, Outcome.DEPENDENT, Outcome.ERROR),
}


@dataclass(slots=True)
class Preview:
    """The effect of skipping a transaction.

    :ivar totals: number of changes by table and outcome.
    :ivar omitted: number of changes that are not in ``findings``.
    :ivar not_compared: number of changes that were not compared, and count as lost.
    """

    header: RemoteTransaction | None = None  #: None before the transaction is found
    rows: str = skip.WHOLE
    findings: list[Finding] = field(default_factory=list)
    totals: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    omitted: int = 0
    not_compared: int = 0
    error: ErrorRow | None = None

    def add(self, finding: Finding) -> None:
        """Count a change."""
        table = self.totals.setdefault((finding.schemaname, finding.relname), dict.fromkeys(Outcome, 0))
        table[finding.outcome] += 1
        if self.count(finding.outcome) <= LISTED:
            self.findings.append(finding)
        else:
            self.omitted += 1

    def count(self, *outcomes: str) -> int:
        """Return the number of changes with one of these outcomes."""
        return sum(table[outcome] for table in self.totals.values() for outcome in outcomes)

    @property
    def changes(self) -> int:
        """The total number of changes."""
        return self.count(*Outcome) + self.not_compared

    @property
    def lost(self) -> int:
        """The number of changes that the target would not get."""
        return self.count(*_LOST[self.rows]) + self.not_compared

    @property
    def unexplained(self) -> bool:
        """Whether apply stopped at this transaction for a reason that no finding shows."""
        error = self.error
        if error is None:
            return False
        return not any(one.stops or (one.conflict and one.conflict == error.conflict) for one in self.findings)

    @property
    def verdict(self) -> str:
        """safe: nothing would be lost. caution: conflicting rows would be. risky: applicable changes would be."""
        if self.lost == 0:
            return CAUTION if self.unexplained else SAFE
        applicable = self.count(Outcome.WOULD_APPLY) if self.rows == skip.WHOLE else 0
        return RISKY if applicable or self.count(Outcome.ERROR, Outcome.DEPENDENT) or self.not_compared else CAUTION


@contextlib.contextmanager
def simulate_skip(session: psycopg.Connection, sub: Subscription, finish_lsn: int) -> Iterator[Simulation]:
    """Simulate a transaction that finishes at this LSN."""
    tracked = origins.allowed(session) and target.tracks_commits(session)
    relations = RelationCache(session, sub, replica=target.is_replica(session), tracked=tracked)
    relations.limit_rules(skip.pending_rules(session, sub.subid))
    with simulate(session, sub, relations, _taken_changes(session, sub, finish_lsn)) as comparison:
        yield comparison


def _taken_changes(session: psycopg.Connection, sub: Subscription, finish_lsn: int) -> Admits:
    states = table_states(session, sub.subid)

    def admits(_remote: Relation, oid: int) -> int | str:
        state = states.get(oid)
        if state is None or oid == NEVER:
            return "the table is not subscribed"
        if state.srsubstate == "i":
            return "the table will be copied"
        if state.srsublsn is not None and covered(finish_lsn, state.srsublsn):
            return "the table's synchronization has copied it"
        return oid

    return admits


@contextlib.contextmanager
def simulate(
    session: psycopg.Connection, sub: Subscription, relations: RelationCache, admits: Admits
) -> Iterator[Simulation]:
    """Simulate changes: find out what they would do to the target, without making them.

    :param session: used for everything except rows, which another session reads.
    :param relations: the relations of ``session``.
    :param admits: decides which changes are simulated.
    """
    with connect_target(sub) as connection:
        try:
            with ReadOnlySession(connection) as reader:
                yield Simulation(reader, relations, admits, RulesPreview(session, relations))
        except psycopg.Error as error:
            raise target.translate(error, "compare the transaction with the target") from None


def transaction(header: RemoteTransaction) -> dict[str, Any]:
    """Return a transaction as JSON."""
    return {
        "xid": header.xid,
        "kind": header.kind.value,
        "gid": header.gid,
        "begin_lsn": format_lsn(header.begin_lsn),
        "finish_lsn": format_lsn(header.finish_lsn),
        "end_lsn": format_lsn(header.end_lsn),
        "at": wire_time(header.commit_ts),
        "bytes": header.size,
    }


def document(found: Preview) -> dict[str, Any]:
    """Return the preview as JSON."""
    assert found.header is not None
    error = found.error
    return {
        "transaction": transaction(found.header),
        "rows_mode": found.rows,
        "verdict": found.verdict,
        "changes": found.changes,
        "lost": found.lost,
        "not_compared": found.not_compared,
        "unexplained": found.unexplained,
        "error": None if error is None else {"message": error.message, "detail": error.detail},
        "tables": [
            {"schemaname": schema, "relname": name, **totals} for (schema, name), totals in sorted(found.totals.items())
        ],
        "rows": [row(one) for one in found.findings],
        "rows_omitted": found.omitted,
    }


def row(one: Finding) -> dict[str, Any]:
    """Return a change as JSON."""
    shown = ("number", "schemaname", "relname", "outcome", "conflict", "reason", "rule")
    return {
        **{name: getattr(one, name) for name in shown},
        "operation": one.message_type,
        "key": _values(one.key),
        "remote": _values(one.remote),
        "local": _values(one.local),
        "differs": list(one.differs),
        "existing": [
            {"index": other.index, "row": dict(other.row), "differs": list(other.differs)} for other in one.existing
        ],
    }


def _values(values: Any) -> dict[str, str | None] | None:
    return None if values is None else dict(values)
