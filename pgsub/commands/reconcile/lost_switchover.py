"""Keeps a way back from making a publisher equal to a target that has lost what clients wrote."""

from __future__ import annotations

import contextlib

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.sessions import connect_publisher, ledger_session
from pgsub.common.errors import StateForbids
from pgsub.common.quoting import word
from pgsub.common.subscription import BACK_SUFFIX, Subscription
from pgsub.switchover import journal
from pgsub.switchover.journal import Entry


def check(session: psycopg.Connection, store: StateStore, sub: Subscription) -> None:
    """Check that the switchover that made a subscription is not lost on the server that took the right to write.

    :param session: a session on the subscription's target, which gave the right.
    :raises StateForbids: only this target may still have what clients wrote.
    """
    there = None if sub.way_back_of is None else journal.of_subscription(session, journal.GIVING, sub.subid)
    if there is None or there.phase != journal.GIVEN:
        return
    ended = None if sub.way_back_of is None else store.subscription_by_id(sub.way_back_of)
    # guard: a target that has lost the switchover does not overwrite the publisher
    if _is_lost(store, sub, ended, there):
        name = there.subname if ended is None else ended.name
        raise StateForbids(
            f'subscription "{sub.name}" leads back from a server that has lost its switchover',
            detail="That server was restored, or a standby that lagged took its place. Reconciling would delete what"
            " that server has lost.",
            hint=f"See where the switchover of {word(name)} stands, and undo it:\n"
            f"{_command(sub, name)} --status\n{_command(sub, name)} --abort",
        )


def _is_lost(store: StateStore, sub: Subscription, ended: Subscription | None, there: Entry) -> bool:
    """Return whether the server that took the right is back at a time before it.

    Its row remains when the switchover has ended. Without one its ledger may have been dropped.
    """
    if ended is not None:
        with ledger_session(store, ended) as taking:
            return journal.has_lagged(journal.of(taking, there.id), there)
    with contextlib.suppress(psycopg.errors.UndefinedTable, psycopg.errors.InsufficientPrivilege):
        with connect_publisher(sub) as source:
            here = journal.of(source, there.id)
        return here is not None and journal.has_lagged(here, there)
    return False


def _command(sub: Subscription, ended: str) -> str:
    if ended == f"{sub.name}{BACK_SUFFIX}":
        return f"pgsub switchover {word(sub.name)} --back"
    return f"pgsub switchover {word(ended)}"
