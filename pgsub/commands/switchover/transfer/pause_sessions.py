"""The sessions on both servers that are opened before the pause, and their use in it."""

from __future__ import annotations

import contextlib
import time

import psycopg

from pgsub.commands.preflight import databases
from pgsub.commands.sessions import connect_publisher, verified_publisher
from pgsub.common.errors import TargetSchemaError
from pgsub.common.subscription import Subscription
from pgsub.switchover import journal
from pgsub.switchover.journal import Entry
from pgsub.tablesync.sequences import reading, synchronization
from pgsub.target.session import connect as target
from pgsub.target.session.connect import SessionName
from pgsub.target.session.transactions import durable


class PauseSessions:
    """The sessions of one run. They are closed with the stack."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        sub: Subscription,
        back: Subscription,
        taking: psycopg.Connection,
        giving: psycopg.Connection,
    ) -> None:
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

    def sequences(self, sub: Subscription, entry: Entry, deadline: float) -> None:
        """Set the sequences of the taking side to the values of the giving side.

        Most are set together while the journal keeps the taking side fenced, so that no client draws values there.

        :raises PgsubError: a sequence cannot be set.
        """
        reading.prepare(self._target)
        reading.prepare(self.source)
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
