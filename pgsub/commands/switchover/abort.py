"""``pgsub switchover --abort``: restores the former state, until the target has taken the right to write.

A target that has lost this since, or is gone for good, has the right no more.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import psycopg

from pgsub.apply.verified_publisher import recorded_database
from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import ledger_session
from pgsub.commands.signals import undone_by_signals
from pgsub.commands.subscription import lost_switchover
from pgsub.commands.subscription.drop import drop
from pgsub.commands.switchover.inner_reporter import InnerReporter
from pgsub.commands.switchover.outcome import AS_BEFORE, Outcome
from pgsub.commands.switchover.parties import (
    PUBLISHER,
    TARGET,
    SwitchoverOptions,
    ended_way_back,
    giving_ledger,
    session_on_publisher,
    taking_session,
    target_asked,
    the_one,
)
from pgsub.commands.switchover.transfer import giving_fence, right_to_write, server_gone, way_back_subscription
from pgsub.commands.switchover.transfer.undo import Undoing
from pgsub.commands.switchover.under_way import check_command, under_way
from pgsub.common.errors import (
    LedgerLost,
    PublisherUnavailable,
    StateForbids,
    SwitchedOver,
    TargetReplaced,
    TargetUnavailable,
)
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.switchover import journal
from pgsub.switchover.journal import Entry


def abort(options: SwitchoverOptions, *, reporter: Reporter) -> Outcome:
    """Restore the state from before an unfinished switchover. Do nothing if there is none.

    :raises StateForbids: clients may already write on the target, or a server that was declared gone answers.
    :raises TargetUnavailable: run the command again for the rest.
    """
    with undone_by_signals(), StateStore.open(options.state_dir, create=False) as store:
        if (back := _drop_forgotten(options, store, reporter)) is not None:
            return Outcome(*options.names, AS_BEFORE, said=_anew(options, store, back))
        if options.gone == TARGET:
            return _undo_without_target(options, store, reporter)
        return _undo_lost(options, store, reporter) or _undo(options, store, reporter)


def _undo(options: SwitchoverOptions, store: StateStore, reporter: Reporter) -> Outcome:
    """Undo a switchover whose ending subscription is there."""
    sub = the_one(store, options)
    back = store.way_back_of(sub.subid)
    with contextlib.ExitStack() as stack:
        try:
            taking = stack.enter_context(taking_session(store, sub))
        except TargetUnavailable:
            if back is None:
                raise
            return _let_write(options, store, sub, back, reporter)
        except SwitchedOver:
            if back is None:
                raise
            raise _too_late(options) from None
        entry = under_way(taking, sub, store)
        if entry is None:
            _reopen_returned(options, store, sub, taking)
            return Outcome(*options.names, AS_BEFORE)
        check_command(entry, options, abort=True)
        if entry.phase in journal.HAS_TAKEN:
            raise _too_late(options)
        if options.gone == PUBLISHER:
            server_gone.decline(options, store, sub, entry, taking, reporter)
            return Outcome(*options.names, AS_BEFORE, None, journal.DECLINED)
        if back is None:
            way_back_subscription.remove_interrupted(options, store, sub, entry, reporter)
            right_to_write.decline(taking, entry)
            # guard: a publisher stays closed to clients only if that is told
            if not _reopen_returned(options, store, sub, taking) and entry.phase == journal.PREPARED:
                _warn_of_publisher(options, reporter)
            return Outcome(*options.names, AS_BEFORE, None, journal.DECLINED)
        try:
            giving = stack.enter_context(giving_ledger(options, store, back))
        except (LedgerLost, TargetReplaced):
            server_gone.give_up_publisher(options, sub, back, entry, taking, reporter)
            return Outcome(*options.names, AS_BEFORE, None, journal.DECLINED)
        keep, keep_there = [giving.info.backend_pid], [taking.info.backend_pid]
        Undoing(options, store, sub, back, taking, giving, reporter, keep, keep_there).run(entry)
    return Outcome(*options.names, AS_BEFORE, journal.RELEASED, journal.DECLINED)


def _reopen_returned(
    options: SwitchoverOptions, store: StateStore, sub: Subscription, taking: psycopg.Connection
) -> bool:
    """Let clients write on a publisher whose reverse subscription this state store does not have any more.

    :return: False if the publisher cannot be reached.
    """
    with (
        contextlib.suppress(TargetUnavailable, PublisherUnavailable),
        server_gone.returned(options, store, sub, taking) as back_again,
    ):
        if back_again is not None:
            server_gone.reopen(options, sub, *back_again, taking)
        return True
    return False


def _warn_of_publisher(options: SwitchoverOptions, reporter: Reporter) -> None:
    reporter.warning(
        "the publisher cannot be reached, and may keep clients from writing",
        hint=f"Run this again when it can:\n{options.command} --abort",
    )


def _let_write(
    options: SwitchoverOptions, store: StateStore, sub: Subscription, back: Subscription, reporter: Reporter
) -> Outcome:
    """Let clients write on the giving side again although the taking side cannot be reached."""
    with ledger_session(store, back) as giving:
        there = _row(options, giving, back)
        check_command(there, options, abort=True)
        Undoing(options, store, sub, back, None, giving, reporter).release(there)
    reporter.warning(
        "the target cannot be reached: what was made there for the way back stays",
        hint=f"Run this again when it can:\n{options.command} --abort\n"
        f"If the target is gone for good:\n{options.command} --abort --gone {TARGET}",
    )
    return Outcome(*options.names, AS_BEFORE, journal.RELEASING)


def _undo_without_target(options: SwitchoverOptions, store: StateStore, reporter: Reporter) -> Outcome:
    """Undo a switchover, also one that has ended, whose taking side is gone for good."""
    back, sub = ended_way_back(store, options), None
    if back is None:
        sub = the_one(store, options)
        back = store.way_back_of(sub.subid)
    if back is None:  # an earlier run may have dropped it
        server_gone.check_gone(options, sub, None, None, reporter)
    else:
        with ledger_session(store, back) as giving:
            there = _row(options, giving, back)
            check_command(there, options, abort=True)
            journal.check_alone(giving, there.id)
            lost = server_gone.Lost(recorded_database(giving, back.subid), there.id)
            server_gone.check_gone(options, sub, back, lost, reporter)
            Undoing(options, store, sub, back, None, giving, reporter).run(_lost(there))
    if sub is not None:
        reporter.warning(
            f'subscription "{sub.name}" remains, and its slot keeps WAL on the publisher',
            hint=f"To drop both:\npgsub drop {word(sub.name)} --keep-target --yes",
        )
    done = None if back is None else journal.RELEASED
    return Outcome(*options.names, AS_BEFORE, done, said=None if back is None else "Clients write on the publisher.")


def _undo_lost(options: SwitchoverOptions, store: StateStore, reporter: Reporter) -> Outcome | None:
    """Undo a switchover whose ending subscription is not on the taking side: it was dropped, or lost with the ledger.

    :return: None if the taking side has lost nothing.
    :raises TargetUnavailable: it cannot be reached.
    """
    back = _without_ending(options, store)
    if back is None or not _is_to_undo(options, store, back):
        return None
    with contextlib.ExitStack() as stack:
        giving = stack.enter_context(ledger_session(store, back))
        there = _row(options, giving, back)
        check_command(there, options, abort=True)
        journal.check_alone(giving, there.id)
        with target_asked(options):
            taking = stack.enter_context(session_on_publisher(options, back, giving))
        undoing = Undoing(options, store, None, back, taking, giving, reporter, keep_there=[taking.info.backend_pid])
        undoing.run(_lost(there))
    said = _anew(options, store, back, lost=True)
    return Outcome(*options.names, AS_BEFORE, journal.RELEASED, journal.DECLINED, said=said)


def _row(options: SwitchoverOptions, giving: psycopg.Connection, back: Subscription) -> Entry:
    """Return the row of the giving side.

    :raises StateForbids: it has none.
    """
    there = journal.of_subscription(giving, journal.GIVING, back.subid)
    if there is None:
        raise StateForbids(f'no switchover of subscription "{options.name}" is under way')
    return there


def _lost(there: Entry) -> Entry:
    """Return the row of a taking side that has lost it."""
    return replace(there, side=journal.TAKING, phase=journal.LOST)


def _without_ending(options: SwitchoverOptions, store: StateStore) -> Subscription | None:
    """Return the reverse subscription if the ending one is not on the taking side, otherwise None."""
    if (ended := ended_way_back(store, options)) is not None:
        return ended
    sub, back = map(store.find, options.names)
    if sub is None or back is None or back.way_back_of != sub.subid:
        return None
    try:
        with ledger_session(store, sub):
            return None
    except (TargetUnavailable, SwitchedOver):
        return None
    except (LedgerLost, TargetReplaced):
        return back


def _anew(options: SwitchoverOptions, store: StateStore, back: Subscription, *, lost: bool = False) -> str | None:
    """Return what is left to do for the ending subscription, if there is no other one of its name.

    :param lost: the target has lost it, if it is still defined here.
    """
    active, _ = options.names
    sub, name = store.find(active), word(active)
    if sub is None:
        return f"Clients write on the publisher. Create subscription {name} again, with --adopt."
    if sub.subid != back.way_back_of or not lost:
        return None
    return (
        f"Clients write on the publisher. Drop subscription {name}, which the target has lost. Create subscription"
        f" {name} again, with --adopt."
    )


def _is_to_undo(options: SwitchoverOptions, store: StateStore, back: Subscription) -> bool:
    """Return whether the taking side has lost the switchover.

    :raises TargetUnavailable: it cannot be reached.
    """
    with giving_fence.recognized(options, back), ledger_session(store, back) as giving, target_asked(options):
        found = lost_switchover.found(giving, store, back)
    return found is not None and (found.undone or found.lost == journal.TAKING)


def _drop_forgotten(options: SwitchoverOptions, store: StateStore, reporter: Reporter) -> Subscription | None:
    """Drop the reverse subscription if an earlier abort has ended after the giving side had forgotten it.

    :return: it, None if nothing was dropped.
    """
    back = store.find(options.names[1])
    if back is None or back.way_back_of is None or not giving_fence.is_forgotten(back):
        return None
    giving_fence.end_forgotten(back)
    quiet = InnerReporter(reporter, backward=True)
    drop(options.state_dir, back.name, if_exists=True, keep_slot=True, reporter=quiet)
    return back


def _too_late(options: SwitchoverOptions) -> StateForbids:
    if options.gone == PUBLISHER:
        hint = f"Let it finish:\n{options.command} --gone {PUBLISHER}"
    else:
        back = f"pgsub switchover {word(options.name)}{'' if options.back else ' --back'}"
        hint = f"Let it finish, then go back:\n{options.command}\n{back}"
    return StateForbids("the switchover can no longer be aborted: clients may write on the target", hint=hint)
