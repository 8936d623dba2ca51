"""The conditions of ``pgsub wait``: each says what is still missing according to the state store.

What it says is confirmed in the ledger, because the target may have been restored meanwhile. A launcher that serves the
subscription corrects the state store. Nothing does where none runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from pgsub.catalog.rows import RelationRow
from pgsub.catalog.store import StateStore
from pgsub.commands.status.subscription_status import serving
from pgsub.common.errors import PgsubError, TargetUnavailable
from pgsub.common.plural import counted, some
from pgsub.common.subscription import Subscription
from pgsub.launcher.error_handling import SEQUENCES
from pgsub.protocol.lsn import format_lsn

if TYPE_CHECKING:
    import psycopg

_NAMED = 10
_PAUSE = 1.0  #: seconds until the ledger is read again

#: Returns what is still missing, None if the condition holds.
Condition = Callable[[StateStore, Subscription], str | None]


class Reading(NamedTuple):
    """The subscription's position and its synchronized tables, as the ledger had them."""

    position: int
    ready: frozenset[int]  #: tables by OID
    at: float  #: in time of ``time.monotonic()``


@contextmanager
def ledger(sub: Subscription) -> Iterator[psycopg.Connection]:
    """Open a session for the block, which should be short: commands may wait for hours.

    :raises TargetUnavailable: the target cannot be asked.
    :raises PermissionMissing: the ledger's owner is not trusted.
    """
    # Imported late: most waits need no server.
    from psycopg import Error

    from pgsub.target.ledger import subscriptions
    from pgsub.target.session import ledger_guard
    from pgsub.target.session.connect import SessionName, open_session

    try:
        with closing(open_session(sub, SessionName(sub.subid, "wait", 0), replica=False)) as session:
            ledger_guard.check(session)
            yield session
    except Error as error:
        raise subscriptions.unreadable(error) from None


def synced(awaited: frozenset[int]) -> Condition:
    """Wait for these tables, by OID. Tables that are no longer subscribed are not awaited."""

    def unmet(store: StateStore, subscription: Subscription) -> str | None:
        shown = store.relations(subscription.subid)
        rows = [row for row in shown if row.srrelid in awaited and row.srsubstate != "r"]
        names = [f'"{row.schemaname}.{row.relname}" ({row.srsubstate})' for row in rows[:_NAMED]]
        if len(rows) > _NAMED:
            names.append(f"and {len(rows) - _NAMED} more")
        return f"Not synchronized: {', '.join(names)}." if names else None

    return unmet


def reached(position: int) -> Condition:
    """Wait for a position in the ledger. Apply is asked to record it, because an idle worker does so late."""
    asked = False

    def unmet(store: StateStore, subscription: Subscription) -> str | None:
        nonlocal asked
        origin = store.origin(subscription.subid)
        done = max((origin.remote_lsn or 0, origin.reported_lsn or 0) if origin else (0,))
        if done >= position:
            return None
        if not asked and store.workers(subscription.subid):
            asked = True
            _ask_to_record(subscription, position)
        return f"Applied up to {format_lsn(done)}, awaited is {format_lsn(position)}."

    return unmet


def _ask_to_record(subscription: Subscription, position: int) -> None:
    """Ask apply to record a position at once. If the target cannot be asked, it is recorded a little later."""
    from pgsub.target.ledger import worker_takeover

    with suppress(PgsubError), ledger(subscription) as session:
        worker_takeover.ask_to_record(session, subscription.subid, position)


def read_ledger(session: psycopg.Connection, subid: int) -> Reading:
    """Read the ledger in a session of :func:`ledger`."""
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
                with ledger(subscription) as session:
                    known = read_ledger(session, subscription.subid)
            again = time.monotonic() + _PAUSE
        shown = [row for row in store.relations(subscription.subid) if row.srrelid in awaited]
        return None if known is None else _not_in_ledger(known, position, shown)

    return unmet


def _not_in_ledger(known: Reading, position: int, shown: Sequence[RelationRow]) -> str | None:
    missing = [f"{row.schemaname}.{row.relname}" for row in shown if row.srrelid not in known.ready]
    if known.position < position:
        what = f"is at {format_lsn(known.position)}, awaited is {format_lsn(position)}"
    elif missing:
        what = f"does not show as synchronized: {some(missing)}"
    else:
        return None
    return f"The target's ledger {what}. It is behind the state store: the target may have been restored."


def released(store: StateStore, subscription: Subscription) -> str | None:
    """Wait for released tables whose kept changes are still being applied."""
    waiting = [row for row in store.held(subscription.subid) if row.releasing and row.kept_changes]
    names = [f'"{row.schemaname}.{row.relname}"' for row in waiting[:_NAMED]]
    return f"Kept changes are being applied to {', '.join(names)}." if names else None


def followed(store: StateStore, subscription: Subscription) -> str | None:
    """Return what is not replicated although apply has reached its position: held tables, and sequences."""
    names = [f'"{name}"' for name in held(store, subscription)]
    if names:
        return f"{counted(len(names), 'table')} held: {', '.join(names[:_NAMED])}{', …' if names[_NAMED:] else ''}."
    errors = store.errors(subscription.subid) if subscription.sequences else []
    return next((f"Sequences do not follow: {row.message}." for row in errors if row.worker == SEQUENCES), None)


def held(store: StateStore, subscription: Subscription) -> list[str]:
    """Return the tables whose changes are kept until they are released."""
    return [f"{row.schemaname}.{row.relname}" for row in store.held(subscription.subid) if not row.releasing]


def failed(store: StateStore, subscription: Subscription) -> str | None:
    """Wait for an error."""
    return None if store.errors(subscription.subid) else "The subscription has no error."


def disabled(store: StateStore, subscription: Subscription) -> str | None:
    """Wait until the subscription is disabled and its workers have ended."""
    if subscription.enabled:
        return "The subscription is enabled."
    if store.workers(subscription.subid) and serving(store, store.path.parent, subscription.subid):
        return "The subscription is disabled, but its workers have not ended yet."
    return None


def two_phase(store: StateStore, subscription: Subscription) -> str | None:
    """Wait until two_phase is no longer pending."""
    if subscription.two_phase != "p" or not store.relations(subscription.subid):
        return None
    return "two_phase is pending."
