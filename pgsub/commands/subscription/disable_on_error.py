"""``pgsub disable-on-error``: ALTER SUBSCRIPTION … SET (disable_on_error). Workers need no restart for it."""

from __future__ import annotations

from pathlib import Path

from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter


def disable_on_error(folder: Path, name: str, *, on: bool, reporter: Reporter) -> None:
    """Set ``subdisableonerr``; a notice if it is so already. The next error of a running worker obeys it.

    :param folder: the state folder.
    :param name: the subscription.
    :raises SubscriptionNotFound: if there is none of that name.
    """
    with StateStore.open(folder, create=False) as store, store.batch():
        subscription = store.subscription(name)
        if subscription.disable_on_error == on:
            reporter.notice(f'disable_on_error of subscription "{name}" is {"on" if on else "off"} already')
            return
        store.alter(subscription.subid, disable_on_error=on)
        store.journal("disable-on-error", subscription.subid, name, {"on": on})
