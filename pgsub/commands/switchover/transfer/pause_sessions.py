"""The sessions on both servers that are opened before the pause, and their use in it: checks, and sequences."""

from __future__ import annotations

import contextlib
import time

import psycopg

from pgsub.commands.preflight import databases
from pgsub.commands.sessions import connect_publisher, verified_publisher
from pgsub.common.errors import StateForbids, TargetSchemaError
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.publisher import publication
from pgsub.switchover import journal, way_back
from pgsub.switchover.journal import Entry
from pgsub.tablesync.sequences import synchronization
from pgsub.target.ledger import skipped_changes, subscriptions
from pgsub.target.ledger.tables import held_tables
from pgsub.target.session import connect as target
from pgsub.target.session.connect import SessionName
from pgsub.target.session.transactions import durable


class PauseSessions:
    """The sessions of one run. They are closed with the stack.

    :ivar slots: the session that advances the reverse subscription's slot.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        sub: Subscription,
        back: Subscription,
        taking: psycopg.Connection,
        giving: psycopg.Connection,
    ) -> None:
        self._sub, self._back, self._taking, self._giving = sub, back, taking, giving
        self.source = stack.enter_context(verified_publisher(taking, sub, sub.connection))
        name = SessionName(sub.subid, "sequences", 0)
        self._target = stack.enter_context(contextlib.closing(target.open_session(sub, name, replica=False)))
        self.slots = stack.enter_context(connect_publisher(back))
        self.there = [session.info.backend_pid for session in (self._target, self.slots)]
        # The fenced database must be the subscription's publisher, and the reverse one's must be the target.
        databases.check_same_database(self.source, giving, "publisher", "--back-target")
        databases.check_same_database(taking, self.slots, "target", "--back-connection")

    @property
    def all(self) -> list[psycopg.Connection]:
        """All the sessions."""
        return [self.source, self._target, self.slots]

    @property
    def users(self) -> set[str]:
        """The users of the sessions, even if they come from a service file or the environment."""
        return {session.info.user for session in self.all}

    def check_way_there(self, command: str) -> None:
        """Check that apply skips no table, and that every table is published on both sides.

        :param command: the command that restarts the switchover.
        :raises StateForbids: a table is held, not synchronized, or not published, or changes were skipped.
        """
        sub = self._sub
        relations = subscriptions.relations(self._taking, sub.subid)
        held = held_tables.overview(self._taking, sub.subid)
        # guard: the right to write is not given while apply leaves out a table
        if held or any(one.srsubstate != "r" for one in relations):
            raise StateForbids(
                f'not all tables of subscription "{sub.name}" are synchronized, or some are held',
                hint=f"See which:\npgsub status {word(sub.name)}",
            )
        # guard: the right to write is not given while skipped changes wait for replay
        if skipped_changes.usage(self._taking, sub.subid).waiting:
            raise StateForbids(
                f'changes of subscription "{sub.name}" were skipped meanwhile, and not replayed',
                hint=f"See them, then replay or prune them:\npgsub conflicts list {word(sub.name)}",
            )
        names = [one.recorded or (one.schemaname, one.relname) for one in relations]
        # guard: the right to write is not given while the publisher does not send the changes of a table
        if set(names) - {one[:2] for one in publication.published_tables(self.source, sub.publications)}:
            raise StateForbids(
                f'the publisher does not publish every table of subscription "{sub.name}" any more',
                hint=f"See which, and what to run:\n{command} --dry-run",
            )
        way_back.published(self.slots, self._back.publications, names)

    def check_way_back(self, command: str) -> None:
        """Check that the reverse subscription has every published table, and copies none: before the right is given.

        :param command: the command that restarts the switchover.
        """
        back = self._back
        relations = subscriptions.relations(self._giving, back.subid)
        known = {one.recorded or (one.schemaname, one.relname) for one in relations}
        unknown = {one[:2] for one in publication.published_tables(self.slots, back.publications)} - known
        # guard: the right to write is not given while the way back would omit or copy a table
        if unknown or any(one.srsubstate != "r" for one in relations):
            raise StateForbids(
                f'subscription "{back.name}", which is to lead back, has not every table, or would copy one',
                hint=f"To create it again, begin the switchover again:\n{command}",
            )

    def sequences(self, entry: Entry, deadline: float) -> None:
        """Set the sequences of the taking side to the values of the giving side.

        Most are set together while the journal keeps the taking side fenced, so that no client draws values there.

        :raises PgsubError: a sequence cannot be set.
        """
        sub = self._sub
        while True:
            compared = synchronization.look(self._target, self.source, sub)
            with durable(self._target):
                journal.hold(self._target, entry.id, journal.PREPARED)
                synchronization.bring_together(self._target, compared, run_as_owner=sub.run_as_owner)
            outcomes = synchronization.bring(self._target, compared, run_as_owner=sub.run_as_owner)
            failed = synchronization.failure(sub, outcomes, TargetSchemaError)
            if failed is not None:
                raise failed
            kept = synchronization.kept(sub, outcomes)
            if kept is None:
                return
            if time.monotonic() > deadline:
                raise kept
