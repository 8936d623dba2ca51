"""The present end of the publisher's WAL, for callers that wait until a subscription has caught up.

A standby may have received WAL that its catalogs and tables do not show yet.

Mirrors ``wait_for_catchup`` in ``src/test/perl/PostgreSQL/Test/Cluster.pm``.
"""

from __future__ import annotations

import time

from pgsub.common.errors import StateForbids
from pgsub.common.query import scalar
from pgsub.protocol.lsn import format_lsn, parse_lsn
from pgsub.publisher.connect import Connection
from pgsub.publisher.server_errors import PRIMARY_HINT, translating

_INSERTED = """
SELECT CASE WHEN NOT pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_current_wal_insert_lsn()::pg_catalog.text END
"""
_FLUSHED = """
SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
            ELSE pg_catalog.pg_current_wal_flush_lsn() END::pg_catalog.text
"""
_LAGS = "SELECT pg_catalog.pg_is_in_recovery() AND pg_catalog.pg_last_wal_replay_lsn() < %s::pg_catalog.pg_lsn"
#: Milliseconds within which the WAL writer flushes every commit.
_DELAY = "SELECT 3 * setting::pg_catalog.int4 FROM pg_catalog.pg_settings WHERE name = 'wal_writer_delay'"
_POLL = 0.01


def committed_position(connection: Connection) -> int:
    """Return the flush position that includes all present commits; on a standby, the replay position.

    Callers that wait for it use :func:`pgsub.apply.verified_publisher.committed_position`.

    A commit with ``synchronous_commit = off`` is flushed later, within three times ``wal_writer_delay``, and sent only
    then. The insert position itself cannot be used: what an open transaction has written may be flushed much later.

    :raises PgsubError: it cannot be read.
    """
    with translating(connection, "read the WAL position of the publisher"):
        inserted = scalar(connection, _INSERTED)
        flushed = flushed_position(connection)
        if inserted is None:
            return flushed
        wanted = parse_lsn(str(inserted))
        deadline = time.monotonic() + float(str(scalar(connection, _DELAY) or 0)) / 1000
        while flushed < wanted and time.monotonic() < deadline:
            time.sleep(_POLL)
            flushed = flushed_position(connection)
        return min(flushed, wanted)


def check_replayed(connection: Connection, position: int) -> None:
    """Refuse a standby that has not replayed what the target has.

    :param position: the position that the target has reached.
    :raises StateForbids: its tables and publications are older.
    """
    with translating(connection, "ask whether the publisher is a standby"):
        lags = scalar(connection, _LAGS, (format_lsn(position),))
    # guard: the target is not made equal to a standby that lags
    if lags:
        raise StateForbids(
            "the publisher is a standby that lacks changes of the subscription",
            detail=f"The target has changes up to {format_lsn(position)}, which it has not replayed.",
            hint=f"{PRIMARY_HINT}\nIf the primary is gone for good, promote the standby first.",
            sqlstate="55000",
        )


def flushed_position(connection: Connection) -> int:
    """Return the flush position, on a standby the replay position. Errors are psycopg's own."""
    return parse_lsn(str(scalar(connection, _FLUSHED)))
