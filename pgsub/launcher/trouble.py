"""What is told of a subscription's errors: log, state store, counters, disabling. In this order."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pgsub.catalog.rows import ErrorRow
from pgsub.catalog.store import StateStore
from pgsub.errors import Directive, PgsubError
from pgsub.launcher import faults
from pgsub.launcher.retry import worth_reporting
from pgsub.protocol.lsn import MAX_LSN
from pgsub.subscription import Subscription

Log = Callable[[str, str], None]

APPLY = "apply"  #: the apply worker in the record of errors
#: Starts from one position after the first from which a subscription is called blocked.
RESTARTS = 2


class Trouble:
    """One subscription's errors.

    :ivar disabled_by: the fault for which disable_on_error disabled the subscription.
    """

    def __init__(self, store: StateStore, sub: Subscription, log: Log) -> None:
        self._store = store
        self._sub = sub
        self._log = log
        #: finish LSN (0: none to blame) of the errors that the store shows, those of earlier launchers included
        self._shown = {row.worker: row.finish_lsn or 0 for row in store.errors(sub.subid)}
        self.disabled_by: PgsubError | None = None

    def report(self, worker: str, error: PgsubError, counter: str | None = None, position: int | None = None) -> None:
        """A worker ended with an error.

        :param worker: :data:`APPLY` or :func:`sync_name`.
        :param counter: the statistic that a data or schema fault adds to.
        :param position: where apply is by the ledger, None where nobody knows.
        """
        if not worth_reporting(error):
            return
        self._log("ERROR", "\n".join([error.message, *error.lines()]))
        if self._store.subscription_by_id(self._sub.subid) is None:
            return
        self._store.record_error(self._sub.subid, ErrorRow.of(error, worker, position))
        self._shown[worker] = faults.place(error)
        if counter is not None and error.directive is Directive.FAULT:
            faults.count(self._store, self._sub, error, worker, counter)
            self._disable_if_asked(error)

    def _disable_if_asked(self, error: PgsubError) -> None:
        current = self._store.subscription_by_id(self._sub.subid)
        if current is None or not current.disable_on_error:
            return
        self._log("LOG", f'subscription "{self._sub.name}" has been disabled because of an error')
        self._store.set_enabled(self._sub.subid, False)
        self._store.journal("disable", self._sub.subid, self._sub.name, {"because": "error"})
        self.disabled_by = error

    def place(self, worker: str) -> int:
        """Finish LSN of the error shown for a worker, 0 for none."""
        return self._shown.get(worker, 0)

    def clear(self, worker: str, position: int = MAX_LSN) -> None:
        """The worker got past it, whichever launcher met it.

        :param position: where it is; conflicts that this covers are no longer in the way.
        """
        if self._shown.pop(worker, None) is not None:
            with self._store.batch():
                self._store.clear_error(self._sub.subid, worker)
                self._store.conflicts_passed(self._sub.subid, worker, position)

    def keep_only(self, workers: Iterable[str]) -> None:
        """Forget the errors of all other workers: their tables are done."""
        for worker in self._shown.keys() - set(workers):
            self.clear(worker)


def sync_name(relid: int) -> str:
    """How the record of errors calls a tablesync worker."""
    return f"table synchronization {relid}"
