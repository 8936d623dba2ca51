"""The undoing of a switchover: clients write on the giving side again, and the reverse subscription is removed.

NOTES

A switchover that has ended is undone in the same order as one that is under way, once the taking side has lost it: the
ending subscription is only not there any more. Each step can be repeated, and a run after a failure repeats all of
them. Only whether the right was taken cannot be seen after the first run, so the giving side's row says so.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.subscription.drop import drop
from pgsub.commands.subscription.enable_disable import enable
from pgsub.commands.switchover.inner_reporter import InnerReporter
from pgsub.commands.switchover.parties import SwitchoverOptions
from pgsub.commands.switchover.transfer import right_to_write
from pgsub.commands.switchover.transfer.turn import end_subscription
from pgsub.common import failpoints
from pgsub.common.subscription import Subscription
from pgsub.publisher.slots import slot_state
from pgsub.switchover import drain, journal, lost_side
from pgsub.switchover.journal import Entry
from pgsub.switchover.pause_limit import PauseLimit
from pgsub.target.ledger import subscriptions
from pgsub.target.session.transactions import durable

#: Limit in seconds for letting clients write again.
RELEASE = 60.0
#: Key in ``saved`` of the giving side: whether the taking side had taken the right, and has lost that.
_TAKEN = "taken"
#: Warning, with its detail and hint, before a right that was taken is given back.
_SEQUENCES = (
    "sequences of the publisher may be behind rows that were written on the target and came back",
    "Their next values would be those of rows that exist.",
    "Set them now, before rows are inserted, for example:\nSELECT setval('SEQUENCE', (SELECT max(COLUMN) FROM TABLE));",
)


@dataclass(frozen=True, slots=True)
class Undoing:
    """A switchover that is undone, with a session on each side.

    :ivar sub: the ending subscription, None if it has been dropped, or lost with the taking side's ledger. ``back`` is
        the reverse one.
    :ivar taking: None if the taking side is gone for good, or cannot be reached. It may have lost its ledger.
    :ivar keep: PIDs of the command's sessions on the giving side. ``keep_there`` has those on the taking side.
    """

    options: SwitchoverOptions
    store: StateStore
    sub: Subscription | None
    back: Subscription
    taking: psycopg.Connection | None
    giving: psycopg.Connection
    reporter: Reporter
    keep: Collection[int] = ()
    keep_there: Collection[int] = ()

    def run(self, entry: Entry) -> None:
        """Undo everything.

        :param entry: the row of the taking side, :data:`pgsub.switchover.journal.LOST` if it has lost that.
        :raises StateForbids: the taking side has taken the right.
        """
        self.release(entry)
        self.remove(entry)

    def release(self, entry: Entry) -> None:
        """Let clients write on the giving side again, after the taking side has declined.

        :param entry: see :meth:`run`. If the taking side cannot be reached, it is the row of the giving side.
        :raises TargetUnavailable: the right was given to a taking side that cannot be reached.
        """
        there = journal.of(self.giving, entry.id)
        if entry.phase == journal.LOST:
            end_subscription(self.options, self.store, self.back.name, self.reporter)
        is_away = self.taking is None and entry.phase != journal.LOST
        if there is not None and not is_away and self._was_taken(entry, there):
            self._record(there)
            self._warn_of_sequences(there)
        # the right was given, so clients may be led to the taking side
        if entry.phase == journal.LOST and self.taking is not None and there is not None and there.position is not None:
            right_to_write.keep_out(self.taking, entry, self.keep_there, self.back, self.reporter)
        # guard: a failure in the pause ends it although the target cannot be asked for its journal
        known = self._known if entry.phase == journal.LOST else self.taking
        with PauseLimit([one for one in (self.giving, known) if one], time.monotonic() + RELEASE):
            right_to_write.release(entry, self.giving, known, self._command, self.keep, taking_is_gone=not is_away)

    def remove(self, entry: Entry) -> None:
        """Let the former subscription continue, if it is there, and drop the reverse one."""
        there = journal.of(self.giving, entry.id)
        self._continue(entry, there)
        keep_slot = self.taking is None or slot_state(self.taking, self.back.slot_name or "") is None
        quiet = InnerReporter(self.reporter, backward=True)
        if self.taking is None:  # nothing else is left to do
            self._end(there)
        drop(self.options.state_dir, self.back.name, if_exists=True, keep_slot=keep_slot, reporter=quiet)
        failpoints.point("switchover.dropped")
        self._end(there)

    def _end(self, there: Entry | None) -> None:
        if there is not None:  # the run may have ended before the row was written
            with durable(self.giving):
                journal.move(self.giving, there.id, (journal.RELEASING, journal.RELEASED), journal.RELEASED)

    def _warn_of_sequences(self, there: Entry) -> None:
        """Warn if rows came back that were written on the taking side, or if they may have."""
        ended = self.sub is None or not self.store.subscription(self.sub.name).enabled
        if ended or lost_side.has_applied(self.giving, self.back.subid, there):
            self.reporter.warning(*_SEQUENCES)

    def _continue(self, entry: Entry, there: Entry | None) -> None:
        """Let the former subscription continue, unless the taking side has lost it or is gone."""
        if self.taking is None:
            return
        if self.sub is None:
            if (known := self._known) is not None and self.back.way_back_of is not None:
                # a restored server still has the subscription that has ended
                with right_to_write.as_owner("forget the subscription that has ended", self.back), durable(known):
                    subscriptions.forget(known, self.back.way_back_of)
            return
        drain.withdraw(self.taking, self.sub.subid)
        if self._was_taken(entry, there) and not self.store.subscription(self.sub.name).enabled:
            enable(self.options.state_dir, self.sub.name, reporter=self.reporter)

    def _was_taken(self, entry: Entry, there: Entry | None) -> bool:
        """Return whether the right was taken before the taking side lost that, as far as this run can know."""
        if there is None or there.position is None:
            return False
        known = entry.phase == journal.LOST or _TAKEN in (there.saved or {})
        return known or lost_side.has_applied(self.giving, self.back.subid, there)

    def _record(self, there: Entry) -> None:
        if _TAKEN not in (there.saved or {}):
            with durable(self.giving):
                journal.note(self.giving, there.id, {**(there.saved or {}), _TAKEN: True})

    @property
    def _known(self) -> psycopg.Connection | None:
        """The session on the taking side, None if that has no journal."""
        return self.taking if self.taking is not None and lost_side.has_journal(self.taking) else None

    def _command(self, action: str) -> None:
        ending = replace(self.back, target=self.back.connection) if self.sub is None else self.sub
        right_to_write.commands(self.options, ending, self.back)(action)
