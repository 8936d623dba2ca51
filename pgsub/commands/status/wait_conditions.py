"""The conditions of ``pgsub wait``: each says what is still missing according to the state store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from pgsub.catalog.store import StateStore
from pgsub.commands.status import wait_session
from pgsub.commands.status.subscription_status import serving
from pgsub.common.errors import PgsubError
from pgsub.common.plural import counted
from pgsub.common.subscription import Subscription
from pgsub.launcher.error_handling import SEQUENCES
from pgsub.protocol.lsn import format_lsn

_NAMED = 10

#: Returns what is still missing, None if the condition holds.
Condition = Callable[[StateStore, Subscription], str | None]


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

    with suppress(PgsubError), wait_session.ledger(subscription) as session:
        worker_takeover.ask_to_record(session, subscription.subid, position)


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
