"""``pgsub switchover --abort``: restores the former state, until the target has taken the right to write.

A target that has lost this since, or is gone for good, has the right no more.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

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
from pgsub.commands.switchover.transfer import giving_fence, right_to_write, server_gone
from pgsub.commands.switchover.transfer.turn import end_subscription
from pgsub.commands.switchover.transfer.undo import Undoing, warn_of_sequences
from pgsub.commands.switchover.under_way import check_command, under_way
from pgsub.common.errors import LedgerLost, PublisherUnavailable, StateForbids, TargetReplaced, TargetUnavailable
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.switchover import journal
from pgsub.target.session.transactions import durable


def abort(options: SwitchoverOptions, *, reporter: Reporter) -> Outcome:
    """Restore the state from before an unfinished switchover. Do nothing if there is none.

    :raises StateForbids: clients may already write on the target, or a server that was declared gone answers.
    :raises TargetUnavailable: run the command again for the rest.
    """
    with undone_by_signals(), StateStore.open(options.state_dir, create=False) as store:
        if (back := _drop_forgotten(options, store, reporter)) is not None:
            return Outcome(*options.names, AS_BEFORE, said=_anew(options, store, back))
        if (undone := _undo_lost(options, store, reporter)) is not None:
            return undone
        sub = the_one(store, options)
        with contextlib.ExitStack() as stack:
            back = store.find(options.names[1])
            if options.gone == TARGET:
                if back is None:
                    server_gone.check_gone(options, sub, None, None, reporter)
                    return Outcome(sub.name, options.names[1], AS_BEFORE)
                return _without_taking(options, store, sub, back, reporter)
            try:
                taking = stack.enter_context(taking_session(store, sub))
            except TargetUnavailable:
                if back is None:
                    raise
                return _without_taking(options, store, sub, back, reporter)
            entry = under_way(taking, sub, store)
            if entry is None:
                with (
                    contextlib.suppress(TargetUnavailable, PublisherUnavailable),
                    server_gone.returned(options, store, sub, taking) as back_again,
                ):
                    if back_again is not None:
                        server_gone.reopen(options, sub, *back_again, taking)
                return Outcome(sub.name, options.names[1], AS_BEFORE)
            check_command(entry, options, abort=True)
            if entry.phase in journal.HAS_TAKEN:
                raise _too_late(options)
            if options.gone == PUBLISHER:
                server_gone.decline(options, store, sub, entry, taking, reporter)
                return Outcome(sub.name, options.names[1], AS_BEFORE, None, journal.DECLINED)
            back = store.way_back_of(entry.subid)
            if back is None:
                right_to_write.decline(taking, entry)
            else:
                with giving_ledger(options, store, back) as giving:
                    keep, keep_there = [giving.info.backend_pid], [taking.info.backend_pid]
                    Undoing(options, store, sub, back, taking, giving, reporter, keep, keep_there).run(entry)
    return Outcome(sub.name, options.names[1], AS_BEFORE, journal.RELEASED, journal.DECLINED)


def _undo_lost(options: SwitchoverOptions, store: StateStore, reporter: Reporter) -> Outcome | None:
    """Undo a switchover whose ending subscription is not on the taking side: it was dropped, or lost with the ledger.

    :return: None if the taking side has lost nothing, and is not gone for good.
    :raises TargetUnavailable: it cannot be reached.
    """
    back = _without_ending(options, store)
    if back is None or not (options.gone == TARGET or _is_to_undo(options, store, back)):
        return None
    with contextlib.ExitStack() as stack:
        giving = stack.enter_context(ledger_session(store, back))
        there = journal.of_subscription(giving, journal.GIVING, back.subid)
        if there is None:
            return None
        check_command(there, options, abort=True)
        journal.check_alone(giving, there.id)
        taking = None
        if options.gone == TARGET:
            lost = server_gone.Lost(recorded_database(giving, back.subid), there.id)
            server_gone.check_gone(options, None, back, lost, reporter)
        else:
            with target_asked(options):
                taking = stack.enter_context(session_on_publisher(options, back, giving))
        kept = [] if taking is None else [taking.info.backend_pid]
        undoing = Undoing(options, store, None, back, taking, giving, reporter, keep_there=kept)
        undoing.run(replace(there, side=journal.TAKING, phase=journal.LOST))
    if taking is None:
        return Outcome(*options.names, AS_BEFORE, journal.RELEASED, said="Clients write on the publisher.")
    return Outcome(
        *options.names, AS_BEFORE, journal.RELEASED, journal.DECLINED, said=_anew(options, store, back, lost=True)
    )


def _without_ending(options: SwitchoverOptions, store: StateStore) -> Subscription | None:
    """Return the reverse subscription if the ending one is not on the taking side, otherwise None."""
    if (ended := ended_way_back(store, options)) is not None:
        return ended
    sub, back = map(store.find, options.names)
    if sub is None or back is None or back.way_back_of != sub.subid or options.gone == TARGET:
        return None
    try:
        with ledger_session(store, sub):
            return None
    except TargetUnavailable:
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


def _without_taking(
    options: SwitchoverOptions, store: StateStore, sub: Subscription, back: Subscription, reporter: Reporter
) -> Outcome:
    """Let clients write on the giving side again although the taking side cannot be reached, or is gone for good."""
    is_gone = options.gone == TARGET
    with ledger_session(store, back) as giving:
        entry = journal.of_subscription(giving, journal.GIVING, back.subid)
        if entry is None or back.way_back_of != sub.subid:
            raise StateForbids(f'no switchover of subscription "{sub.name}" is under way')
        check_command(entry, options, abort=True)
        if is_gone:
            lost = server_gone.Lost(recorded_database(giving, back.subid), entry.id)
            server_gone.check_gone(options, sub, back, lost, reporter)
            end_subscription(options, store, back.name, reporter)  # it may still apply what it has received
            warn_of_sequences(giving, back, entry, reporter)
        right_to_write.release(entry, giving, None, right_to_write.commands(options, sub, back), taking_is_gone=is_gone)
        if is_gone:
            with durable(giving):
                journal.move(giving, entry.id, (journal.RELEASING, journal.RELEASED), journal.RELEASED)
    if is_gone:
        server_gone.drop_without_target(options, sub, back, reporter)
        return Outcome(sub.name, back.name, AS_BEFORE, journal.RELEASED, None)
    reporter.warning(
        "the target cannot be reached: what was made there for the way back stays",
        hint=f"Run this again when it can:\n{options.command} --abort\n"
        f"If the target is gone for good:\n{options.command} --abort --gone {TARGET}",
    )
    return Outcome(sub.name, back.name, AS_BEFORE, journal.RELEASING, None)
