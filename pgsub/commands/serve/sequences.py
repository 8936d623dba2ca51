"""Synchronizes the sequences of a subscription for a command, and records and reports the result."""

from __future__ import annotations

from collections.abc import Sequence

from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import check_no_switchover, ledger_session, maintenance, verified_publisher
from pgsub.common.errors import TargetSchemaError, log_text
from pgsub.common.subscription import Subscription
from pgsub.launcher.workers.sequence_worker import rows
from pgsub.tablesync.sequences.synchronization import Outcome, bring, failure, look


def synchronize(store: StateStore, sub: Subscription, *, allow_backward: bool = False) -> list[Outcome]:
    """Set the sequences that can be set, and record the state of each.

    A failure is counted like one of the server's sequence synchronization worker.

    :return: the outcome for each sequence.
    :raises PgsubError: a server cannot be reached.
    """
    with ledger_session(store, sub) as session, maintenance(session, store, sub):
        check_no_switchover(session, store, sub)
        with verified_publisher(session, sub, sub.connection) as source:
            found = look(session, source, sub)
        outcomes = bring(session, found, run_as_owner=sub.run_as_owner, allow_backward=allow_backward)
        with store.batch():
            store.put_sequences(sub.subid, rows(outcomes))
            if failure(sub, outcomes, TargetSchemaError) is not None:
                store.add_stats(sub.subid, sync_seq_error_count=1)
            store.journal("refresh", sub.subid, sub.name, {"sequences": [one.shown for one in outcomes if one.moved]})
    return outcomes


def report(sub: Subscription, outcomes: Sequence[Outcome], reporter: Reporter) -> None:
    """Report the outcome for sequences that had no obstacles."""
    free = [one for one in outcomes if one.obstacle is None]
    for one in free:
        if one.busy:
            reporter.warning(f'sequence "{one.shown}" was not set: an open transaction took values of it')
        elif one.problem is not None:
            reporter.warning(one.problem)
        elif one.moved and one.publisher is not None:
            reporter.log("LOG", log_text(f'sequence "{one.shown}" was set to {one.publisher.last_value}'))
        elif one.ahead:
            reporter.notice(f'sequence "{one.shown}" is ahead of the publisher by {one.ahead} and was left as it is')
    moved = sum(one.moved for one in free)
    reporter.notice(f'subscription "{sub.name}": sequences: {moved} set, {len(free) - moved} left as they are')
