"""``pgsub alter --hold`` and ``--release``: keep the changes of some tables while others continue. Not in the server.

Both change the ledger. A running worker obeys from its next transaction on, a failing one at its next attempt, and none
need be running.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.alter.options import AlterOptions
from pgsub.commands.refresh.given_table_names import named
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import ledger_session
from pgsub.common.errors import StateForbids, TimeoutExpired, UsageError, log_text
from pgsub.common.plural import counted
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.launcher.mirror import held_stats
from pgsub.target.ledger import events, subscriptions
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.ledger.tables import held_tables, states, subscription_tables

_BUSY = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)


def hold(options: AlterOptions, store: StateStore, sub: Subscription, reporter: Reporter) -> None:
    """Hold and release the named tables, all or none.

    :raises StateForbids: a table is not subscribed, is still being synchronized, or is not held.
    :raises TimeoutExpired: apply was in one transaction all the time. Nothing was changed.
    """
    opened = ledger_session(store, sub, reporter, options.deadline)
    with opened as session, subscription_tables.maintenance(session, sub.subid, sub.name):
        relations = subscriptions.relations(session, sub.subid)
        holds = [named(session, text, relations) for text in dict.fromkeys(options.hold)]
        releases = [named(session, text, relations) for text in dict.fromkeys(options.release)]
        before = {one.srrelid: one for one in held_tables.overview(session, sub.subid)}
        _check(sub, holds, releases, before.keys())

        def change() -> None:
            held_tables.hold(session, sub.subid, [one.srrelid for one in holds])
            held_tables.release(session, sub.subid, [one.srrelid for one in releases])
            said = [(one, "is held: its changes are kept") for one in holds]
            said += [(one, "is released: its kept changes are applied") for one in releases]
            texts = [log_text(f'table "{_name(one)}" of subscription "{sub.name}" {what}') for one, what in said]
            events.add(session, sub.subid, *(events.log_entry("LOG", text) for text in texts))

        _decide(session, sub, change, options.deadline, reporter)
        rows = held_stats.rows(relations, held_tables.overview(session, sub.subid))
    with store.batch():
        store.put_held(sub.subid, rows)
        for action, tables in (("hold", holds), ("release", releases)):
            if tables:
                store.journal(action, sub.subid, sub.name, {"tables": [_name(one) for one in tables]})
    for one in holds:
        reporter.warning(
            f'table "{_name(one)}" is held: transactions that change it and others are no longer applied as a whole',
            detail="Its changes are kept in schema pgsub of the target, which grows by them, and the other tables go"
            " on; until it is released the target shows states that the publisher never had.",
            hint=f"To apply its changes:\npgsub alter {word(sub.name)} --release {word(_name(one))}",
        )
    for one in releases:
        kept = counted(before[one.srrelid].changes, "kept change", ("is", "are"))
        reporter.notice(f'table "{_name(one)}" is released: {kept} applied before any newer one of it')
    if not sub.enabled:
        reporter.notice(f"nothing is applied until the subscription is enabled: pgsub enable {word(sub.name)}")


def _name(one: RelationState) -> str:
    return f"{one.schemaname}.{one.relname}"


def _check(
    sub: Subscription, holds: Sequence[RelationState], releases: Sequence[RelationState], known: Collection[int]
) -> None:
    for one in holds:
        if one in releases:
            raise UsageError(f'table "{_name(one)}" cannot be held and released at once')
        if one.srsubstate not in "rs":
            raise StateForbids(
                f'table "{_name(one)}" cannot be held while it is being synchronized',
                detail=f"Its state is {one.srsubstate}; until it is r, an error of it stops no other table.",
                hint=f"Wait for it:\npgsub wait {word(sub.name)} --for synced",
                sqlstate="55000",
            )
    for one in releases:
        if one.srrelid not in known:
            raise StateForbids(
                f'table "{_name(one)}" is not held',
                hint=f"See which tables are:\npgsub status {word(sub.name)} --view pgsub_held_table",
                sqlstate="55000",
            )


def _decide(
    session: psycopg.Connection,
    sub: Subscription,
    change: Callable[[], None],
    deadline: float | None,
    reporter: Reporter,
) -> None:
    """Make the change while holding the lock on apply's row, which apply holds during a transaction."""
    waiting = False
    while True:
        with contextlib.suppress(*_BUSY):
            with states.changing(session, sub.subid):
                change()
            return
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutExpired(
                "timeout while waiting for the end of a transaction that is being applied",
                detail="Which changes are kept is decided between transactions; nothing was changed.",
                hint=f"See what apply does, and try again later:\npgsub status {word(sub.name)}",
            )
        if not waiting:
            reporter.notice("waiting for the end of a transaction that is being applied")
            waiting = True
