"""Keeps a way back from making a publisher equal to a target that has lost what clients wrote."""

from __future__ import annotations

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.sessions import ledger_session
from pgsub.common.errors import StateForbids
from pgsub.common.quoting import word
from pgsub.common.subscription import BACK_SUFFIX, Subscription
from pgsub.switchover import journal


def check(session: psycopg.Connection, store: StateStore, sub: Subscription) -> None:
    """Check that the switchover that made a subscription is not lost on the server that took the right to write.

    :param session: a session on the subscription's target, which gave the right.
    :raises StateForbids: only this target may still have what clients wrote.
    """
    ended = None if sub.way_back_of is None else store.subscription_by_id(sub.way_back_of)
    there = None if ended is None else journal.of_subscription(session, journal.GIVING, sub.subid)
    if ended is None or there is None or there.phase != journal.GIVEN:
        return
    with ledger_session(store, ended) as taking:
        here = journal.of(taking, there.id)
    # guard: a target that has lost the switchover does not overwrite the publisher
    if journal.has_lagged(here, there):
        raise StateForbids(
            f'subscription "{sub.name}" leads back from a server that has lost its switchover',
            detail="That server was restored, or a standby that lagged took its place. Reconciling would delete what"
            " that server has lost.",
            hint=f"See where the switchover of {word(ended.name)} stands, and undo it:\n"
            f"{_command(sub, ended)} --status\n{_command(sub, ended)} --abort",
        )


def _command(sub: Subscription, ended: Subscription) -> str:
    if ended.name == f"{sub.name}{BACK_SUFFIX}":
        return f"pgsub switchover {word(sub.name)} --back"
    return f"pgsub switchover {word(ended.name)}"
