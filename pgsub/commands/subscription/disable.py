"""``pgsub disable``: the DISABLE of ALTER SUBSCRIPTION. A launcher sees it within a second and ends the workers."""

from __future__ import annotations

from pathlib import Path

from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter


def disable(folder: Path, name: str, *, reporter: Reporter) -> None:
    """Clear ``subenabled``; a notice if it is clear already. Does not wait for the workers.

    :param folder: the state folder.
    :param name: the subscription.
    :raises SubscriptionNotFound: if there is none of that name.
    """
    with StateStore.open(folder, create=False) as store, store.batch():
        subscription = store.subscription(name)
        if not subscription.enabled:
            reporter.notice(f'subscription "{name}" is already disabled')
            return
        store.set_enabled(subscription.subid, False)
        store.journal("disable", subscription.subid, name, {})
