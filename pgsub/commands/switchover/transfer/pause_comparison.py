"""The comparison of all tables as of the pause of a switchover, made after clients can write again.

When the giving side is fenced and everything is applied, snapshots of both sides show the same state. Taking them lasts
only milliseconds of the pause. Their comparison takes place afterwards, however large the tables are.
"""

from __future__ import annotations

import contextlib

import psycopg

from pgsub.apply.verified_publisher import recorded_database
from pgsub.catalog.store import StateStore
from pgsub.commands.sessions import connect_publisher, connect_target
from pgsub.commands.switchover.parties import SwitchoverOptions
from pgsub.commands.verify.result import Verification
from pgsub.commands.verify.verify import VerifyOptions, compare_at
from pgsub.common.connections.exported_snapshot import ExportedSnapshot
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher.current_wal_lsn import flushed_position
from pgsub.reconcile.point_attempt import Point
from pgsub.target.ledger import subscriptions


class PauseComparison:
    """Snapshots of both sides, and their comparison. Does nothing unless requested.

    :ivar found: the result, None before or if a comparison is impossible.
    """

    def __init__(self, options: SwitchoverOptions, store: StateStore, sub: Subscription) -> None:
        self._options = options
        self._store = store
        self._sub = sub
        self._stack = contextlib.ExitStack()
        self._sessions: tuple[publisher.Connection, psycopg.Connection] | None = None
        self._point: Point | None = None
        self.found: Verification | None = None

    def __enter__(self) -> PauseComparison:
        if self._options.verify:
            session = self._stack.enter_context(connect_target(self._sub))
            expected = recorded_database(session, self._sub.subid)
            self._sessions = self._stack.enter_context(connect_publisher(self._sub, expected=expected)), session
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.close()

    @property
    def sessions(self) -> tuple[psycopg.Connection, ...]:
        """The sessions on both sides, empty if there are none."""
        return self._sessions or ()

    @property
    def pids(self) -> list[int]:
        """The process IDs of sessions on the giving side."""
        return [] if self._sessions is None else [self._sessions[0].info.backend_pid]

    @property
    def pids_there(self) -> list[int]:
        """The process IDs of sessions on the taking side."""
        return [] if self._sessions is None else [self._sessions[1].info.backend_pid]

    def hold(self) -> None:
        """Take both snapshots. Errors are those of psycopg."""
        if self._sessions is None:
            return
        source, target = self._sessions
        for session in self._sessions:
            session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        lsn = flushed_position(source)
        self._point = Point(lsn, ExportedSnapshot.of(source), ExportedSnapshot.of(target), 0.0)

    def compare(self, taking: psycopg.Connection) -> None:
        """Compare all tables in the two snapshots, if these were taken."""
        if self._point is not None:
            wanted = subscriptions.relations(taking, self._sub.subid)
            options = VerifyOptions(self._sub.name, self._options.state_dir)
            self.found = compare_at(self._point, taking, self._store, self._sub, wanted, options)
