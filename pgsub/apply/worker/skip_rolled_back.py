"""Skips a transaction that stopped apply although the publisher has rolled it back.

A transaction that was prepared, and rolled back before a lagging walsender decoded it, is still sent. If it exceeds
logical_decoding_work_mem, the subtransactions behind its first eviction are missing:
ReorderBufferCheckAndTruncateAbortedTXN (reorderbuffer.c) marks those present at that time. The rest may conflict, and
then its ROLLBACK PREPARED is never read. The server's own subscriber stops at it for good.
"""

from __future__ import annotations

import contextlib

import psycopg

from pgsub.apply import verified_publisher
from pgsub.common.errors import ApplyError, log_text
from pgsub.common.query import scalar
from pgsub.common.subscription import Subscription
from pgsub.protocol.lsn import parse_lsn
from pgsub.target.ledger import events, skip
from pgsub.target.session import connect as target
from pgsub.target.session import ledger_guard

_NEXT_XID = "SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::pg_catalog.text"


def leaves_out(sub: Subscription, error: ApplyError) -> bool:
    """Set the skip for the transaction that stopped apply if the publisher has rolled it back.

    :param error: may lack the transaction's xid and finish LSN.
    :return: whether it will be skipped; False if an operator has already set a skip.
    :raises PgsubError: a server cannot be queried.
    """
    if not error.xid or error.finish_lsn is None or error.relation is None:  # at the end, not at a change
        return False
    with contextlib.closing(target.open_session(sub, f"pgsub {sub.subid} rolled back 0")) as session:
        ledger_guard.check(session)
        if not _aborted(session, sub, error.xid):
            return False
        if skip.pending(session, sub.subid) is not None:
            return False
        skip.set_pending(session, sub.subid, skip.of([parse_lsn(error.finish_lsn)]))
        text = (
            f"transaction {error.xid}, finished at {error.finish_lsn}, was rolled back on the publisher: it is left out"
        )
        detail = f"It had stopped apply: {error.message}"
        events.add(session, sub.subid, events.log_entry("LOG", log_text(text, detail=detail)))
    return True


def _aborted(session: psycopg.Connection, sub: Subscription, xid: int) -> bool:
    """Return whether the publisher says that it aborted the transaction, which it never says of a committed one."""
    with contextlib.closing(verified_publisher.connect(session, sub, replication=True)) as connection:
        # another server, or an older state of this one, may have aborted another transaction with this xid
        verified_publisher.verify(session, connection, sub.subid)
        following = int(str(scalar(connection, _NEXT_XID)))
        full = following >> 32 << 32 | xid
        full -= (1 << 32) * (full >= following)
        if full < 0:
            return False
        try:
            # a replication connection takes no query parameters
            return bool(scalar(connection, f"SELECT pg_catalog.pg_xact_status('{full}'::pg_catalog.xid8)") == "aborted")
        except psycopg.Error:
            return False
