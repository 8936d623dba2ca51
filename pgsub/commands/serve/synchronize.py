"""The part of ``create`` and similar commands that serves the subscription or follows its launcher."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pgsub.catalog.locks import Lock, launcher_lock, lock_held, subscription_lock
from pgsub.catalog.rows import COMPARE, CopyRow
from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter, TableProgress
from pgsub.commands.serve import disabled
from pgsub.commands.serve.run import raise_first, stopping_by_signal
from pgsub.commands.sessions import ledger_session
from pgsub.commands.status.wait import WaitOptions, wait
from pgsub.common.errors import StateForbids
from pgsub.common.plural import counted
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.common.threads import SupervisedThread
from pgsub.launcher.recorder import Run
from pgsub.target.ledger import subscriptions, two_phase_state
from pgsub.target.ledger.tables.states import CATCHUP

PROGRESS_SECONDS = 0.2
#: Seconds for which a launcher may release the subscription while it restarts its workers after a change.
GONE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """The command-line options for the synchronization after a command.

    :ivar wait: whether to wait until the tables are synchronized.
    :ivar timeout: limit for the whole command in seconds since the options were made, None for no limit.
    """

    wait: bool = True
    timeout: float | None = None
    master: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic, init=False)

    @property
    def deadline(self) -> float | None:
        """The end of the timeout in time of ``time.monotonic()``."""
        return None if self.timeout is None else self.began + self.timeout

    @property
    def seconds_left(self) -> float | None:
        """The seconds until the deadline, not negative."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())


def report_adopted(
    store: StateStore, sub: Subscription, reporter: Reporter, relids: Collection[int] | None = None
) -> None:
    """Report the differences that were corrected in adopted tables, or so far in those that a signal left to others.

    :param relids: the tables to report, None for all.
    """
    with ledger_session(store, sub) as session:
        rows = subscriptions.relations(session, sub.subid)
    for row in rows:
        if row.adopted is not None and (relids is None or row.srrelid in relids):
            missing, extra, different = row.adopted
            found = f"{counted(missing, 'row')} missing, {extra} extra, {different} different"
            ended = "is not adopted yet, so far" if row.srsubstate in ("i", "d") else "was adopted"
            reporter.notice(f'table "{row.schemaname}.{row.relname}" {ended}: {found}')


