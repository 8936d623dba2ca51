"""``pgsub enable``, ``disable`` and ``disable-on-error``. Mirrors AlterSubscription (ENABLE, DISABLE, SET).

A launcher notices the change in the state store within a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pgsub.catalog.locks import launcher_lock
from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.status.subscription_status import serving
from pgsub.commands.subscription import definition_change
from pgsub.common.errors import PgsubError, StateForbids
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription


def enable(folder: Path, name: str, *, reporter: Reporter) -> None:
    """Set ``subenabled``. If it is already set, report a notice.

    :raises StateForbids: no slot name is set, another state store owns the subscription, or a switchover prevents it.
    """
    with StateStore.open(folder, create=False) as store:
        sub = store.subscription(name)
        if sub.slot_name is None:
            raise StateForbids("cannot enable subscription that does not have a slot name")
        if sub.enabled:
            reporter.notice(f'subscription "{name}" is already enabled')
            return
        _check_may_write(sub)
        _set(store, sub, "enable", {}, reporter, enabled=True)
        served = serving(store, folder, sub.subid) or launcher_lock(folder).holder() is not None
    if not served:
        reporter.notice(f'subscription "{name}" is enabled, but no pgsub run serves it yet')


def _check_may_write(sub: Subscription) -> None:
    """Refuse what a worker would refuse. If the target cannot be asked, leave it to the worker.

    :raises StateForbids: a switchover has moved the writes elsewhere, or not moved them here yet.
    """
    if not sub.dboid:
        return
    import psycopg

    from pgsub.commands.sessions import connect_target
    from pgsub.target.ledger import right_to_write
    from pgsub.target.session import ledger_privileges

    try:
        with connect_target(sub, replica=False) as session:
            ledger_privileges.check(session)
            right_to_write.check(session, sub.subid, sub.name)
    except StateForbids:
        raise
    except (PgsubError, psycopg.Error):
        return


def disable(folder: Path, name: str, *, reporter: Reporter) -> None:
    """Clear ``subenabled``. A launcher then ends the workers. This function does not wait for them."""
    with StateStore.open(folder, create=False) as store:
        sub = store.subscription(name)
        if not sub.enabled:
            reporter.notice(f'subscription "{name}" is already disabled')
            return
        _set(store, sub, "disable", {}, reporter, enabled=False)


def disable_on_error(folder: Path, name: str, *, on: bool, reporter: Reporter) -> None:
    """Set ``subdisableonerr``. It applies to the next error of running workers, without a restart.

    If it already has the value, a notice is reported. Parameters and errors are those of :func:`disable`.
    """
    with StateStore.open(folder, create=False) as store:
        sub = store.subscription(name)
        if sub.disable_on_error == on:
            reporter.notice(f'disable_on_error of subscription "{name}" is already {"on" if on else "off"}')
            return
        _set(store, sub, "disable-on-error", {"on": on}, reporter, disable_on_error=on)


def _set(
    store: StateStore,
    sub: Subscription,
    action: str,
    shown: dict[str, Any],
    reporter: Reporter,
    **fields: bool,
) -> None:
    """Write fields of the definition, and of the ledger's copy of it."""

    def write() -> None:
        with store.batch():
            store.require(sub.subid)
            store.alter(sub.subid, **fields)
            store.journal(action, sub.subid, sub.name, shown)

    definition_change.change(store, sub, write, reporter=reporter)


def require_enabled(sub: Subscription, command: str) -> None:
    """Refuse a form of ALTER SUBSCRIPTION that is not allowed for disabled subscriptions."""
    if not sub.enabled:
        raise StateForbids(
            f"ALTER SUBSCRIPTION ... {command} is not allowed for disabled subscriptions",
            hint=f"Enable it first:\npgsub enable {word(sub.name)}",
            sqlstate="55000",
        )


def require_disabled(sub: Subscription, message: str) -> None:
    """Refuse a change that is not allowed for enabled subscriptions.

    :param message: the server's message.
    :raises StateForbids: the subscription is enabled.
    """
    if sub.enabled:
        raise StateForbids(message, hint=f"Disable it first:\npgsub disable {word(sub.name)}", sqlstate="55000")
