"""Rows of the target that the publisher's rows replace or delete: they are kept and recorded.

They are stored in pgsub.skipped_change as replayed, so they explain no difference, and can be read and pruned there.
The record is a conflict that was resolved, which the launcher shows (``pgsub conflicts list``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from pgsub.apply.conflicts import conflict_record, conflict_text
from pgsub.common.query import scalar
from pgsub.protocol.lsn import format_lsn
from pgsub.protocol.walsender_messages import since_2000
from pgsub.reconcile.expressions import ComparedTable
from pgsub.target.ledger import events
from pgsub.target.sql import jsonb

REPAIRED = "repaired"
_KEPT = (
    "INSERT INTO pgsub.skipped_change (subid, finish_lsn, xid, schemaname, relname, body, replayed_at)"
    " VALUES (%s, %s, 0, %s, %s, %s, pg_catalog.now())"
)


def keep(
    connection: psycopg.Connection,
    subid: int,
    table: ComparedTable,
    lsn: int,
    bodies: Sequence[dict[str, Any]],
    doing: str,
) -> int:
    """Keep and record replaced rows in the transaction that replaces them.

    :param lsn: position of the publisher's state that replaces them.
    :param bodies: changes as in pgsub.skipped_change. Those that replace nothing are passed over.
    :param doing: repairing or adopting.
    :return: the time of the target, in microseconds since 2000.
    """
    local = table.target
    now = since_2000(int(scalar(connection, "SELECT (extract(epoch FROM now()) * 1000000)::bigint")))
    replacing = [body for body in bodies if "old" in body]
    place = (subid, format_lsn(lsn), local.schema, local.name)
    rows = [(*place, jsonb.jsonb(connection, {**body, "reason": REPAIRED, "commit_ts": now})) for body in replacing]
    if rows:
        with connection.cursor() as cursor:
            cursor.executemany(_KEPT.encode(), rows)
        events.add(connection, subid, *(_conflict(table, body, lsn, now, doing) for body in replacing))
    return now


def _conflict(table: ComparedTable, body: dict[str, Any], lsn: int, commit_ts: int, doing: str) -> dict[str, object]:
    """Make the record of a row that differed from the publisher's, because something else had written it."""
    local, old = table.target, body["old"]
    kind = f"{body['operation'].lower()}_origin_differs"
    names = body["identity"]
    key = conflict_text.key(names, [old[name] for name in names])
    record = conflict_record.ConflictRecord(
        kind,
        local.schema,
        local.name,
        0,
        format_lsn(lsn),
        commit_ts,
        conflict_record.message(local.schema, local.name, kind),
        detail=f"The row {key} was not the publisher's of {format_lsn(lsn)}, and was repaired.",
        context=f'{doing} table "{table.name}"',
        key=key,
        remote_tuple=body.get("new"),
        replica_identity={name: old[name] for name in names},
        local_conflicts=[
            {"index": "", "key": key, "row": old, "xid": None, "commit_ts": None, "origin": None, "identical": False}
        ],
        action=REPAIRED,
        quiet=True,
    )
    return record.body()
