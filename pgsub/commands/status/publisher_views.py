"""The publisher's views of a subscription's slots and their readers, queried on demand.

They have the columns of the newest server in its order (``system_views.sql``). An older server leaves some NULL.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from psycopg import sql

from pgsub.catalog.store import StateStore
from pgsub.commands.sessions import connect_publisher
from pgsub.common.subscription import Subscription
from pgsub.publisher.server_errors import translating

Row = dict[str, Any]

_SLOTS = (
    *("slot_name", "plugin", "slot_type", "datoid", "database", "temporary", "active", "active_pid", "xmin"),
    *("catalog_xmin", "restart_lsn", "confirmed_flush_lsn", "wal_status", "safe_wal_size", "two_phase", "two_phase_at"),
    *("inactive_since", "conflicting", "invalidation_reason", "failover", "synced", "slotsync_skip_reason"),
)
_SLOT_STATISTICS = (
    *("slot_name", "spill_txns", "spill_count", "spill_bytes", "stream_txns", "stream_count", "stream_bytes"),
    *("mem_exceeded_count", "total_txns", "total_bytes", "slotsync_skip_count", "slotsync_last_skip", "stats_reset"),
)
_WALSENDERS = (
    *("pid", "usesysid", "usename", "application_name", "client_addr", "client_hostname", "client_port"),
    *("backend_start", "backend_xmin", "state", "sent_lsn", "write_lsn", "flush_lsn", "replay_lsn", "write_lag"),
    *("flush_lag", "replay_lag", "sync_priority", "sync_state", "reply_time"),
)
_NAMED = "(slot_name = %(slot)s OR pg_catalog.starts_with(slot_name::text, %(sync)s))"
_ACTIVE = f"pid IN (SELECT active_pid FROM pg_catalog.pg_replication_slots WHERE {_NAMED})"
#: Columns, condition and order, by view.
_VIEWS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "pg_replication_slots": (_SLOTS, _NAMED, "slot_name"),
    "pg_stat_replication_slots": (_SLOT_STATISTICS, _NAMED, "slot_name"),
    "pg_stat_replication": (_WALSENDERS, _ACTIVE, "pid"),
}


def view(folder: Path, name: str, subscription: str | None = None) -> tuple[tuple[str, ...], list[Row]]:
    """Return a view of the publisher, limited to the slots of subscriptions.

    :param name: one of :data:`~pgsub.commands.status.status.PUBLISHER_VIEWS`.
    :param subscription: limit to this one, None for all.
    :return: column names and rows. Values have the format of the JSON documents.
    :raises PublisherUnavailable: the publisher cannot be asked.
    """
    with StateStore.open(folder, create=False) as store:
        subs = store.subscriptions() if subscription is None else [store.subscription(subscription)]
    columns = ("subname", *_VIEWS[name][0])
    return columns, [row for sub in subs for row in _rows(sub, name)]


def _rows(sub: Subscription, name: str) -> list[Row]:
    columns, condition, order = _VIEWS[name]
    query = sql.SQL("SELECT pg_catalog.row_to_json(v)::text FROM pg_catalog.{} v WHERE {} ORDER BY {}").format(
        sql.Identifier(name), sql.SQL(condition), sql.Identifier(order)
    )
    named = {"slot": sub.slot_name, "sync": f"pgsub_{sub.subid}_sync_"}
    with connect_publisher(sub) as connection, translating(connection, f"read {name} of the publisher"):
        found = [json.loads(text) for (text,) in connection.execute(query, named)]
    return [{"subname": sub.name, **{column: row.get(column) for column in columns}} for row in found]
