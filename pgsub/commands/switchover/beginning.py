"""The beginning of a switchover: the search for obstacles, the comparison, the plan and the reverse subscription."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.subscription.definition import new_subid
from pgsub.commands.switchover import comparison
from pgsub.commands.switchover.inner_reporter import InnerReporter
from pgsub.commands.switchover.obstacles.obstacle import seen_backward
from pgsub.commands.switchover.parties import SwitchoverOptions, giving_session
from pgsub.commands.switchover.transfer import right_to_write, way_back_subscription
from pgsub.commands.verify.verify import VerifyOptions, verify
from pgsub.common.errors import StateForbids, SubscriptionExists
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.switchover import journal
from pgsub.switchover.journal import Entry

_SAME_PUBLISHER = """
SELECT o.subname FROM pgsub.subscription s JOIN pgsub.subscription o USING (system_identifier, publisher_dboid)
 WHERE s.subid = %(subid)s AND o.subid <> s.subid ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class Beginning:
    """The part of a switchover in which clients write on the publisher as before.

    :ivar taking: a session on the target of ``sub``.
    :ivar warned: messages of warnings that the command has shown.
    """

    options: SwitchoverOptions
    store: StateStore
    sub: Subscription
    taking: psycopg.Connection
    reporter: Reporter
    warned: set[str]

    def plan(self) -> Entry:
        """Check everything, compare the tables, and write the first row of the journal."""
        if not self.sub.enabled:
            name = self.sub.name
            raise StateForbids(f'subscription "{name}" is disabled', hint=f"Enable it:\npgsub enable {word(name)}")
        self._check_name()
        _check_only(self.taking, self.sub)
        self._look_around()
        self.compare()
        return right_to_write.plan(self.taking, self.sub, self.options.names[1], self.options.way)

    def compare(self) -> None:
        """Compare all tables if requested."""
        if self.options.verify:
            asked = VerifyOptions(self.sub.name, self.options.state_dir)
            comparison.check(verify(asked, reporter=self.reporter), self.options)

    def way_back(self, entry: Entry) -> Subscription:
        """Return the reverse subscription. Create it if necessary.

        Its number is recorded first, so that a subscription that others create meanwhile is never used.

        :raises StateForbids: the reverse subscription was dropped or renamed.
        :raises SubscriptionExists: another subscription has its name. The switchover is undone.
        """
        there = self.store.way_back_of(entry.subid)
        if there is not None and there.name == entry.back_name:
            return there
        if there is not None or entry.phase != journal.PLANNED:
            raise no_way_back(entry)
        try:
            self._check_name()
            subid = new_subid()
            right_to_write.name_way_back(self.taking, entry, subid)
            with giving_session(self.options, self.sub) as giving:
                made = way_back_subscription.way_back(self.options, self.sub, giving, self.taking, subid)
            reporter = InnerReporter(self.reporter, backward=True, said=self.warned)
            with seen_backward():
                return way_back_subscription.created(made, self.store, reporter)
        except BaseException:
            right_to_write.decline(self.taking, entry)
            raise

    def _check_name(self) -> None:
        """Check that the reverse subscription's name is free."""
        name = self.options.names[1]
        if self.store.find(name) is not None:
            raise SubscriptionExists(
                f'subscription "{name}" already exists',
                detail="The subscription that leads back would have this name.",
                hint=f"Rename it:\npgsub alter {word(name)} --rename-to NEW",
            )

    def _look_around(self) -> None:
        """Warn of differences after the switchover, and refuse if there are obstacles."""
        seen = way_back_subscription.obstacles(self.options, self.sub, self.taking)
        way_back_subscription.check(seen, self.options)
        for one in seen:
            self.warned.add(one.message)
            self.reporter.warning(one.message, one.detail, one.hint)


def no_way_back(entry: Entry, more: str = "") -> StateForbids:
    """Make the error for a reverse subscription that is not there. A new one would begin after the clients' writes.

    :param more: text after the hint.
    """
    hint = "Without it what clients write on the target has no way back. Rename it back if it is there."
    return StateForbids(
        f'subscription "{entry.back_name}", which is to lead back, is not the one that was made',
        detail="It was dropped or renamed while the switchover was under way.",
        hint=f"{hint}\n{more}".strip(),
    )


def _check_only(taking: psycopg.Connection, sub: Subscription) -> None:
    """Check that no other subscription of this target has the same publisher database: writes move as a whole."""
    others = [row[0] for row in taking.execute(_SAME_PUBLISHER, {"subid": sub.subid}).fetchall()]
    if others:
        raise StateForbids(
            f"the writes of a database can only be moved with one subscription, and there are {len(others) + 1}",
            detail=f"These follow the same database of the publisher: {', '.join(others)}.",
            hint="Clients write to a database as a whole. Subscribe to all its tables with one subscription, and drop"
            " the others.",
        )