class Service:
    """The subscription's lock, held from before its registration until it is served or left to others.

    :param sub: the subscription, which may not exist yet.
    :param shared: whether another process may already serve it. That process then does the work.
    """

    def __init__(
        self, store: StateStore, folder: Path, sub: Subscription, reporter: Reporter, *, shared: bool = False
    ) -> None:
        self._store = store
        self._folder = folder
        self._sub = sub
        self._reporter = reporter
        self._shared = shared
        self._lock: Lock | None = None
        self._next_progress = 0.0

    def __enter__(self) -> Service:
        lock = subscription_lock(self._folder, self._sub.subid)
        if lock.acquire():
            self._lock = lock
        elif not self._shared:
            raise lock_held(lock, f'subscription "{self._sub.name}"')
        return self

    @property
    def alone(self) -> bool:
        """Whether this process holds the lock, so that no other writes the subscription's state."""
        return self._lock is not None

    def __exit__(self, *failure: object) -> None:
        if self._lock is not None:
            self._lock.release(unlink=self._store.subscription_by_id(self._sub.subid) is None)
            self._lock = None

    def redefined(self, sub: Subscription) -> None:
        """Use the definition of a subscription that was altered meanwhile."""
        self._sub = sub

    def leave(self, *, interrupted: bool = False) -> None:
        """Leave the work to a launcher. Report if there is none.

        :param interrupted: whether tables may not be synchronized because a signal ended the work.
        """
        if not self._served():
            behind = interrupted and any(row.srsubstate != "r" for row in self._store.relations(self._sub.subid))
            self._reporter.notice(
                f'subscription "{self._sub.name}" is '
                f"{'not synchronized yet, and' if behind else 'ready, but'} nothing is running it",
                f"{'Continue' if behind else 'Start it'} with:\npgsub run {word(self._sub.name)}",
            )

    def _served(self) -> bool:
        """Return whether a launcher serves the folder, or a bounded run serves this subscription."""
        if launcher_lock(self._folder).holder() is not None:
            return True
        return not self.alone and subscription_lock(self._folder, self._sub.subid).holder() is not None

    def synchronize(
        self, options: ServiceOptions, *, follow: bool = False, tables: frozenset[int] | None = None
    ) -> None:
        """Synchronize until every table is ``r``, two_phase is not pending, and apply has reached the publisher's
        position of that moment. With ``follow``, continue without end.

        :param tables: the only tables to wait for if another process does the work, None for all.
        :raises PgsubError: an error that stops the synchronization. The subscription stays.
        """
        with stopping_by_signal(self._reporter) as stop:
            if self._served() or self._lock is None:
                self.__exit__(None, None, None)
                self._watch(stop, options, tables)
                return
            # Imported late, because commands that only register need not load Spark.
            from pgsub.launcher.launcher import Launcher
            from pgsub.launcher.run_until import Goal

            launcher = Launcher(
                self._store,
                self._folder,
                self._reporter.log,
                names=(self._sub.name,),
                goal=Goal(caught_up=not follow),
                master=options.master,
                conf=options.conf,
                locks={self._sub.subid: self._lock},
            )
            self._lock = None  # from now on the launcher's
            ended = launcher.run(stop, options.seconds_left, self._progress)
        self._last_progress()
        raise_first(ended)
        if not stop.is_set():
            disabled.check_end(self._store, (self._sub.name,), {one.name for one in ended}, self._reporter)
        self.leave(interrupted=stop.is_set())

    def _watch(self, stop: threading.Event, options: ServiceOptions, tables: frozenset[int] | None) -> None:
        """Show progress while another process does the work, and end with its outcome."""
        done = threading.Event()
        waiting = SupervisedThread("wait", "wait", partial(self._wait, options, tables, done), on_death=done.set)
        waiting.start()
        try:
            self._follow(stop, done)
        finally:
            done.set()
        if waiting.fatal_error is not None:
            raise waiting.fatal_error

    def _follow(self, stop: threading.Event, done: threading.Event) -> None:
        """Show progress until the work is done, a stop is requested, or no process does the work any more."""
        served_at = time.monotonic()
        while not done.wait(PROGRESS_SECONDS) and not stop.is_set():
            self._progress()
            if self._served():
                served_at = time.monotonic()
            elif time.monotonic() - served_at > GONE_SECONDS:
                self._last_progress()
                raise StateForbids(
                    f'the pgsub run that served subscription "{self._sub.name}" has ended',
                    hint=f"The subscription stays; continue with:\npgsub run {word(self._sub.name)}",
                )
        self._last_progress()
        if not done.is_set():
            self._reporter.notice(
                f'pgsub run continues to synchronize subscription "{self._sub.name}"',
                f"See how far it is:\npgsub status {word(self._sub.name)}",
            )

    def _wait(self, options: ServiceOptions, tables: frozenset[int] | None, done: threading.Event) -> None:
        for condition in ("synced", "two-phase", "caught-up"):
            wanted = WaitOptions(self._sub.name, self._folder, condition, timeout=options.seconds_left, tables=tables)
            wait(wanted, given_up=done)
        done.set()

    def report_two_phase(self) -> None:
        """Report that two_phase stays pending because there are no tables."""
        sub = self._store.subscription_by_id(self._sub.subid)
        if sub is not None and sub.two_phase == two_phase_state.PENDING:
            self._reporter.notice(
                f'two_phase stays pending for subscription "{sub.name}": it has no table; it is enabled once there are'
                " tables, and all of them are synchronized"
            )

    def _last_progress(self) -> None:
        self._next_progress = 0.0
        self._progress()
        self._reporter.done()

    def _progress(self, run: Run | None = None) -> None:
        """Show the progress of the tables.

        :param run: runs reads of the state store in the thread of a launcher of this process.
        """
        clock = time.monotonic()
        if clock < self._next_progress:
            return
        self._next_progress = clock + PROGRESS_SECONDS
        self._reporter.progress(self._rows() if run is None else run(self._rows))

    def _rows(self) -> list[TableProgress]:
        copies = {row.relid: row for row in self._store.copy_progress(self._sub.subid)}
        catching_up = self._catching_up()
        rows = []
        for table in self._store.relations(self._sub.subid):
            copy = copies.get(table.srrelid) or CopyRow(table.srrelid, table.schemaname, table.relname)
            catches_up = table.srsubstate == "f" and table.srrelid in catching_up
            rows.append(
                TableProgress(
                    table.schemaname,
                    table.relname,
                    CATCHUP if catches_up else table.srsubstate,
                    copy.bytes_processed,
                    copy.bytes_total or None,
                    copy.tuples_processed,
                    copy.tuples_total or None,
                    copy.chunks_done,
                    copy.chunks_total,
                    copy.bytes_per_second,
                    copy.seconds_left,
                    copy.command == COMPARE,
                    catching_up.get(table.srrelid),
                )
            )
        return rows

    def _catching_up(self) -> dict[int, int | None]:
        """Return the tables whose workers stream changes, each with the bytes of WAL that it is behind apply."""
        origin = self._store.origin(self._sub.subid)
        applied = origin.remote_lsn if origin is not None else None
        return {
            one.relid: max(0, applied - one.latest_end_lsn) if applied and one.latest_end_lsn else None
            for one in self._store.workers(self._sub.subid)
            if one.relid is not None and one.received_lsn
        }
