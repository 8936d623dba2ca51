"""The launcher's access to its state store. No failure of it stops replication.

``state.db`` is not part of the chain that guarantees exactly-once. It may be full, locked, read-only, damaged, removed,
or on a hanging file system. In that case workers continue, failed writes are made up for later, and ``status`` and the
log report the failure. A bounded run that ends meanwhile ends with the error.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pgsub.catalog.locks import UNRECORDED, TroubleFlag
from pgsub.catalog.store import StateStore
from pgsub.common import failpoints
from pgsub.common.errors import Log, PgsubError, StateStoreError, log_text
from pgsub.common.machine.out_of_resources import out_of_resources
from pgsub.common.subscription import Subscription
from pgsub.common.threads import CallTimedOut, TimedExecutor

Result = TypeVar("Result")


#: Runs work on the store in the recorder's thread: :meth:`Recorder.run`.
Run = Callable[[Callable[[], Any]], Any]

#: Seconds that a caller waits for the store.
PATIENCE = 3.0
#: Seconds that a caller waits for a sign to other processes.
SIGN_PATIENCE = 0.5
#: Seconds after which a failure of the store is not expected to pass by itself.
LASTING = 10.0
#: Bounds of the seconds between attempts while the store fails. The wait is doubled each time.
SHORTEST, LONGEST = 0.5, 15.0


class Recorder:
    """The access to the store. It has a thread of its own, for which callers wait a limited time.

    Signs to other processes, which are files beside the store, have another thread.

    :param store: used only by this object while the launcher runs, except for reads that show progress.
    """

    def __init__(self, store: StateStore, log: Log) -> None:
        self._store = store
        self._log = log
        self._executor = TimedExecutor("recorder", PATIENCE)
        self._signs = TimedExecutor("signs", SIGN_PATIENCE)
        self._trouble = TroubleFlag(store.path.with_name(UNRECORDED))
        self._known = {sub.subid: sub for sub in store.subscriptions()}
        self._broken = False  #: must be reopened before the next use
        self._wait = SHORTEST
        self._again = 0.0
        self._since = 0.0
        self.trouble: StateStoreError | None = None
        self._lock = threading.RLock()  #: protects the state of the trouble, because many threads call
        if store.copied is not None:
            self._failed(StateStoreError(store.copied.message, detail=store.copied.detail, hint=store.copied.hint))

    def run(self, work: Callable[[], Result]) -> Result:
        """Run a function that uses the store.

        :raises StateStoreError: the store cannot be used now. A slow call may still succeed later.
        :raises PgsubError: raised by ``work``.
        """
        with self._lock:
            if self.trouble is not None and time.monotonic() < self._again:
                raise self.trouble
        try:
            done, still = self._executor.run(lambda: self._do(work))
        except CallTimedOut:
            error = StateStoreError(
                f'state store "{self._store.path}" does not answer',
                detail=f"Reading or writing it takes longer than {PATIENCE:.0f} s.",
                hint=f"Check the disk, and find the processes that use the file.\nfuser -v {self._store.path}",
            )
        except StateStoreError as failure:
            self._broken, error = True, failure
        except Exception as failure:
            lack = out_of_resources(failure)
            if lack is None:
                raise
            self._broken = True
            error = StateStoreError(f'could not use state store "{self._store.path}": {lack.message}', hint=lack.hint)
        else:
            with self._lock:
                self._works() if still is None else self._failed(still)
            return done
        with self._lock:
            self._failed(error)
        raise error

    def subscriptions(self) -> list[Subscription]:
        """Return all subscriptions by name, as of the last successful read."""
        try:
            self._known = {sub.subid: sub for sub in self.run(self._store.subscriptions)}
        except StateStoreError:
            pass
        return list(self._known.values())

    def current(self, subid: int) -> Subscription | None:
        """Return one subscription as of the last successful read, None if it was dropped."""
        return self._known.get(subid)

    @property
    def lasting(self) -> StateStoreError | None:
        """The failure of the store, once it lasts for :data:`LASTING` seconds."""
        with self._lock:
            return self.trouble if time.monotonic() - self._since >= LASTING else None

    def sign(self, *signs: Callable[[], object]) -> None:
        """Give signs to other processes through files of the state folder. They are left out while one hangs."""
        with contextlib.suppress(CallTimedOut):
            self._signs.run(lambda: [sign() for sign in signs])

    def close(self) -> None:
        """End the threads. The store stays open."""
        self._executor.close()
        self._signs.close()
        self._trouble.close()

    # Called in the recorder's thread.

    def _do(self, work: Callable[[], Result]) -> tuple[Result, StateStoreError | None]:
        """Run a function that uses the store; return its result, and why the store still cannot be written."""
        failpoints.point("state.write")
        replaced = self._store.replaced()
        if self._broken or replaced or self._store.copied is not None:
            self._store.reopen()
            self._broken = False
        if replaced:
            self._put_back()
        done = work()
        if self.trouble is not None:
            try:
                self._store.try_write()  # the work may only have read
            except StateStoreError as error:
                return done, error
        return done, None

    def _put_back(self) -> None:
        """Restore served subscriptions after the file was removed or replaced."""
        present = {sub.subid for sub in self._store.subscriptions()}
        for sub in self._known.values():
            if sub.subid not in present:
                self._store.add_subscription(sub)
                self._log(
                    "WARNING",
                    log_text(
                        f'subscription "{sub.name}" was put back into state store "{self._store.path}"',
                        detail="The file was removed or exchanged while pgsub run served it; conflicts and the"
                        " journal that were in it are gone.",
                    ),
                )

    # Called in the callers' threads.

    def _failed(self, error: StateStoreError) -> None:
        clock = time.monotonic()
        before, self.trouble = self.trouble, error
        self._wait = SHORTEST if before is None else min(2 * self._wait, LONGEST)
        self._again = clock + self._wait
        if before is None:
            self._since = clock
        self.sign(partial(self._trouble.set, error.message))
        if before is None or before.message != error.message:
            goes_on = "Replication continues; status shows what was recorded before."
            detail = f"{goes_on} {error.detail}" if error.detail else goes_on
            self._log("ERROR", log_text(error.message, detail=detail, context=error.context, hint=error.hint))

    def _works(self) -> None:
        if self.trouble is not None:
            self.trouble, seconds = None, time.monotonic() - self._since
            self._trouble.clear()
            self._log("LOG", log_text(f'state store "{self._store.path}" can be used again, after {seconds:.0f} s'))


def failed(recorder: Recorder, ended: PgsubError | None) -> PgsubError | None:
    """Return the error that a bounded run ends with. A failure to record has priority over a timeout."""
    trouble = recorder.trouble
    return trouble if trouble is not None and (ended is None or ended.exit_code == 8) else ended
