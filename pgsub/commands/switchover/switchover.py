"""``pgsub switchover``: moves the right to write to the target and reverses replication. ``--back`` switches back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator

import psycopg

from pgsub.apply.verified_publisher import recorded_database
from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.serve.apply_to_point import served
from pgsub.commands.signals import undone_by_signals
from pgsub.commands.subscription.drop import drop
from pgsub.commands.switchover import comparison
from pgsub.commands.switchover.beginning import Beginning, no_way_back
from pgsub.commands.switchover.inner_reporter import InnerReporter
from pgsub.commands.switchover.outcome import DONE, Outcome
from pgsub.commands.switchover.parties import (
    PUBLISHER,
    TARGET,
    SwitchoverOptions,
    giving_ledger,
    publisher_away,
    taking_session,
    the_one,
)
from pgsub.commands.switchover.transfer import giving_fence, server_gone, steps, undoable
from pgsub.commands.switchover.transfer.pause_comparison import PauseComparison
from pgsub.commands.switchover.transfer.right_to_write import Timing
from pgsub.commands.switchover.transfer.turn import Turn
from pgsub.commands.switchover.under_way import TargetLagged, check_command, check_promote_command, under_way
from pgsub.common.errors import (
    LedgerLost,
    LockHeld,
    PgsubError,
    PublisherUnavailable,
    StateForbids,
    SwitchedOver,
    TargetReplaced,
    TargetUnavailable,
    UsageError,
)
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.switchover import journal
from pgsub.switchover.journal import Entry
from pgsub.target.session import connect as target

#: Seconds after the limit of the pause during which a disconnected run tries to undo the switchover.
AGAIN = 30.0
_NO_WAY_BACK = "The publisher is gone, and nothing leads back. If it is found again, it lacks what clients write now."


def switchover(options: SwitchoverOptions, *, reporter: Reporter) -> Outcome:
    """Move the right to write to the target, or continue an unfinished switchover.

    :raises StateForbids: there are obstacles, or the subscription has already been switched over.
    :raises ApplyError: rows differ.
    :raises TimeoutExpired: the pause would have been too long. Everything is as before.
    :raises TargetUnavailable: a server cannot be reached. If clients cannot write, it is raised after a time limit.
    :raises PgsubError: an error that the same command can continue after.
    """
    if options.gone == TARGET:
        raise UsageError(
            "--gone target goes with --abort",
            hint=f"Return the right to write to the publisher:\n{options.command} --abort --gone target",
        )
    with undone_by_signals(), StateStore.open(options.state_dir, create=False) as store:
        giving_fence.check_ended(options, store)
        return _in_spite_of_lost_connections(options, store, reporter)


def _in_spite_of_lost_connections(options: SwitchoverOptions, store: StateStore, reporter: Reporter) -> Outcome:
    """Repeat runs that lost a connection while clients could write nowhere.

    The journal says where to continue. The next run undoes the switchover if the time is over.
    """
    in_pause, until = False, 0.0
    while True:
        run = _Run(options, store, reporter)
        try:
            return run.begin_or_go_on()
        except (TargetUnavailable, PublisherUnavailable, LockHeld) as error:
            if run.in_pause is not None:
                in_pause = run.in_pause
            # The lock is the previous run's, if its server has not noticed the lost connection yet.
            if not in_pause or (isinstance(error, LockHeld) and not until):
                raise
            if not until:
                reporter.warning(f"{error.message}: trying again, because clients can write nowhere meanwhile")
                until = time.monotonic() + options.limit + AGAIN
            if time.monotonic() > until:
                raise
            _pause(options, reporter)
        except KeyboardInterrupt:
            if until and run.in_pause is None:  # otherwise the run has told what it left
                reporter.warning(*undoable.not_undone(options.command))
            raise


def _pause(options: SwitchoverOptions, reporter: Reporter) -> None:
    """Wait until the next attempt."""
    try:
        time.sleep(0.3)
    except KeyboardInterrupt:
        # guard: who interrupts the attempts reads what is left to do
        reporter.warning(*undoable.not_undone(options.command))
        raise


def _with_hint(error: PgsubError, options: SwitchoverOptions) -> PgsubError:
    """Return the error with a hint on how to continue."""
    if isinstance(error, TargetLagged):
        error.hint = (
            "If clients have not written on the target since, let them write on the publisher again:\n"
            f"{options.command} --abort"
        )
    error.hint = (
        error.hint or f"See where it stands, then let it continue:\n{options.command} --status\n{options.command}"
    )
    return error


class _Run:
    """One run of the command."""

    def __init__(self, options: SwitchoverOptions, store: StateStore, reporter: Reporter) -> None:
        self._options = options
        self._store = store
        self._reporter = reporter
        self._sub: Subscription
        self._taking: psycopg.Connection
        self._steps: steps.Switchover | None = None
        self._warned: set[str] = set()  #: messages of warnings

    @property
    def in_pause(self) -> bool | None:
        """Whether clients may be unable to write anywhere, None if the run did not find out."""
        return None if self._steps is None else self._steps.in_pause

    def begin_or_go_on(self) -> Outcome:
        """Do the rest of the switchover, in new sessions."""
        self._sub = the_one(self._store, self._options)
        try:
            return self._with_session()
        except SwitchedOver:
            back = self._store.way_back_of(self._sub.subid)
            if back is None and self._options.gone != PUBLISHER:
                raise
            return self._drop_definition(back)

    def _with_session(self) -> Outcome:
        with self._taking_session() as self._taking:
            try:
                return self._go_on()
            except psycopg.Error as error:
                failed = target.translate(error, "switch over", user=self._taking.info.user)
                if isinstance(failed, TargetUnavailable) and self._steps is not None and self._steps.giving_is_lost:
                    failed = publisher_away(failed)
                raise _with_hint(failed, self._options) from None
            except PgsubError as error:
                raise _with_hint(error, self._options) from None

    def _drop_definition(self, back: Subscription | None) -> Outcome:
        """Drop the rest of the subscription, which an earlier run has dropped on both servers."""
        drop(self._options.state_dir, self._sub.name, keep_slot=True, reporter=InnerReporter(self._reporter))
        if back is None:
            return Outcome(*self._options.names, DONE, None, journal.DONE, said=_NO_WAY_BACK)
        # guard: a state folder from before the end of a switchover does not say that it leads back
        giving_fence.check_ended(self._options, self._store)
        return self._done(back, Timing(), None)

    @contextlib.contextmanager
    def _taking_session(self) -> Iterator[psycopg.Connection]:
        with contextlib.ExitStack() as stack:
            try:
                session = stack.enter_context(taking_session(self._store, self._sub))
            except LedgerLost:
                if self._store.way_back_of(self._sub.subid) is None:
                    raise
                raise _with_hint(TargetLagged(), self._options) from None
            except (TargetUnavailable, TargetReplaced) as error:
                if self._store.way_back_of(self._sub.subid) is not None:
                    error.hint = f"See where the switchover stands:\n{self._options.command} --status"
                raise
            yield session

    def _go_on(self) -> Outcome:
        entry = under_way(self._taking, self._sub, self._store)
        if entry is not None and entry.phase in journal.HAS_TAKEN:
            return self._end(entry)
        if self._options.gone is not None:
            raise self._cannot_go_on(entry)
        if entry is not None and entry.phase == journal.LOST:
            raise TargetLagged()
        beginning = Beginning(self._options, self._store, self._sub, self._taking, self._reporter, self._warned)
        if entry is None:
            entry = beginning.plan()
        elif entry.phase == journal.PLANNED:
            beginning.compare()
        check_command(entry, self._options)
        check_promote_command(entry, self._options)
        back = beginning.way_back(entry)
        with (
            giving_ledger(self._options, self._store, back) as giving,
            PauseComparison(self._options, self._store, self._sub) as look,
        ):
            run = self._steps = steps.Switchover(
                self._options, self._store, self._sub, back, self._taking, giving, self._reporter, look
            )
            there = journal.of(giving, entry.id)
            if entry.phase == journal.DECLINED or (there is not None and there.phase == journal.RELEASING):
                run.undo(entry)
                raise _undone(self._options)
            if there is not None and there.phase == journal.GIVEN:
                run.take(entry)
            else:
                with served(self._store, self._options.state_dir, self._sub, self._reporter) as check:
                    run.until_taken(entry, check)
            turn = self._turn(back, run.timing, look.pids_there)
            turn.run(entry, promoted=run.warn_of_late, enabled=lambda: look.compare(self._taking))
            return self._done(back, run.timing, look)

    def _end(self, entry: Entry) -> Outcome:
        """Do the rest after the right was taken, which does not need the publisher."""
        check_command(entry, self._options)
        check_promote_command(entry, self._options)
        timing = Timing(log=self._reporter.log)
        back, lost = self._store.way_back_of(entry.subid), self._options.gone == PUBLISHER
        if lost:
            known = server_gone.Lost(recorded_database(self._taking, self._sub.subid), entry.id)
            server_gone.check_gone(self._options, self._sub, back, known, self._reporter)
        elif back is None:
            raise no_way_back(
                entry,
                "If this state folder is older than the switchover, make it again from the ledger:\n"
                f"pgsub run {word(entry.back_name)} --from-target --connection CONNINFO --target CONNINFO\n"
                f"If none is wanted, and the publisher is gone:\n{self._options.command} --gone {PUBLISHER}",
            )
        self._turn(back, timing).run(entry)
        if back is not None and not lost:
            return self._done(back, timing, None)
        names = self._sub.name, entry.back_name
        return Outcome(*names, DONE, None, journal.DONE, steps=timing.steps, said=_NO_WAY_BACK)

    def _turn(self, back: Subscription | None, timing: Timing, kept: Collection[int] = ()) -> Turn:
        return Turn(self._options, self._store, self._sub, back, self._taking, self._reporter, timing, kept)

    def _done(self, back: Subscription, timing: Timing, look: PauseComparison | None) -> Outcome:
        done = Outcome(self._sub.name, back.name, DONE, journal.GIVEN, journal.DONE, timing.pause, timing.steps)
        found = None if look is None else look.found
        done.said = comparison.report(found, back.name, self._options)
        done.equal = comparison.equal(found, self._options)
        if not self._store.subscription(back.name).enabled:
            message = f'subscription "{back.name}", which leads back, is disabled'
            self._reporter.warning(message, None, f"Enable it:\npgsub enable {word(back.name)}")
        return done

    def _cannot_go_on(self, entry: Entry | None) -> StateForbids:
        options = self._options
        if entry is None:
            return StateForbids(f'no switchover of subscription "{self._sub.name}" is under way')
        return StateForbids(
            f"the switchover cannot continue without the {options.gone}: the target has not taken the right to write",
            hint=f"Leave the other server as it was:\n{options.command} --abort --gone {options.gone}",
        )


def _undone(options: SwitchoverOptions) -> StateForbids:
    return StateForbids(
        "the switchover that was under way has been undone: everything is as it was before",
        hint=f"To begin anew:\n{options.command}",
    )
