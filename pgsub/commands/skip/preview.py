"""One transaction of the publisher, found by its finish LSN, and what skipping it would lose.

Nothing is moved: a temporary copy of the slot is read (:mod:`pgsub.apply.preview.slot_reader`), and the target only
looked at (:mod:`pgsub.apply.preview.simulation`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import psycopg

from pgsub.apply.preview.simulation import (
    CONFLICT,
    DEPENDENT,
    ERROR,
    OUTCOMES,
    WOULD_APPLY,
    Admits,
    Finding,
    Simulation,
)
from pgsub.apply.preview.slot_reader import Change, Ended, Header, Reached, SlotReader, reading
from pgsub.apply.resolve.rules_preview import RulesPreview
from pgsub.apply.rows.relation_map import NEVER, RelationCache
from pgsub.apply.stream.transactions import Kind
from pgsub.catalog.rows import ErrorRow
from pgsub.commands.sessions import connect_target
from pgsub.common.errors import StateForbids
from pgsub.common.subscription import Subscription
from pgsub.protocol.lsn import covered, format_lsn
from pgsub.protocol.messages import Relation
from pgsub.target.ledger import skip, subscriptions, two_phase
from pgsub.target.ledger.progress import table_states
from pgsub.target.session import connect as target
from pgsub.target.session import origins
from pgsub.target.session.owner import must_use_password
from pgsub.target.sql.row_lookup import ReadOnlySession

#: Changes of one transaction that are compared: what they do is kept in memory.
COMPARED = 500_000
#: Findings of each outcome that are kept to be listed.
LISTED = 2_000
#: Transactions behind the LSN that are looked at for one that begins there.
_LOOKED_AT = 100

SAFE, CAUTION, RISKY = "safe", "caution", "risky"
_LOST = {
    skip.WHOLE: (WOULD_APPLY, CONFLICT, DEPENDENT, ERROR),
    skip.CONFLICTING: (CONFLICT, DEPENDENT, ERROR),
}


@dataclass(slots=True)
class Preview:
    """What skipping a transaction would do.

    :ivar totals: changes by table and outcome.
    :ivar omitted: changes that are counted but not in ``findings``.
    :ivar not_compared: changes that were only counted, as lost.
    """

    header: Header | None = None  #: of the transaction, once it is found
    rows: str = skip.WHOLE
    findings: list[Finding] = field(default_factory=list)
    totals: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    omitted: int = 0
    not_compared: int = 0
    error: ErrorRow | None = None

    def add(self, finding: Finding) -> None:
        """One change more."""
        table = self.totals.setdefault((finding.schemaname, finding.relname), dict.fromkeys(OUTCOMES, 0))
        table[finding.outcome] += 1
        if self.count(finding.outcome) <= LISTED:
            self.findings.append(finding)
        else:
            self.omitted += 1

    def count(self, *outcomes: str) -> int:
        """Changes with one of these outcomes."""
        return sum(table[outcome] for table in self.totals.values() for outcome in outcomes)

    @property
    def changes(self) -> int:
        """Changes in all."""
        return self.count(*OUTCOMES) + self.not_compared

    @property
    def lost(self) -> int:
        """Changes that the target would not get."""
        return self.count(*_LOST[self.rows]) + self.not_compared

    @property
    def unexplained(self) -> bool:
        """Apply stopped at this transaction, and nothing that was looked at says why."""
        error = self.error
        if error is None:
            return False
        met = (one.stops or (one.conflict is not None and one.conflict == error.conflict) for one in self.findings)
        return not any(met)

    @property
    def verdict(self) -> str:
        """safe: nothing would be lost; caution: rows that the target has otherwise; risky: changes that would apply."""
        if self.lost == 0:
            return CAUTION if self.unexplained else SAFE
        applicable = self.count(WOULD_APPLY) if self.rows == skip.WHOLE else 0
        return RISKY if applicable or self.count(ERROR, DEPENDENT) or self.not_compared else CAUTION


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Where an LSN lies in the stream.

    :ivar transaction: the one that finishes there, None if none does.
    :ivar before: the last one before, ``after`` the first behind; ``begins`` one that begins at the LSN.
    """

    transaction: Header | None
    before: Header | None
    after: Header | None
    begins: Header | None


@contextlib.contextmanager
def read_from(session: psycopg.Connection, sub: Subscription, start: int) -> Iterator[SlotReader]:
    """Read what the publisher will send from a position on.

    :raises StateForbids: the subscription has no slot, or never spoke to a publisher.
    """
    if sub.slot_name is None:
        raise StateForbids(f'subscription "{sub.name}" has no replication slot to read from')
    known = subscriptions.identity(session, sub.subid)
    if known.system_identifier is None:
        raise StateForbids(f'subscription "{sub.name}" has not received anything from a publisher yet')
    prepares = two_phase.state(session, sub.subid) == two_phase.ENABLED
    must = must_use_password(session, sub)
    with reading(sub, known, start, two_phase=prepares, must_use_password=must) as opened:
        yield opened


