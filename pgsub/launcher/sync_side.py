"""The tablesync workers as their launcher sees them. Mirrors ProcessSyncingTablesForApply's bookkeeping."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from pgsub.errors import Directive, PgsubError
from pgsub.launcher import faults
from pgsub.launcher.retry import Retry
from pgsub.launcher.trouble import APPLY, Trouble, sync_name
from pgsub.pulse import PulseReceiver
from pgsub.tablesync.coordinator import SyncContext, TableSync
from pgsub.target.ledger import RelationState


@dataclass(slots=True)
class _Sync:
    thread: threading.Thread
    error: PgsubError | None = None
    ended: bool = False


class SyncSide:
    """Synchronizes what is not synchronized, a few tables at once; an error of one table never stops the others.

    :param context: what is lent to each table's synchronization; its ``stopping`` event ends them.
    """

    def __init__(self, context: SyncContext, pulses: PulseReceiver, trouble: Trouble) -> None:
        self._context = context
        self._sub = context.subscription
        self._pulses = pulses
        self._trouble = trouble
        self._running: dict[int, _Sync] = {}
        self._retries: dict[int, Retry] = {}

    @property
    def alive(self) -> set[int]:
        """Tables whose worker runs."""
        return {relid for relid, sync in self._running.items() if not sync.ended}

    def tick(self, relations: Sequence[RelationState], alive: set[int]) -> None:
        """Hear of ends, start what is due.

        :param alive: whose worker ran when the relations were read; what ended later has left a newer state.
        """
        for relid, sync in list(self._running.items()):
            if relid not in alive:
                self._ended(relid, sync)
        open_tables = [rel.srrelid for rel in relations if unfinished(rel)]
        self._trouble.keep_only([APPLY, *map(sync_name, open_tables)])
        for relid in open_tables:
            if len(self._running) >= self._sub.max_sync_workers:
                return
            if relid not in self._running and self._retries.setdefault(relid, Retry()).due():
                self._start(relid)

    def _start(self, relid: int) -> None:
        def body() -> None:
            try:
                TableSync(self._context, relid).run()
            except PgsubError as error:
                sync.error = error
            except Exception as error:
                sync.error = faults.bug(error)
            sync.ended = True

        sync = _Sync(threading.Thread(target=body, name=f"sync {relid}", daemon=True))
        self._running[relid] = sync
        sync.thread.start()

    def _ended(self, relid: int, sync: _Sync) -> None:
        del self._running[relid]
        self._pulses.forget(self._sub.subid, relid)
        retry = self._retries[relid]
        if sync.error is None:
            retry.succeeded()
            return
        retry.failed(sync.error, growing=True)
        if not self._context.stopping.is_set():
            self._trouble.report(sync_name(relid), sync.error, "sync_table_error_count")

    def hopeless(self, relations: Sequence[RelationState]) -> PgsubError | None:
        """The error to end with when all that is left to synchronize fails on what no retry mends, else None."""
        errors = [self._fault(rel.srrelid) for rel in relations if rel.srsubstate != "r"]
        return errors[0] if errors and all(errors) else None

    def _fault(self, relid: int) -> PgsubError | None:
        retry = self._retries.get(relid)
        if retry is None or retry.error is None or retry.error.directive is Directive.RETRY:
            return None
        return retry.error


def unfinished(rel: RelationState) -> bool:
    """Whether a table still needs its tablesync worker."""
    return rel.srsubstate in "idf" or rel.sync_slot is not None
