"""Errors and conflicts of workers as rows of the state store, and as counters of pg_stat_subscription_stats."""

from __future__ import annotations

import traceback
from dataclasses import asdict, replace
from typing import Any

from pgsub.catalog.conflicts import STOPPED
from pgsub.catalog.rows import ConflictRow
from pgsub.catalog.store import StateStore
from pgsub.catalog.times import wire_time
from pgsub.common.errors import ApplyError, InternalError, PgsubError
from pgsub.common.machine.out_of_resources import out_of_resources
from pgsub.common.server_words import shortened
from pgsub.common.subscription import Subscription
from pgsub.protocol.lsn import parse_lsn

#: Fields of a conflict record that are copied to columns of the row.
_COPIED = ("index_name", "key", "message", "detail", "context", "replica_identity", "skipped_ref")


def internal_error(error: Exception) -> PgsubError:
    """Turn an unexpected exception into an error of pgsub: a lack of resources, or a bug with its place in the code."""
    if isinstance(error, PgsubError):
        return error
    # guard: a lack of resources is not reported as a bug
    if (lack := out_of_resources(error)) is not None:
        return lack
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].name} (line {frames[-1].lineno})" if frames else "unknown"
    return InternalError(f"unexpected {type(error).__name__}: {shortened(str(error))}", context=where)


def finish_lsn(error: PgsubError) -> int:
    """Return the finish LSN of the transaction that failed, 0 if none did."""
    return parse_lsn(error.finish_lsn) if error.finish_lsn else 0


def count(store: StateStore, sub: Subscription, error: PgsubError, worker: str, counter: str) -> None:
    """Count a fault, and record its conflict if it is one.

    The server counts both as well. It counts a conflict of an ordinary copy as an error only.

    :param worker: the worker that the fault ended.
    :param counter: a column of pg_stat_subscription_stats.
    """
    record = error.record if isinstance(error, ApplyError) else None
    counted = isinstance(error, ApplyError) and error.conflict is not None
    conflict = {f"confl_{record.conflict_type}": 1} if record is not None and counted else {}
    with store.batch():
        store.add_stats(sub.subid, **{counter: 1}, **conflict)
        if record is not None:
            store.add_conflict(replace(conflict_row(sub, asdict(record), STOPPED), worker=worker))


def conflict_row(sub: Subscription, body: dict[str, Any], action: str, event: int | None = None) -> ConflictRow:
    """Make the row of a conflict from the worker's record of it.

    :param body: fields of :class:`pgsub.apply.conflicts.conflict_record.ConflictRecord`.
    :param event: ID of the ledger's event that contains the record, None if it was not an event.
    """
    local = body.get("local_conflicts") or []  # older workers wrote fewer fields, and rows as text
    first: dict[str, Any] = next(iter(local), {})
    remote = body["remote_tuple"]
    copied: dict[str, Any] = {name: body.get(name) for name in _COPIED}
    return ConflictRow(
        sub.subid,
        sub.name,
        body["conflict_type"],
        body["schemaname"],
        body["relname"],
        action,
        remote_tuple=remote if isinstance(remote, dict) else None,
        local_tuple=first.get("row"),
        origin=first.get("origin"),
        remote_xid=body["remote_xid"] or None,  # a copy has no transaction
        finish_lsn=parse_lsn(body["finish_lsn"]) if body["remote_xid"] or body.get("skipped_ref") else None,
        remote_commit_ts=wire_time(body["remote_commit_ts"]),
        identical=body.get("identical", False),
        local_conflicts=local or None,
        event=event,
        **copied,
    )
