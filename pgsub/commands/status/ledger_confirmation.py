"""Confirms in the ledger what the state store says, for ``pgsub wait``: the target may have been restored meanwhile.

A launcher that serves the subscription corrects the state store. Nothing does where none runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from pgsub.catalog.rows import RelationRow
from pgsub.catalog.store import StateStore
from pgsub.commands.status import wait_session
from pgsub.commands.status.wait_conditions import Condition
from pgsub.common.errors import TargetUnavailable
from pgsub.common.plural import some
from pgsub.common.subscription import Subscription
from pgsub.protocol.lsn import format_lsn

if TYPE_CHECKING:
    import psycopg

_PAUSE = 1.0  #: seconds until the ledger is read again


class Reading(NamedTuple):
    """The subscription's position and its synchronized tables, as the ledger had them."""

    position: int
    ready: frozenset[int]  #: tables by OID
    at: float  #: in time of ``time.monotonic()``


def read(session: psycopg.Connection, subid: int) -> Reading:
    """Read the ledger in a session of :func:`wait_session.ledger`."""
    from pgsub.target.ledger import subscriptions

    at, done = time.monotonic(), subscriptions.recorded_position(session, subid)
    ready = (row.srrelid for row in subscriptions.relations(session, subid) if row.srsubstate == "r")
    return Reading(done, frozenset(ready), at)


def in_ledger(position: int, awaited: frozenset[int], known: Reading | None = None) -> Condition:
    """Wait until the ledger, too, has this position and these tables. It comes last, because it connects to the target.

    :param awaited: tables by OID.
    :param known: a reading that may already have them, so that the condition need not connect.
    """
    confirms = known is not None and known.position >= position and awaited <= known.ready
    again = known.at + _PAUSE if known is not None and confirms else 0.0

    def unmet(store: StateStore, subscription: Subscription) -> str | None:
        nonlocal known, again
        if time.monotonic() >= again:
            # guard: what a restored target has lost is not reported as reached
            with suppress(TargetUnavailable):  # then the state store is all that is known
                with wait_session.ledger(subscription) as session:
                    known = read(session, subscription.subid)
            again = time.monotonic() + _PAUSE
        shown = [row for row in store.relations(subscription.subid) if row.srrelid in awaited]
        return None if known is None else _lacking(known, position, shown)

    return unmet


def _lacking(known: Reading, position: int, shown: Sequence[RelationRow]) -> str | None:
    missing = [f"{row.schemaname}.{row.relname}" for row in shown if row.srrelid not in known.ready]
    if known.position < position:
        what = f"is at {format_lsn(known.position)}, awaited is {format_lsn(position)}"
    elif missing:
        what = f"does not show as synchronized: {some(missing)}"
    else:
        return None
    return f"The target's ledger {what}. It is behind the state store: the target may have been restored."
