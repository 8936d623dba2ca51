"""A run of a switchover that undoes everything if it fails before the target has taken the right to write."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.switchover.parties import SwitchoverOptions, giving_ledger
from pgsub.commands.switchover.transfer.undo import Undoing
from pgsub.commands.switchover.under_way import TargetLagged
from pgsub.common.errors import PgsubError, TimeoutExpired
from pgsub.common.subscription import Subscription
from pgsub.switchover import journal
from pgsub.switchover.journal import Entry


def not_undone(command: str) -> tuple[str, str, str]:
    """Return the warning, with detail and hint, about an interrupted switchover that was not undone.

    :param command: of the switchover.
    """
    return (
        "the switchover was interrupted, and was not undone",
        "A server is away, or the undoing was interrupted, too. Clients may be able to write nowhere.",
        f"Leave everything as it was:\n{command} --abort",
    )


class Undoable:
    """The parties of a run, with a session on each side.

    :param sub: the ending subscription. ``back`` is the reverse one.
    :param taking: a session on the target of ``sub``.
    :param giving: a session on the target of ``back``.
    """

    def __init__(
        self,
        options: SwitchoverOptions,
        store: StateStore,
        sub: Subscription,
        back: Subscription,
        taking: psycopg.Connection,
        giving: psycopg.Connection,
        reporter: Reporter,
    ) -> None:
        self._options = options
        self._store = store
        self._sub = sub
        self._back = back
        self._taking = taking
        self._giving = giving
        self._reporter = reporter
        self._kept = [giving.info.backend_pid]
        self._kept_there = [taking.info.backend_pid]
        self.in_pause: bool | None = None  #: clients can write nowhere; None if unknown

    @property
    def giving_is_lost(self) -> bool:
        """Whether the session on the giving side was lost."""
        return self._giving.broken

    @contextlib.contextmanager
    def _or_back(self, entry: Entry) -> Iterator[None]:
        """Undo everything if the block fails, unless the right was taken in it."""
        try:
            yield
        except KeyboardInterrupt as error:
            try:
                taken = self._go_back(entry, error)
            except (PgsubError, psycopg.Error, KeyboardInterrupt):
                self._reporter.warning(*not_undone(self._options.command))
                # guard: what a user has interrupted does not go on, because a server is away
                raise error from None
            if not taken:
                raise
        except BaseException as error:
            # guard: a failure in the pause ends the pause
            if not self._go_back(entry, error):
                raise

    def _go_back(self, entry: Entry, error: BaseException) -> bool:
        """Undo everything, with a new session if one is lost.

        :return: whether the right was taken, so that the error does not matter.
        """
        if isinstance(error, TargetLagged):
            return False
        with contextlib.ExitStack() as stack:
            if self._phase(entry) is None:
                self._giving = stack.enter_context(giving_ledger(self._options, self._store, self._back))
            phase = self._phase(entry)
            # guard: what was taken is not released, even by a publisher that has lost the commit that gave it
            if self._has_taken(entry):
                return True
            if phase == journal.GIVEN:
                cut_off = self._taking.broken or self._giving.broken
                if isinstance(error, Exception) and not isinstance(error, TimeoutExpired) and cut_off:
                    return False  # another run takes it
            elif phase not in (None, journal.OPEN, journal.FENCED):
                return False
            ended = "was interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            self.undo(entry)
            self._reporter.warning(
                f"the switchover {ended} before the target had taken the right to write: everything is left as it was"
            )
        return False

    def undo(self, entry: Entry) -> None:
        """Undo everything: lift the fences and remove the reverse subscription.

        :raises StateForbids: the taking side has taken the right.
        """
        undoing = Undoing(
            self._options,
            self._store,
            self._sub,
            self._back,
            self._taking,
            self._giving,
            self._reporter,
            keep=self._kept,
            keep_there=self._kept_there,
        )
        undoing.release(entry)
        self.in_pause = False
        undoing.remove(entry)

    def _has_taken(self, entry: Entry) -> bool:
        """Return whether the taking side is known to have taken the right."""
        with contextlib.suppress(psycopg.Error):
            here = journal.of(self._taking, entry.id)
            return here is not None and here.phase in journal.HAS_TAKEN
        return False

    def _phase(self, entry: Entry) -> str | None:
        """Return the phase of the giving side, None if it is unknown."""
        with contextlib.suppress(psycopg.Error):
            found = journal.of(self._giving, entry.id)
            return None if found is None else found.phase
        return None
