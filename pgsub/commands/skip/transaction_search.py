"""Searches the stream from the publisher for a transaction by its finish LSN, on a copy of the slot."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import psycopg

from pgsub.apply.preview.simulation import Simulation
from pgsub.apply.preview.slot_reader import Change, Ended, Reached, SlotReader, Step, reading
from pgsub.apply.stream.transactions import Kind, RemoteTransaction
from pgsub.commands.skip.preview import Preview
from pgsub.common.errors import StateForbids
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.protocol.lsn import format_lsn
from pgsub.target.ledger import subscriptions, two_phase_state
from pgsub.target.session.connect import must_use_password

#: Maximum number of changes compared per transaction, because their effects are kept in memory.
COMPARED = 500_000
#: Transactions after the LSN that are read to find one that begins at the LSN.
_LOOKED_AT = 100


@contextlib.contextmanager
def read_from(session: psycopg.Connection, sub: Subscription, start: int) -> Iterator[SlotReader]:
    """Read what the publisher will send from a position on.

    :raises StateForbids: the subscription has no slot, or has never been connected to a publisher.
    """
    if sub.slot_name is None:
        raise StateForbids(f'subscription "{sub.name}" has no replication slot to read from')
    known = subscriptions.identity(session, sub.subid)
    if known.system_identifier is None:
        raise StateForbids(f'subscription "{sub.name}" has not received anything from a publisher yet')
    prepares = two_phase_state.state(session, sub.subid) == two_phase_state.ENABLED
    must = must_use_password(session, sub)
    with reading(sub, known, start, two_phase=prepares, must_use_password=must) as opened:
        yield opened


class TransactionSearch:
    """The search for a transaction that is not applied yet.

    :param wanted: the supposed finish LSN.
    :ivar first: the first transaction of the stream that is not applied yet.
    """

    def __init__(self, session: psycopg.Connection, sub: Subscription, wanted: int) -> None:
        self._sub = sub
        self._wanted = wanted
        #: Transactions that are already prepared on the target, and are no longer skipped.
        self._prepared = {(one.xid, one.prepare_lsn) for one in two_phase_state.pending(session, sub.subid)}
        self._behind = 0
        self.first: RemoteTransaction | None = None
        self._before: RemoteTransaction | None = None  #: the last one that finishes at or before the LSN
        self._after: RemoteTransaction | None = None  #: the first one that finishes after the LSN
        self._begins: RemoteTransaction | None = None  #: one that begins at the LSN

    def find(
        self, stream: SlotReader, simulation: Simulation | None = None, preview: Preview | None = None
    ) -> RemoteTransaction:
        """Read until the transaction is found, or cannot come any more. With a preview, read to its end.

        :raises StateForbids: no transaction finishes there. The error says what the LSN is, and which one may be meant.
        """
        steps = stream.steps()
        found = self._locate(steps, simulation)
        if found is None:
            raise self._not_found(stream.flush_lsn)
        if simulation is not None and preview is not None:
            preview.header = found
            simulation.begin(found.commit_ts)
            for step in itertools.takewhile(lambda step: not isinstance(step, Ended), steps):
                if isinstance(step, Change):
                    _compare(step, simulation, preview)
        return found

    def _locate(self, steps: Iterator[Step], simulation: Simulation | None) -> RemoteTransaction | None:
        for step in steps:
            match step:
                case RemoteTransaction():
                    if self._is_wanted(step):
                        return step
                    if self._is_past(step):
                        return None
                case Change():
                    if simulation is not None:
                        simulation.learn(step.message)
                case Reached():
                    if step.position > self._wanted and self._after is not None:
                        return None
        return None

    def _is_wanted(self, header: RemoteTransaction) -> bool:
        if (header.xid, header.finish_lsn) in self._prepared:
            return False  # sent again, because the copy of the slot has an older state
        applies = header.kind in (Kind.COMMIT, Kind.PREPARE)
        if applies and self.first is None:
            self.first = header
        return applies and header.finish_lsn == self._wanted

    def _is_past(self, header: RemoteTransaction) -> bool:
        if header.finish_lsn <= self._wanted:
            self._before = header
            return False
        self._after = self._after or header
        if header.begin_lsn == self._wanted:
            self._begins = header
            return True
        self._behind += 1
        return self._behind >= _LOOKED_AT

    def _not_found(self, end: int) -> StateForbids:
        meant, detail = self._meant()
        if self._wanted > end:
            detail = f"The publisher's WAL ends at {format_lsn(end)}."
        hint = None
        if meant is not None:
            command = f"pgsub skip-lsn {word(self._sub.name)} {_finish(meant)} --preview"
            hint = f"Did you mean transaction {meant.xid}, finished at {_finish(meant)}?\n{command}"
        message = f"no transaction that is still to be applied finishes at {format_lsn(self._wanted)}"
        return StateForbids(message, detail=detail, hint=hint, sqlstate="22023")

    def _meant(self) -> tuple[RemoteTransaction | None, str]:
        """Return the transaction that is probably meant, and a description of the LSN."""
        wanted, before, after, begins = self._wanted, self._before, self._after, self._begins
        text = format_lsn(wanted)
        if before is not None and before.kind in (Kind.COMMIT_PREPARED, Kind.ROLLBACK_PREPARED):
            if before.finish_lsn == wanted:
                kind = before.kind.value
                return None, f"{kind} of transaction {before.xid} is there; what was prepared is not skipped."
        elif before is not None and wanted <= before.end_lsn:
            where = "the end LSN" if wanted == before.end_lsn else "inside the last record"
            return before, f"{text} is {where} of transaction {before.xid}, which finished at {_finish(before)}."
        if begins is not None:
            return begins, f"{text} is where transaction {begins.xid} begins, which finishes at {_finish(begins)}."
        if after is not None and after.begin_lsn < wanted:
            return after, f"{text} lies inside transaction {after.xid}, which finishes at {_finish(after)}."
        parts = [f"The last one before it finishes at {_finish(before)}."] if before is not None else []
        parts += [f"The next one finishes at {_finish(after)}."] if after is not None else []
        nearest = after if after is not None and after.kind in (Kind.COMMIT, Kind.PREPARE) else None
        return nearest, " ".join(parts) or "No published transaction waits to be applied."


def _compare(change: Change, simulation: Simulation, preview: Preview) -> None:
    if preview.changes < COMPARED:
        for finding in simulation.take(change.message):
            preview.add(finding)
    else:
        simulation.learn(change.message)
        preview.not_compared += type(change.message).__name__ in ("Insert", "Update", "Delete", "Truncate")


def _finish(header: RemoteTransaction) -> str:
    return format_lsn(header.finish_lsn)
