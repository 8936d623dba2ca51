"""The launcher's view of tablesync workers. Mirrors the bookkeeping of ProcessSyncingTablesForApply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pgsub.common.errors import Directive, PgsubError
from pgsub.common.threads import SupervisedThread
from pgsub.launcher import error_rows
from pgsub.launcher.error_handling import APPLY, PUBLICATIONS, SEQUENCES, SLOT, ErrorReporter, sync_name
from pgsub.launcher.heartbeat_receiver import HeartbeatReceiver
from pgsub.launcher.retry import RETRY_SECONDS, Retry
from pgsub.tablesync import sync_order
from pgsub.tablesync.context import SyncContext
from pgsub.tablesync.coordinator import TableSync
from pgsub.tablesync.copy.task import LOCKED
from pgsub.target.ledger.subscriptions import RelationState

#: Maximum number of times that the patience with a task is doubled: from a minute to a quarter of an hour.
_DOUBLED = 4


@dataclass(slots=True)
class _Sync:
    """The worker of one table, or of some small ones together."""

    relids: tuple[int, ...]
    thread: SupervisedThread
    failure: PgsubError | None = None  #: concerns all its tables
    errors: dict[int, PgsubError] = field(default_factory=dict)
    outdated: set[int] = field(default_factory=set)  #: tables that a refresh took away, whose errors are ignored

    @property
    def ended(self) -> bool:
        """Whether the worker's thread has ended, in whatever way."""
        return not self.thread.is_alive()


class SyncWorkers:
    """The tablesync workers of a subscription, some at a time. An error of one table never stops the others.

    :param context: shared by the subscription's workers. Its ``stopping`` event ends them.
    :param current: returns whether the context's definition is still in effect. If not, nothing is started.
    """

    def __init__(
        self,
        context: SyncContext,
        heartbeats: HeartbeatReceiver,
        errors: ErrorReporter,
        interval: float = RETRY_SECONDS,
        current: Callable[[], bool] = lambda: True,
    ) -> None:
        self._context = context
        self._sub = context.subscription
        self._heartbeats = heartbeats
        self._errors = errors
        self._interval = interval
        self._current = current
        self._running: list[_Sync] = []
        self._retries: dict[int, Retry] = {}
        self._states: dict[int, str] = {}  #: as of the last tick

    @property
    def alive(self) -> set[int]:
        """The tables whose worker runs."""
        return {relid for sync in self._running if not sync.ended for relid in sync.relids}

    def tick(self, relations: Sequence[RelationState], alive: set[int]) -> None:
        """Handle the ends of workers, and start those that are due.

        :param alive: tables whose worker ran when ``relations`` was read. A worker that ended later left a newer state.
        """
        self._begin_anew(relations)
        for sync in list(self._running):
            if not alive.intersection(sync.relids):
                self._ended(sync)
        open_tables = [rel for rel in relations if sync_order.unfinished(rel)]
        others = (APPLY, SEQUENCES, PUBLICATIONS, SLOT)
        self._errors.keep_only([*others, *(sync_name(rel.srrelid) for rel in open_tables)])
        busy = {relid for sync in self._running for relid in sync.relids}
        free = self._sub.max_sync_workers - len(self._running)
        waiting = [rel for rel in open_tables if rel.srrelid not in busy and self._retry(rel.srrelid).due()]
        # Asked after the tables were read: a command writes the definition first, and then the tables that follow it.
        # guard: a table is copied by the definition with which it was added, without " and self._current()"
        if free > 0 and waiting and self._current():
            alone = {relid for relid, retry in self._retries.items() if retry.own}
            for relids in sync_order.next_workers(waiting, free, alone=alone):
                self._start(relids)

    def _begin_anew(self, relations: Sequence[RelationState]) -> None:
        """Forget the failures of tables that a refresh removed or reset for another copy."""
        states = {rel.srrelid: rel.srsubstate for rel in relations}
        for relid, before in self._states.items():
            if relid not in states or (states[relid] == "i" and before != "i"):
                self._retries.pop(relid, None)
                for sync in self._running:
                    sync.outdated.add(relid)
        self._states = states

    def _retry(self, relid: int) -> Retry:
        return self._retries.setdefault(relid, Retry(interval=self._interval))

    def _start(self, relids: tuple[int, ...]) -> None:
        # A worker that was abandoned too early gets more time, up to a limit as with apply.
        failures = min(_DOUBLED, max(self._retry(relid).failures for relid in relids))
        context = replace(self._context, patience=self._context.patience * 2**failures)

        def body() -> None:
            try:
                sync.errors = TableSync(context, *relids).run()
            except PgsubError as error:
                sync.failure = error
            except Exception as error:
                sync.failure = error_rows.internal_error(error)

        sync = _Sync(relids, SupervisedThread("sync", f"sync {relids[0]}", body))
        self._running.append(sync)
        sync.thread.try_start()

    def _ended(self, sync: _Sync) -> None:
        self._running.remove(sync)
        for relid in sync.relids:
            self._heartbeats.forget(self._sub.subid, relid)
            if relid in sync.outdated:
                continue
            error = sync.errors.get(relid) or sync.failure or sync.thread.fatal_error
            if error is None:
                self._retry(relid).succeeded()
                continue
            if relid in sync.errors and error.sqlstate == LOCKED and len(sync.relids) > 1:
                # not an error: from now on the table waits for the lock alone, like on the server
                self._retry(relid).own = True
                continue
            self._retry(relid).failed(error, growing=True)
            own = relid in sync.errors or len(sync.relids) == 1
            # An error that retries cannot fix is attributed to a table by trying the tables one by one.
            self._retry(relid).own = own or error.directive is not Directive.RETRY
            # An error of all tables is reported once.
            if not self._context.stopping.is_set() and (own or relid == sync.relids[0]):
                self._errors.report(sync_name(relid), error, "sync_table_error_count")

    def hopeless(self, relations: Sequence[RelationState]) -> PgsubError | None:
        """Return the error to end with if all unfinished tables fail with errors that no retry fixes, else None."""
        errors = [self._fault(rel.srrelid) for rel in relations if rel.srsubstate != "r"]
        return errors[0] if errors and all(errors) else None

    def _fault(self, relid: int) -> PgsubError | None:
        retry = self._retries.get(relid)
        if retry is None or retry.error is None or retry.error.directive is Directive.RETRY:
            return None
        return retry.error