class TransactionSearch:
    """Finds one transaction, and hands its changes on.

    :param wanted: a finish LSN, as far as anybody knows.
    :param prepared: ends of transactions that are prepared on the target already: they are not skipped any more.
    """

    def __init__(self, wanted: int, prepared: frozenset[tuple[int, int]] = frozenset()) -> None:
        self._wanted = wanted
        self._prepared = prepared
        self._behind = 0
        self.first: Header | None = None
        self._before: Header | None = None
        self._after: Header | None = None
        self._begins: Header | None = None

    def find(
        self, opened: SlotReader, comparison: Simulation | None = None, preview: Preview | None = None
    ) -> SearchResult:
        """Read until it is found and, with a preview, to its end; or until it is clear that there is none."""
        found: Header | None = None
        for step in opened.steps():
            match step:
                case Header():
                    if found is None and self._is(step):
                        found = step
                        if preview is None:
                            break
                        preview.header = step
                        if comparison is not None:
                            comparison.begin(step.commit_ts)
                    elif self._passed(step):
                        break
                case Change():
                    if found is not None and preview is not None and comparison is not None:
                        self._compare(step, comparison, preview)
                    elif comparison is not None:
                        comparison.learn(step.message)
                case Ended():
                    if found is not None:
                        break
                case Reached():
                    if step.position > self._wanted and self._after is not None:
                        break
        return SearchResult(found, self._before, self._after, self._begins)

    def _is(self, header: Header) -> bool:
        if (header.xid, header.finish_lsn) in self._prepared:
            return False  # sent once more, for the copy of the slot does not know
        if header.kind in (Kind.COMMIT, Kind.PREPARE) and self.first is None:
            self.first = header
        return header.finish_lsn == self._wanted and header.kind in (Kind.COMMIT, Kind.PREPARE)

    def _passed(self, header: Header) -> bool:
        if header.finish_lsn <= self._wanted:
            self._before = header
            return False
        self._after = self._after or header
        if header.begin_lsn == self._wanted:
            self._begins = header
            return True
        self._behind += 1
        return self._behind >= _LOOKED_AT

    def _compare(self, change: Change, comparison: Simulation, preview: Preview) -> None:
        if preview.changes < COMPARED:
            for finding in comparison.take(change.message):
                preview.add(finding)
        else:
            comparison.learn(change.message)
            preview.not_compared += type(change.message).__name__ in ("Insert", "Update", "Delete", "Truncate")


@contextlib.contextmanager
def comparing(session: psycopg.Connection, sub: Subscription, finish_lsn: int) -> Iterator[Simulation]:
    """What a transaction that finishes there would do to the target."""
    tracked = origins.allowed(session) and target.tracks_commits(session)
    relations = RelationCache(session, sub, replica=target.is_replica(session), tracked=tracked)
    relations.limit_rules(skip.pending_rules(session, sub.subid))
    with looking(session, sub, relations, _admission(session, sub, finish_lsn)) as comparison:
        yield comparison


def _admission(session: psycopg.Connection, sub: Subscription, finish_lsn: int) -> Admits:
    states = table_states(session, sub.subid)

    def admits(_remote: Relation, oid: int) -> int | str:
        state = states.get(oid)
        if state is None or oid == NEVER:
            return "the table is not subscribed"
        if state.srsubstate == "i":
            return "the table will be copied"
        if state.srsublsn is not None and covered(finish_lsn, state.srsublsn):
            return "the table's synchronization brought it"
        return oid

    return admits


@contextlib.contextmanager
def looking(
    session: psycopg.Connection, sub: Subscription, relations: RelationCache, admits: Admits
) -> Iterator[Simulation]:
    """What changes would do to the target, none of which is made.

    :param session: for everything but the rows, which another session reads.
    :param relations: of that session.
    :param admits: which are to be looked at.
    """
    with connect_target(sub) as connection:
        try:
            with ReadOnlySession(connection) as looker:
                yield Simulation(looker, relations, admits, RulesPreview(session, relations))
        except psycopg.Error as error:
            raise target.translate(error, "compare the transaction with the target") from None


def refused(sub: Subscription, wanted: int, located: SearchResult, end: int) -> StateForbids:
    """The LSN is no finish LSN of a transaction that is still to be applied: what it is, and what was meant."""
    text = format_lsn(wanted)
    meant, detail = _meant(wanted, located)
    if wanted > end:
        detail = f"The publisher's WAL ends at {format_lsn(end)}."
    hint = None
    if meant is not None:
        lsn = format_lsn(meant.finish_lsn)
        hint = f"Did you mean transaction {meant.xid}, finished at {lsn}?\npgsub skip-lsn {sub.name} {lsn} --preview"
    return StateForbids(
        f"no transaction that is still to be applied finishes at {text}", detail=detail, hint=hint, sqlstate="22023"
    )


def _meant(wanted: int, located: SearchResult) -> tuple[Header | None, str]:
    before, after, begins = located.before, located.after, located.begins
    text = format_lsn(wanted)
    if before is not None and before.kind in (Kind.COMMIT_PREPARED, Kind.ROLLBACK_PREPARED):
        if before.finish_lsn == wanted:
            return None, f"{before.kind.value} of transaction {before.xid} is there; what was prepared is not skipped."
    elif before is not None and wanted <= before.end_lsn:
        where = "the end LSN" if wanted == before.end_lsn else "inside the last record"
        return before, f"{text} is {where} of transaction {before.xid}, which finished at {_at(before)}."
    if begins is not None:
        return begins, f"{text} is where transaction {begins.xid} begins, which finishes at {_at(begins)}."
    if after is not None and after.begin_lsn < wanted:
        return after, f"{text} lies inside transaction {after.xid}, which finishes at {_at(after)}."
    parts = [f"The last one before it finishes at {_at(before)}."] if before is not None else []
    parts += [f"The next one finishes at {_at(after)}."] if after is not None else []
    nearest = after if after is not None and after.kind in (Kind.COMMIT, Kind.PREPARE) else None
    return nearest, " ".join(parts) or "Nothing that is published waits to be applied."


def _at(header: Header) -> str:
    return format_lsn(header.finish_lsn)
