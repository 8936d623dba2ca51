"""What an error means for counters and records."""

from __future__ import annotations

import traceback

from pgsub.catalog.rows import ConflictRow
from pgsub.catalog.store import StateStore
from pgsub.errors import ApplyError, InternalError, PgsubError
from pgsub.protocol.lsn import parse_lsn
from pgsub.subscription import Subscription


def bug(error: Exception) -> PgsubError:
    """An exception that nobody expected, as pgsub's own, with its place."""
    if isinstance(error, PgsubError):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].name} (line {frames[-1].lineno})" if frames else "unknown"
    return InternalError(f"unexpected {type(error).__name__}: {error}", context=where)


def place(error: PgsubError) -> int:
    """Finish LSN of the transaction that failed, 0 where none is to blame."""
    text = error.finish_lsn if isinstance(error, ApplyError) else None
    return parse_lsn(text) if text else 0


def count(store: StateStore, sub: Subscription, error: PgsubError, counter: str) -> None:
    """Count a fault, and a conflict besides (the server counts both)."""
    kind = error.conflict if isinstance(error, ApplyError) else None
    with store.batch():
        store.add_stats(sub.subid, **{counter: 1}, **({f"confl_{kind}": 1} if kind else {}))
        if kind and isinstance(error, ApplyError):
            schema, _, relation = (error.relation or ".").partition(".")
            store.add_conflict(
                ConflictRow(
                    sub.subid,
                    sub.name,
                    kind,
                    schema,
                    relation,
                    "error",
                    remote_xid=error.xid,
                    finish_lsn=place(error) or None,
                    message=error.message,
                    detail=error.detail,
                )
            )
