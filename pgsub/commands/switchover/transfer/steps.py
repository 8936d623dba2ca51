"""The steps of a switchover, from the first row of the journal to the end of the subscription.

NOTES

Each step can be repeated. The journals of both sides determine where to continue. Before the right is given, a failure
undoes everything: the fence is lifted, and the reverse subscription is removed. Afterwards it can only proceed, until
clients write on the taking side and replication is reversed. :mod:`pgsub.switchover.journal` says why.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.switchover.parties import DATABASE_LOCK, OTHER, SwitchoverOptions
from pgsub.commands.switchover.transfer import right_to_write, way_back_subscription
from pgsub.commands.switchover.transfer.pause_comparison import PauseComparison
from pgsub.commands.switchover.transfer.pause_sessions import PauseSessions
from pgsub.commands.switchover.transfer.undoable import Undoable
from pgsub.commands.switchover.under_way import PROMOTES
from pgsub.common import failpoints
from pgsub.common.errors import PgsubError
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.protocol.lsn import format_lsn
from pgsub.publisher import connect as publisher
from pgsub.publisher.current_wal_lsn import flushed_position
from pgsub.switchover import drain, fence, journal, way_back
from pgsub.switchover.journal import Entry
from pgsub.switchover.pause_limit import PauseLimit
from pgsub.target.ledger.tables import subscription_tables
from pgsub.target.session import advisory_locks
from pgsub.target.session.transactions import durable

#: Seconds within which apply must approach the publisher before the pause, and the lag in seconds that is near.
APPROACH, NEAR = 300.0, 0.5
#: Minimum seconds to take a right that an earlier run was given.
TAKE = 5.0
#: Seconds for the search for transactions after the fence, once clients write again.
LATE = 10.0


class Switchover(Undoable):
    """One run of the command."""

    def __init__(
        self,
        options: SwitchoverOptions,
        store: StateStore,
        sub: Subscription,
        back: Subscription,
        taking: psycopg.Connection,
        giving: psycopg.Connection,
        reporter: Reporter,
        pause_comparison: PauseComparison,
    ) -> None:
        super().__init__(options, store, sub, back, taking, giving, reporter)
        self.pause_comparison = pause_comparison
        self._command = right_to_write.commands(options, sub, back)
        self._users: set[str] = set()
        self._quiet_at: int | None = None
        self._given_at = 0  #: after the commit that gave the right
        self.timing = right_to_write.Timing(log=reporter.log)

    # --- until the right is taken

    def until_taken(self, entry: Entry, check: Callable[[], None]) -> None:
        """Move the right to the taking side, or undo everything.

        :param entry: the row of the taking side, planned or prepared.
        :param check: raises the error that ended or stopped apply.
        """
        with self._or_back(entry), contextlib.ExitStack() as stack:
            sessions = PauseSessions(stack, self._sub, self._back, self._taking, self._giving)
            self._users = sessions.users
            self._kept_there += [*sessions.there, *self.pause_comparison.pids_there]
            self._kept += [sessions.source.info.backend_pid, *self.pause_comparison.pids]
            self._prepare(entry)
            if self._phase(entry) == journal.OPEN:
                self._approach(entry, sessions.source, sessions.slots, check)
                # The first search may be hours old after comparing large tables, or belong to an earlier run.
                seen = way_back_subscription.obstacles(self._options, self._sub, self._taking, self._back)
                # guard: the pause does not begin while an obstacle remains
                way_back_subscription.check(seen, self._options)
            self._pause(entry, sessions, check)

    def take(self, entry: Entry) -> None:
        """Take the right that an earlier run was given, or undo everything."""
        with self._or_back(entry):
            there = journal.of(self._giving, entry.id)
            left = self._options.limit - ((there and there.fenced_for) or 0.0)
            with PauseLimit([self._giving, self._taking], time.monotonic() + max(left, TAKE)):
                self._take(entry)

    def _prepare(self, entry: Entry) -> None:
        """Add the switchover to the giving side's journal, and fence the taking side."""
        names = (self._back.subid, entry.subname, entry.back_name, self._back.subid)
        with durable(self._giving):
            advisory_locks.take_for_transaction(self._giving, DATABASE_LOCK, OTHER)
            subscription_tables.hold_still(self._giving, self._back.subid, self._back.name)
            journal.check_alone(self._giving, entry.id)
            journal.add(self._giving, Entry(entry.id, journal.GIVING, *names, journal.OPEN, entry.fence))
        with self.timing.step("prepare"):
            if entry.phase == journal.PLANNED:
                with durable(self._taking):
                    self._fence_taking(entry)
            # In each run, because an earlier one may have died here.
            fence.end_sessions(self._taking, self._kept_there, time.monotonic() + APPROACH)
        failpoints.point("switchover.prepared")

    def _fence_taking(self, entry: Entry) -> None:
        saved = fence.put(self._taking, entry.fence, self._roles())
        # Its fence from the switchover that moved writes away must be lifted, whatever its subscriptions were called.
        saved[PROMOTES] = self._options.promote_command is not None
        earlier = journal.given_away(self._taking, entry.id)
        if earlier is not None:
            saved["earlier"] = {"fence": earlier.fence, "saved": dict(earlier.saved or {})}
        expected = (journal.PLANNED,)
        journal.move(self._taking, entry.id, expected, journal.PREPARED, saved=journal.saved(saved))

    def _roles(self) -> set[str]:
        """Return pgsub's roles on the two servers, which may connect to a fenced server."""
        return {self._taking.info.user, self._giving.info.user, *self._users}

    def _approach(
        self, entry: Entry, source: publisher.Connection, slot_session: publisher.Connection, check: Callable[[], None]
    ) -> None:
        """Wait until apply is so near that the pause will be short."""
        deadline = time.monotonic() + APPROACH
        with self.timing.step("approach"):
            while True:
                began = time.monotonic()
                position = flushed_position(source)
                drain.covered(self._taking, self._sub.subid, position, deadline, check)
                if time.monotonic() - began < NEAR:
                    # WAL of the fenced target that is decoded now need not be decoded in the pause.
                    way_back.advance(slot_session, self._back.slot_name or "", way_back.record(self._taking, entry.id))
                    drain.announce(self._taking, self._sub.subid, position)
                    return

    def _pause(self, entry: Entry, sessions: PauseSessions, check: Callable[[], None]) -> None:
        """Fence the giving side, apply all of its changes, and transfer the right.

        :raises TimeoutExpired: the pause takes too long.
        """
        used = [self._giving, self._taking, *sessions.all, *self.pause_comparison.sessions]
        with PauseLimit(used, time.monotonic() + self._options.limit) as limit:
            self._fence_and_give(entry, sessions, check, limit)
            self._take(entry)

    def _fence_and_give(
        self, entry: Entry, sessions: PauseSessions, check: Callable[[], None], limit: PauseLimit
    ) -> None:
        self.in_pause = True
        with self.timing.step("fence"):
            self._fence(entry)
        there = journal.of(self._giving, entry.id)
        if there is None or there.phase != journal.FENCED:
            return  # another run continued
        deadline = limit.deadline = time.monotonic() + self._options.limit - (there.fenced_for or 0.0)
        limit.check()
        with self.timing.step("end sessions"):
            fence.end_sessions(self._giving, self._kept, deadline)
        failpoints.point("switchover.sessions_ended")
        with self.timing.step("drain"):
            self._quiet_at = drain.quiet(
                self._giving, self._taking, self._sub.subid, entry.id, deadline, check, self._kept
            )
            sessions.check_way_there(self._options.command)
            sessions.check_way_back(self._options.command)
            self.pause_comparison.hold()
        failpoints.point("switchover.drained")
        with self.timing.step("sequences"):
            sessions.sequences(entry, deadline)
            if entry.fence == fence.COMMAND:  # sessions would return values from their cache of a sequence
                fence.end_sessions(self._taking, self._kept_there, deadline)
        failpoints.point("switchover.sequences")
        with self.timing.step("way back"):
            position = way_back.record(self._taking, entry.id)
            failpoints.point("switchover.recorded")
            way_back.advance(sessions.slots, self._back.slot_name or "", position)
        failpoints.point("switchover.advanced")
        limit.check()
        with self.timing.step("give"), durable(self._giving):
            way_back.begin_at(self._giving, self._back.subid, position)
            journal.move(self._giving, entry.id, (journal.FENCED,), journal.GIVEN, position=format_lsn(position))
        self._given_at = flushed_position(self._giving)
        failpoints.point("switchover.given")

    def _fence(self, entry: Entry) -> None:
        if self._phase(entry) == journal.OPEN:
            with durable(self._giving):
                advisory_locks.take_for_transaction(self._giving, DATABASE_LOCK, OTHER)
                journal.check_alone(self._giving, entry.id)
                journal.check_right(self._giving, entry.id)
                saved = fence.put(self._giving, entry.fence, self._roles())
                journal.move(self._giving, entry.id, (journal.OPEN,), journal.FENCED, saved=journal.saved(saved))
            failpoints.point("switchover.fenced")
        if self._phase(entry) == journal.FENCED:
            self._command("fence")

    # --- after the right was given

    def _take(self, entry: Entry) -> None:
        self.in_pause = True
        right_to_write.take(entry, self._giving, self._taking, self.timing)
        self.in_pause = False
        failpoints.point("switchover.taken")

    def warn_of_late(self) -> None:
        """Warn of transactions that were committed on the giving side after the fence."""
        if self._quiet_at is None:
            return
        late, known = 0, self._quiet_at
        with contextlib.suppress(psycopg.Error, PgsubError):  # the giving side is no longer needed
            position = flushed_position(self._giving)
            if drain.publishes_ledger(self._giving, self._sub.publications):
                known = self._given_at  # the commit that gave the right is replicated, too
            late = drain.covered(self._taking, self._sub.subid, position, time.monotonic() + LATE, lambda: None)
        if late > known:
            self._reporter.warning(
                "transactions were committed on the publisher after clients were fenced off",
                f"They end behind {format_lsn(self._quiet_at)}, and were applied after the target had taken over.",
                f"Find out who writes there, and compare:\npgsub verify {word(self._back.name)} --rows",
            )
