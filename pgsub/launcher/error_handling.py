"""Handles a subscription's errors: logs, records and counts them, and disables it if asked, in this order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pgsub.catalog.rows import ErrorRow
from pgsub.catalog.store import StateStore
from pgsub.common.errors import (
    Directive,
    Fenced,
    Log,
    LogText,
    PgsubError,
    StateStoreError,
    StreamsMustRestart,
    SubscriptionNotFound,
    log_text,
)
from pgsub.common.quoting import word
from pgsub.common.server_words import shortened
from pgsub.common.subscription import Subscription, complete_hint
from pgsub.launcher import error_rows
from pgsub.launcher.recorder import Recorder
from pgsub.protocol.lsn import MAX_LSN

APPLY = "apply"  #: the apply worker, in the error records
SEQUENCES = "sequence synchronization"  #: the sequence synchronization
PUBLICATIONS = "publications"  #: the check that the publications exist
SLOT = "replication slot"  #: the check of the replication slot
#: Restarts from the same position, after the first start from it, until a subscription counts as blocked.
RESTARTS = 2
#: Restarts in quick succession from the same position until an error that is usually not logged is logged.
QUIET_RESTARTS = 20
#: Seconds after which a restart no longer counts as being in quick succession to the previous one.
_SOON = 60.0
#: Seconds after which a repeated error is logged with all its fields again.
WHOLE_AGAIN = 3600.0
#: Maximum number of records that wait for the state store. The oldest are dropped; the log has them.
WAITING = 1000


@dataclass(slots=True)
class _Restarts:
    """Restarts of a worker in quick succession that operators need not know about."""

    of: tuple[type[PgsubError], int | None]
    times: int = 0
    last: float = 0.0


@dataclass(slots=True)
class _Logged:
    """The last log record of an error, which may be repeated."""

    text: LogText
    whole_at: float
    repeats: int = 0


class ErrorReporter:
    """One subscription's errors.

    :ivar disabling: the fault for which disable_on_error disables the subscription. Its workers must not run.
    :ivar disabled_by: the same fault, once the state store says that the subscription is disabled.
    """

    def __init__(self, store: StateStore, sub: Subscription, log: Log, recorder: Recorder) -> None:
        self._store = store
        self._sub = sub
        self._log = log
        self._recorder = recorder
        #: Finish LSN of each error that the state store shows, 0 if no transaction failed. Includes errors of earlier
        #: launchers.
        self._shown: dict[str, int] = {}
        self._logged: dict[str, _Logged] = {}  #: the last error of each worker
        self._restarts: dict[str, _Restarts] = {}  #: by worker
        self._records: deque[Callable[[], None]] = deque(maxlen=WAITING)
        self.disabling: PgsubError | None = None
        self.disabled_by: PgsubError | None = None
        self._record(self._read)

    def _read(self) -> None:
        self._shown = {row.worker: row.finish_lsn or 0 for row in self._store.errors(self._sub.subid)} | self._shown

    def _record(self, work: Callable[[], None]) -> None:
        self._records.append(work)
        self.flush()

    def flush(self) -> None:
        """Write the pending records in order. A record whose write timed out may be written twice."""
        while self._records:
            try:
                self._recorder.run(self._records[0])
            except StateStoreError:
                return
            except SubscriptionNotFound:
                pass  # dropped meanwhile
            self._records.popleft()

    def report(
        self,
        worker: str,
        error: PgsubError,
        counter: str | None = None,
        position: int | None = None,
        *,
        repeats: bool = True,
    ) -> None:
        """Report the error that ended a worker.

        :param worker: :data:`APPLY`, :data:`SEQUENCES`, :data:`PUBLICATIONS`, :data:`SLOT` or the result of
            :func:`sync_name`.
        :param counter: the statistic that counts a data or schema fault.
        :param position: the position of apply in the ledger, None if unknown.
        :param repeats: whether to log every attempt that fails with the same error.
        """
        quiet = isinstance(error, Fenced | StreamsMustRestart)
        if quiet and not self._gets_nowhere(worker, error, position):
            return  # operators need not know
        complete_hint(error, self._sub)
        text = self._text(worker, error)
        if repeats or not self._logged[worker].repeats:
            self._log("ERROR", text)
        # A worker that keeps restarting has recovered when its position advances, not already when it runs.
        self._shown[worker] = (position or 0) if quiet else error_rows.finish_lsn(error)
        row = ErrorRow.of(error, worker, position)
        counts = counter if error.directive is Directive.FAULT else None
        known = self._recorder.current(self._sub.subid)  # as of the last successful read of the store
        if counts is not None and known is not None and known.disable_on_error:
            self.disabling = error
        self._record(lambda: self._write(worker, error, row, counts))

    def _gets_nowhere(self, worker: str, error: PgsubError, position: int | None) -> bool:
        """Return whether a worker keeps restarting from the same position."""
        of, now = (type(error), position), time.monotonic()
        known = self._restarts.get(worker)
        if known is None or known.of != of or now - known.last > _SOON:
            known = self._restarts[worker] = _Restarts(of)
        known.times, known.last = known.times + 1, now
        return known.times >= QUIET_RESTARTS

    def _text(self, worker: str, error: PgsubError) -> LogText:
        """Return the log record of an error. A repeated error is shortened, except once an hour."""
        text, now = error.log_text(), time.monotonic()
        known = self._logged.get(worker)
        if known is None or known.text != text or now - known.whole_at >= WHOLE_AGAIN:
            self._logged[worker] = _Logged(text, now)
            return text
        known.repeats += 1
        return log_text(shortened(error.message), detail=f"This is attempt {known.repeats + 1} with the same error.")

    def _write(self, worker: str, error: PgsubError, row: ErrorRow, counter: str | None) -> None:
        if self._store.subscription_by_id(self._sub.subid) is None:
            return
        with self._store.batch():
            self._store.record_error(self._sub.subid, row)
            if counter is not None:
                error_rows.count(self._store, self._sub, error, worker, counter)
        if counter is not None:
            self._disable_if_asked(error)

    def _disable_if_asked(self, error: PgsubError) -> None:
        current = self._store.subscription_by_id(self._sub.subid)
        if current is None or not current.disable_on_error:
            self.disabling = None
            return
        self._log("LOG", log_text(f'subscription "{self._sub.name}" has been disabled because of an error'))
        self._store.alter(self._sub.subid, enabled=False)
        self._store.journal("disable", self._sub.subid, self._sub.name, {"because": "error"})
        self.disabled_by = error

    def shows(self, worker: str) -> bool:
        """Return whether the state store shows an error of a worker."""
        return worker in self._shown

    def place(self, worker: str) -> int:
        """Return the finish LSN of the error shown for a worker, 0 for none."""
        return self._shown.get(worker, 0)

    def clear(self, worker: str, position: int = MAX_LSN) -> None:
        """Clear the error of a worker that has recovered, whichever launcher recorded it.

        :param position: the position that the worker has reached. Conflicts up to it no longer stop the worker.
        """
        self._logged.pop(worker, None)
        if self._shown.pop(worker, None) is not None:
            if worker == APPLY:  # for a table, the log says that its worker has finished
                text = (
                    f'logical replication apply worker for subscription "{self._sub.name}" has recovered from an error'
                )
                self._log("LOG", log_text(text))
            elif worker == PUBLICATIONS:
                self._log("WARNING", _there_again(self._sub))
            elif worker == SLOT:
                self._log("LOG", log_text(f'the publisher says again where the slot of "{self._sub.name}" is'))
            self._record(lambda: self._passed(worker, position))

    def _passed(self, worker: str, position: int) -> None:
        with self._store.batch():
            self._store.clear_error(self._sub.subid, worker)
            self._store.conflicts_passed(self._sub.subid, worker, position)

    def keep_only(self, workers: Iterable[str]) -> None:
        """Clear the errors of all other workers, whose tables are finished."""
        for worker in self._shown.keys() - set(workers):
            self.clear(worker)


def sync_name(relid: int) -> str:
    """Return the name of a tablesync worker in the error records."""
    return f"table synchronization {relid}"


def _there_again(sub: Subscription) -> LogText:
    return log_text(
        f'the publications of subscription "{sub.name}" are there again, or no longer its own',
        detail="What the publisher committed without them was not sent, and will not be.",
        hint=f"Compare the tables, and repair what differs:\npgsub verify {word(sub.name)} --repair",
    )
