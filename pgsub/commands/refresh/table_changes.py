"""Changes the set of tables, for ``refresh`` and ``alter``. Mirrors AlterSubscription_refresh.

The changes were planned before (:mod:`pgsub.commands.refresh.diff`). One transaction of the ledger makes them.

NOTES: A killed command leaves the old or the new set of tables, and every slot is named in the ledger. The reasons: (1)
The tables' sync workers are fenced off first, so table states no longer change. (2) Removed tables return to a state
without a slot before their slots are dropped, and slots are dropped before the rows that name them. (3) Rows, renames
and TRUNCATE are one commit under the lock of apply's row. A worker that starts in between raises the epoch. The commit
then fails as Fenced, and everything is repeated. Slots of tables to copy again are dropped after the commit. If that
fails, the table's next synchronization drops them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import psycopg

from pgsub.apply.verified_publisher import recorded_database
from pgsub.catalog.subscriptions import options
from pgsub.commands.refresh.diff import Plan
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import connect_publisher
from pgsub.common import failpoints
from pgsub.common.errors import Fenced, PgsubError, TimeoutExpired, log_text
from pgsub.common.quoting import word
from pgsub.publisher import slots
from pgsub.tablesync import sync_slots
from pgsub.target.ledger import definitions, subscriptions, worker_takeover
from pgsub.target.ledger.tables import states, subscription_tables
from pgsub.target.ledger.tables.subscription_tables import Change
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.sql import resync_truncate

#: Seconds to wait for apply, which holds its row during a transaction, or for others that use tables to be emptied.
PATIENCE_SECONDS = 60.0
#: Maximum number of attempts to lock tables. Each attempt delays apply by up to a second.
TRUNCATE_TRIES = 10
_PAUSE = 0.5


def carry_out(
    session: psycopg.Connection, wanted: Plan, deadline: float | None, moves: Callable[[Claim], None] | None = None
) -> None:
    """Make the changes: fence, release slots, then do the rest in one transaction. Repeat this if a sync worker starts.

    :param session: in autocommit mode, with an origin if tables are emptied.
    :param deadline: in time of ``time.monotonic()``, None for :data:`PATIENCE_SECONDS`.
    :param moves: moves apply to another slot in that transaction, under apply's claim. All tables are then fenced, and
        tables of ``again`` whose copy has not ended stay unchanged.
    :raises TimeoutExpired: apply or another session held a lock for too long. Nothing was changed.
    """
    until = time.monotonic() + PATIENCE_SECONDS if deadline is None else deadline
    busy = [r.srrelid for r in (*wanted.drop, *wanted.again) if r.srsubstate != "r" or r.sync_slot or r.spare_slot]
    if moves is not None:
        busy = [worker_takeover.APPLY, *(r.srrelid for r in (*wanted.drop, *wanted.again))]
    attempt = _Attempt(session, wanted, moves)
    while True:
        subscriptions.identity(session, wanted.sub.subid)
        try:
            attempt.make(list(worker_takeover.take_over_many(session, wanted.sub.subid, busy).values()) if busy else [])
            return
        except (Fenced, psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            if attempt.refused >= TRUNCATE_TRIES or time.monotonic() + _PAUSE > until:
                raise attempt.given_up() from None
        time.sleep(_PAUSE if attempt.refused else 0.02)


class _Attempt:
    """The repeated attempts to make the change.

    :ivar refused: number of attempts that failed to lock a table to be emptied.
    """

    def __init__(self, session: psycopg.Connection, wanted: Plan, moves: Callable[[Claim], None] | None = None) -> None:
        self._session = session
        self._wanted = wanted
        self._moves = moves
        self.refused = 0
        self._slots: set[str] = set()  #: slots that the fenced tables name

    def make(self, claims: Sequence[Claim]) -> None:
        """Make one attempt.

        :param claims: claims of the tables that may have a sync worker, and apply's if it moves.
        """
        session, wanted = self._session, self._wanted
        subid = wanted.sub.subid
        applies = [claim for claim in claims if claim.worker == worker_takeover.APPLY]
        claims = [claim for claim in claims if claim not in applies]
        failpoints.point("refresh.after_fence")
        removed = [claim for claim in claims if claim.worker in {rel.srrelid for rel in wanted.drop}]
        self._end_walsenders([claim.worker for claim in claims])
        # guard: a table that loses its sync slot is copied again
        subscription_tables.reset_to_datasync(session, removed)
        if removed:
            sync_slots.release(session, wanted.sub, *(claim.worker for claim in removed), claims=removed)
        failpoints.point("refresh.after_release")
        change = Change(
            wanted.add,
            [rel.srrelid for rel in wanted.drop],
            wanted.rename,
            [rel.srrelid for rel in wanted.again],
            wanted.adopt,
            claims,
            wanted.keep,
        )
        with states.changing(session, subid):
            for claim in applies:
                change = self._moved(claim, change)
            subscription_tables.change(session, subid, change)
            definitions.tables_follow(session, wanted.sub, options(wanted.sub), changed=bool(wanted.add or wanted.drop))
            self._truncate()
            failpoints.point("refresh.before_commit")
        failpoints.point("refresh.after_commit")
        self._drop_slots([claim for claim in claims if claim not in removed])

    def _moved(self, claim: Claim, change: Change) -> Change:
        """Move apply. Return the change, reduced to tables whose present state it concerns."""
        assert self._moves is not None
        self._moves(claim)
        worker_takeover.fence(self._session, *change.claims)
        rows = subscriptions.relations(self._session, claim.subid)
        # Tables that belonged to the old slot's stream, even if they were handed over after the first look.
        served = {row.srrelid for row in rows if row.srsubstate in "fsr"}
        return replace(change, again=[relid for relid in change.again if relid in served])

    def _end_walsenders(self, relids: Sequence[int]) -> None:
        """End the walsenders of fenced workers, which may still stream or create their slots."""
        sub = self._wanted.sub
        names = sync_slots.own_slots(self._session, sub, relids)
        self._slots.update(names)
        if names:
            expected = recorded_database(self._session, sub.subid)
            with connect_publisher(sub, expected=expected) as source:
                slots.end_walsenders(source, names)

    def _drop_slots(self, again: Sequence[Claim]) -> None:
        """Drop the tables' slots after the change. A fenced worker may have created one late.

        If this fails, the next synchronization of the table drops them.
        """
        sub, relids = self._wanted.sub, [claim.worker for claim in again]
        with contextlib.suppress(PgsubError, psycopg.Error):
            if again:
                sync_slots.release(self._session, sub, *relids, claims=again)
            for slot in sorted(self._slots):
                sync_slots.drop_unnamed(self._session, sub, slot, relids)

    def _truncate(self) -> None:
        try:
            resync_truncate.truncate(self._session, self._wanted.emptied)
        except psycopg.errors.LockNotAvailable:
            self.refused += 1
            raise

    def given_up(self) -> TimeoutExpired:
        """Return the error for the last attempt."""
        if self.refused:
            held = resync_truncate.lock_holders(self._session, self._wanted.emptied)
            tables = ", ".join(f'"{t.schema}.{t.name}"' for t in self._wanted.emptied)
            return TimeoutExpired(
                f"timeout while waiting to truncate {tables}",
                detail="\n".join(["Other sessions use the table; nothing was changed.", *held]),
                hint="Wait until they end, or end them, and try again.",
            )
        return TimeoutExpired(
            "timeout while waiting for the subscription's workers to let its tables be changed",
            detail="Apply is in a long transaction; nothing was changed.",
            hint=f"See what it does, and try again later:\npgsub status {word(self._wanted.sub.name)}",
        )


def warn_of_discarded(wanted: Plan, reporter: Reporter) -> None:
    """Warn that a copy releases held tables, and replaces their kept changes."""
    for name, changes in wanted.discarded:
        reporter.warning(
            f'table "{name}" is held: copying it again releases it',
            f"Of its changes {changes} are kept; the copy contains them, and they are removed.",
        )


def report_done(wanted: Plan, reporter: Reporter) -> None:
    """Report what was done: a summary, and a log record for each table."""
    subname = wanted.sub.name
    for tables, what in (
        (wanted.add, f'added to subscription "{subname}"'),
        (wanted.drop, f'removed from subscription "{subname}"'),
        (wanted.again, f"will be {'compared' if wanted.adopt else 'copied again, and was emptied'}"),
    ):
        for rel in tables:
            reporter.log("LOG", log_text(f'table "{rel.schemaname}.{rel.relname}" {what}'))
    reporter.notice(f'subscription "{wanted.sub.name}": {wanted.summary()}')


def report_dry_run(wanted: Plan, reporter: Reporter) -> None:
    """Report what would be done to already subscribed tables (``--dry-run``)."""
    warn_of_discarded(wanted, reporter)
    for rel in wanted.drop:
        reporter.notice(f'table "{rel.schemaname}.{rel.relname}" would be removed from the subscription')
    for one in wanted.rename:
        reporter.notice(f'table "{one.schemaname}.{one.relname}" would be known by this name')
    for rel in wanted.again if wanted.adopt else ():
        reporter.notice(f'table "{rel.schemaname}.{rel.relname}" would be compared, and only rows that differ sent')
    for emptied in wanted.emptied:
        reporter.notice(f'table "{emptied.schema}.{emptied.name}" would be emptied and copied again')
