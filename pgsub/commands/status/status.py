"""``pgsub status``: subscriptions from the state store, without any server.

One subscription is a :class:`~pgsub.commands.status.subscription_status.SubscriptionStatus`.
"""

from __future__ import annotations

from pathlib import Path

from pgsub.catalog.store import StateStore
from pgsub.commands.status.subscription_status import Row, SubscriptionStatus, read_status, view_rows

#: Views that are read from the publisher.
PUBLISHER_VIEWS = ("pg_replication_slots", "pg_stat_replication_slots", "pg_stat_replication")


def status(folder: Path, name: str | None = None) -> list[SubscriptionStatus]:
    """Return the status of one subscription or of all, from one snapshot of the store.

    :param name: None for all, sorted by name.
    """
    with StateStore.open(folder, readable=True, create=False) as store, store.snapshot():
        wanted = store.subscriptions() if name is None else [store.subscription(name)]
        return [read_status(store, folder, sub) for sub in wanted]


def view(folder: Path, name: str, subscription: str | None = None) -> tuple[tuple[str, ...], list[Row]]:
    """Return a view or table of the state store.

    :return: column names and rows.
    :raises UsageError: there is no such view.
    """
    with StateStore.open(folder, create=False) as store, store.snapshot():
        return view_rows(store, name, None if subscription is None else store.subscription(subscription).subid)


def reset_stats(folder: Path, name: str | None = None) -> None:
    """Reset the counters (``pg_stat_reset_subscription_stats``), with a journal entry.

    :param name: None for all subscriptions.
    """
    with StateStore.open(folder, create=False) as store, store.batch():
        subid = None if name is None else store.subscription(name).subid
        store.reset_stats(subid)
        store.journal("reset-stats", subid, name, {})
