"""``pgsub switchover --abort``: restores the former state, until the target has taken the right to write.

A target that has lost this since has the right no more.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.reconcile import lost_switchover
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import ledger_session
from pgsub.commands.signals import undone_by_signals
from pgsub.commands.subscription.drop import drop
from pgsub.commands.switchover.inner_reporter import InnerReporter
from pgsub.commands.switchover.outcome import AS_BEFORE, Outcome
from pgsub.commands.switchover.parties import (
    PUBLISHER,
    TARGET,
    SwitchoverOptions,
    giving_ledger,
    session_on_publisher,
    taking_session,
    the_one,
)
from pgsub.commands.switchover.transfer import giving_fence, right_to_write, server_gone, steps
from pgsub.commands.switchover.transfer.pause_comparison import PauseComparison
from pgsub.commands.switchover.transfer.turn import SEQUENCES, end_subscription
from pgsub.commands.switchover.under_way import check_command, under_way
from pgsub.common import server_words
from pgsub.common.errors import PermissionMissing, PublisherUnavailable, StateForbids, TargetUnavailable
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.publisher.slots import slot_state
from pgsub.switchover import journal, lost_side
from pgsub.switchover.journal import Entry
from pgsub.target.ledger import subscriptions
from pgsub.target.session.transactions import durable


def abort(options: SwitchoverOptions, *, reporter: Reporter) -> Outcome:
    """Restore the state from before an unfinished switchover. Do nothing if there is none.

    :raises StateForbids: clients may already write on the target, or a server that was declared gone answers.
    :raises TargetUnavailable: run the command again for the rest.
    """
    with undone_by_signals(), StateStore.open(options.state_dir, create=False) as store:
        if (undone := _undo_ended(options, store, reporter)) is not None:
            return undone
        sub = the_one(store, options)
        with contextlib.ExitStack() as stack:
            back = store.find(options.names[1])
            if options.gone == TARGET:
                server_gone.check_gone(options, sub, back)
            try:
                taking = stack.enter_context(taking_session(store, sub))
            except TargetUnavailable:
                if back is None and options.gone == TARGET:
                    return Outcome(sub.name, options.names[1], AS_BEFORE)
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
            check_command(entry, options)
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
                    look = PauseComparison(options, store, sub)
                    steps.Switchover(options, store, sub, back, taking, giving, reporter, look).release(entry)
    return Outcome(sub.name, options.names[1], AS_BEFORE, journal.RELEASED, journal.DECLINED)


def _undo_ended(options: SwitchoverOptions, store: StateStore, reporter: Reporter) -> Outcome | None:
    """Undo a switchover that has ended, if the taking side has lost it since: clients can write nowhere then.

    :return: None if it has not.
    """
    active, name = options.names
    back = store.find(name) if store.find(active) is None else None
    if back is None or not _is_to_undo(store, back):
        return None
    with ledger_session(store, back) as giving, session_on_publisher(options, back) as taking:
        there = journal.of_subscription(giving, journal.GIVING, back.subid)
        assert there is not None
        check_command(there, options)
        _keep_out(taking, there, back, reporter)
        end_subscription(options, store, back.name, reporter)
        run_command = right_to_write.commands(options, replace(back, target=back.connection), back)
        known = taking if lost_side.has_journal(taking) else None
        right_to_write.release(there, giving, known, run_command, taking_is_gone=known is None)
        reporter.warning(*SEQUENCES)
        if known is not None and back.way_back_of is not None:
            with durable(known):  # a restored server still has the subscription that has ended
                subscriptions.forget(known, back.way_back_of)
        with durable(giving):
            journal.move(giving, there.id, (journal.RELEASING, journal.RELEASED), journal.RELEASED)
        has_slot = slot_state(taking, back.slot_name or "") is not None
    quiet = InnerReporter(reporter, backward=True)
    drop(options.state_dir, back.name, if_exists=True, keep_slot=not has_slot, reporter=quiet)
    said = f"Clients write on the publisher. Create subscription {word(active)} again, with --adopt."
    return Outcome(*options.names, AS_BEFORE, journal.RELEASED, journal.DECLINED, said=said)


def _keep_out(taking: psycopg.Connection, there: Entry, back: Subscription, reporter: Reporter) -> None:
    try:
        right_to_write.keep_out(taking, there, [taking.info.backend_pid], reporter)
    except psycopg.errors.InsufficientPrivilege as error:
        raise PermissionMissing(
            f"could not decline the right to write on the target: {server_words.said(error).message}",
            hint="Let the subscription that leads back connect with the role that owns schema pgsub there, and repeat"
            f" the command:\npgsub alter {word(back.name)} --connection CONNINFO",
            sqlstate=error.sqlstate,
        ) from None


def _is_to_undo(store: StateStore, back: Subscription) -> bool:
    with giving_fence.recognized(back), ledger_session(store, back) as giving:
        found = lost_switchover.found(giving, store, back)
    return found is not None and (found.undone or found.lost == journal.TAKING)


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
    """Let clients write on the giving side again although the taking side cannot be reached."""
    is_gone = options.gone == TARGET
    with ledger_session(store, back) as giving:
        entry = journal.of_subscription(giving, journal.GIVING, back.subid)
        if entry is None or back.way_back_of != sub.subid:
            raise StateForbids(f'no switchover of subscription "{sub.name}" is under way')
        check_command(entry, options)
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
