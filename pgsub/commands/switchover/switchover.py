"""``pgsub switchover``: moves the right to write to the target and reverses replication. ``--back`` switches back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator

import psycopg

from pgsub.apply.verified_publisher import recorded_database
from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.signals import undone_by_signals
from pgsub.commands.subscription.definition import new_subid
from pgsub.commands.switchover import comparison
from pgsub.commands.switchover.inner_reporter import InnerReporter
from pgsub.commands.switchover.obstacles.obstacle import seen_backward
from pgsub.commands.switchover.outcome import DONE, Outcome
from pgsub.commands.switchover.parties import (
    PUBLISHER,
    TARGET,
    SwitchoverOptions,
    giving_ledger,
    giving_session,
    publisher_away,
    taking_session,
    the_one,
)
from pgsub.commands.switchover.transfer import giving_fence, right_to_write, server_gone, steps, way_back_subscription
from pgsub.commands.switchover.transfer.pause_comparison import PauseComparison
from pgsub.commands.switchover.transfer.right_to_write import Timing
from pgsub.commands.switchover.transfer.turn import Turn
from pgsub.commands.switchover.under_way import TargetLagged, check_command, check_promote_command, under_way
from pgsub.commands.verify.apply_to_point import served
from pgsub.commands.verify.verify import VerifyOptions, verify
from pgsub.common.errors import (
    LedgerLost,
    LockHeld,
    PgsubError,
    PublisherUnavailable,
    StateForbids,
    SubscriptionExists,
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
_SAME_PUBLISHER = """
SELECT o.subname FROM pgsub.subscription s JOIN pgsub.subscription o USING (system_identifier, publisher_dboid)
 WHERE s.subid = %(subid)s AND o.subid <> s.subid ORDER BY 1
"""


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
            time.sleep(0.3)


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

    @contextlib.contextmanager
    def _taking_session(self) -> Iterator[psycopg.Connection]:
        with contextlib.ExitStack() as stack:
            try:
                session = stack.enter_context(taking_session(self._store, self._sub))
            except LedgerLost:
                if self._store.way_back_of(self._sub.subid) is None:
                    raise
                raise _with_hint(TargetLagged(), self._options) from None
            except TargetReplaced as error:
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
        if entry is None:
            entry = self._begin()
        elif entry.phase == journal.PLANNED:
            self._compare()
        check_command(entry, self._options)
        check_promote_command(entry, self._options)
        back = self._way_back(entry)
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
            raise _no_way_back(
                entry, f"If none is wanted, and the publisher is gone:\n{self._options.command} --gone {PUBLISHER}"
            )
        self._turn(back, timing).run(entry)
        if back is not None and not lost:
            return self._done(back, timing, None)
        said = "The publisher is gone, and nothing leads back. If it is found again, it lacks what clients write now."
        return Outcome(self._sub.name, entry.back_name, DONE, None, journal.DONE, steps=timing.steps, said=said)

    def _turn(self, back: Subscription | None, timing: Timing, kept: Collection[int] = ()) -> Turn:
        return Turn(self._options, self._store, self._sub, back, self._taking, self._reporter, timing, kept)

    def _done(self, back: Subscription, timing: Timing, look: PauseComparison | None) -> Outcome:
        done = Outcome(self._sub.name, back.name, DONE, journal.GIVEN, journal.DONE, timing.pause, timing.steps)
        found = None if look is None else look.found
        done.said = comparison.report(found, back.name, self._options)
        done.equal = comparison.equal(found, self._options)
        return done

    def _cannot_go_on(self, entry: Entry | None) -> StateForbids:
        options = self._options
        if entry is None:
            return StateForbids(f'no switchover of subscription "{self._sub.name}" is under way')
        return StateForbids(
            f"the switchover cannot continue without the {options.gone}: the target has not taken the right to write",
            hint=f"Leave the other server as it was:\n{options.command} --abort --gone {options.gone}",
        )

    def _way_back(self, entry: Entry) -> Subscription:
        """Return the reverse subscription. Create it if necessary.

        Its number is recorded first, so that a subscription that others create meanwhile is never used.

        :raises StateForbids: the reverse subscription was dropped or renamed.
        :raises SubscriptionExists: another subscription has its name. The switchover is undone.
        """
        there = self._store.way_back_of(entry.subid)
        if there is not None and there.name == entry.back_name:
            return there
        if there is not None or entry.phase != journal.PLANNED:
            raise _no_way_back(entry)
        try:
            self._check_name()
            subid = new_subid()
            right_to_write.name_way_back(self._taking, entry, subid)
            with giving_session(self._options, self._sub) as giving:
                made = way_back_subscription.way_back(self._options, self._sub, giving, self._taking, subid)
            reporter = InnerReporter(self._reporter, backward=True, said=self._warned)
            with seen_backward():
                return way_back_subscription.created(made, self._store, reporter)
        except BaseException:
            right_to_write.decline(self._taking, entry)
            raise

    def _check_name(self) -> None:
        """Check that the reverse subscription's name is free."""
        name = self._options.names[1]
        if self._store.find(name) is not None:
            raise SubscriptionExists(
                f'subscription "{name}" already exists',
                detail="The subscription that leads back would have this name.",
                hint=f"Rename it:\npgsub alter {word(name)} --rename-to NEW",
            )

    def _begin(self) -> Entry:
        """Check everything, compare the tables, and write the first row of the journal."""
        sub, options = self._sub, self._options
        if not sub.enabled:
            raise StateForbids(
                f'subscription "{sub.name}" is disabled', hint=f"Enable it:\npgsub enable {word(sub.name)}"
            )
        self._check_name()
        check_only(self._taking, sub)
        self._look_around()
        self._compare()
        return right_to_write.plan(self._taking, sub, options.names[1], options.way)

    def _compare(self) -> None:
        """Compare all tables if requested."""
        if self._options.verify:
            asked = VerifyOptions(self._sub.name, self._options.state_dir)
            comparison.check(verify(asked, reporter=self._reporter), self._options)

    def _look_around(self) -> None:
        """Warn of differences after the switchover, and refuse if there are obstacles."""
        seen = way_back_subscription.obstacles(self._options, self._sub, self._taking)
        way_back_subscription.check(seen, self._options)
        for one in seen:
            self._warned.add(one.message)
            self._reporter.warning(one.message, one.detail, one.hint)


def _undone(options: SwitchoverOptions) -> StateForbids:
    return StateForbids(
        "the switchover that was under way has been undone: everything is as it was before",
        hint=f"To begin anew:\n{options.command}",
    )


def _no_way_back(entry: Entry, more: str = "") -> StateForbids:
    # A new one would begin after the clients' writes.
    hint = "Without it what clients write on the target has no way back. Rename it back if it is there."
    return StateForbids(
        f'subscription "{entry.back_name}", which is to lead back, is not the one that was made',
        detail="It was dropped or renamed while the switchover was under way.",
        hint=f"{hint}\n{more}".strip(),
    )


def check_only(taking: psycopg.Connection, sub: Subscription) -> None:
    """Check that no other subscription of this target has the same publisher database: writes move as a whole."""
    others = [row[0] for row in taking.execute(_SAME_PUBLISHER, {"subid": sub.subid}).fetchall()]
    if others:
        raise StateForbids(
            f"the writes of a database can only be moved with one subscription, and there are {len(others) + 1}",
            detail=f"These follow the same database of the publisher: {', '.join(others)}.",
            hint="Clients write to a database as a whole. Subscribe to all its tables with one subscription, and drop"
            " the others.",
        )
