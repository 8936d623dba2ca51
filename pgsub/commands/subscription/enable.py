"""``pgsub enable``: AlterSubscription_enable. Only the state store is written; a launcher sees it within a second."""

from __future__ import annotations

from pathlib import Path

from pgsub.catalog.locks import launcher_lock
from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.status.status import serving
from pgsub.common.errors import StateForbids


def enable(folder: Path, name: str, *, reporter: Reporter) -> None:
    """Set ``subenabled``; a notice if it is set already.

    :param folder: the state folder.
    :param name: the subscription.
    :raises SubscriptionNotFound: if there is none of that name.
    :raises StateForbids: if it has no slot name.
    """
    with StateStore.open(folder, create=False) as store, store.batch():
        subscription = store.subscription(name)
        if subscription.slot_name is None:
            raise StateForbids("cannot enable subscription that does not have a slot name")
        if subscription.enabled:
            reporter.notice(f'subscription "{name}" is already enabled')
            return
        store.set_enabled(subscription.subid, True)
        store.journal("enable", subscription.subid, name, {})
        served = serving(store, folder, subscription.subid) or launcher_lock(folder).holder() is not None
    if not served:
        reporter.notice(f'subscription "{name}" is enabled, but no launcher serves it yet')
