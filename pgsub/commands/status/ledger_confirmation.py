"""Confirms in the ledger what the state store says, for ``pgsub wait``: the target may have been restored meanwhile.

A launcher that serves the subscription corrects the state store. Nothing does where none runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing, suppress

from pgsub.catalog.rows import RelationRow
from pgsub.catalog.store import StateStore
from pgsub.commands.status.wait_conditions import Condition
from pgsub.common.errors import TargetUnavailable
from pgsub.common.plural import some
from pgsub.common.subscription import Subscription
from pgsub.protocol.lsn import format_lsn

_PAUSE = 1.0  #: seconds until the ledger is read again


def in_ledger(position: int, awaited: frozenset[int]) -> Condition:
    """Wait until the ledger, too, has this position and these tables. It comes last, because it connects to the target.

    :param awaited: tables by OID.
    """
    said: str | None = None
    again = 0.0

    def unmet(store: StateStore, subscription: Subscription) -> str | None:
        nonlocal said, again
        if time.monotonic() >= again:
            shown = [row for row in store.relations(subscription.subid) if row.srrelid in awaited]
            # guard: what a restored target has lost is not reported as reached
            with suppress(TargetUnavailable):  # then the state store is all that is known
                said = _lacking(subscription, position, shown)
            again = time.monotonic() + _PAUSE
        return said

    return unmet


def _lacking(subscription: Subscription, position: int, shown: Sequence[RelationRow]) -> str | None:
    from psycopg import Error

    from pgsub.target.ledger import subscriptions
    from pgsub.target.session import ledger_privileges
    from pgsub.target.session.connect import SessionName, open_session, translate

    subid = subscription.subid
    try:
        with closing(open_session(subscription, SessionName(subid, "wait", 0), replica=False)) as session:
            ledger_privileges.check(session)
            done = subscriptions.recorded_position(session, subid)
            ready = {row.srrelid for row in subscriptions.relations(session, subid) if row.srsubstate == "r"}
    except Error as error:
        raise translate(error, "read the ledger") from None
    missing = [f"{row.schemaname}.{row.relname}" for row in shown if row.srrelid not in ready]
    if done < position:
        what = f"is at {format_lsn(done)}, awaited is {format_lsn(position)}"
    elif missing:
        what = f"does not show as synchronized: {some(missing)}"
    else:
        return None
    return f"The target's ledger {what}. It is behind the state store: the target may have been restored."
