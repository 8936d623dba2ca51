"""Where the publisher's WAL ends at this moment: what a caller that waits for catch-up compares with.

Mirrors what ``wait_for_catchup`` in ``src/test/perl/PostgreSQL/Test/Cluster.pm`` asks for.
"""

from __future__ import annotations

import contextlib

import psycopg

from pgsub.protocol.lsn import parse_lsn
from pgsub.publisher.connect import connect, scalar
from pgsub.publisher.faults import translate

_POSITION = """
SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
            ELSE pg_catalog.pg_current_wal_flush_lsn() END::pg_catalog.text
"""


def flush_position(conninfo: str, application_name: str) -> int:
    """``pg_current_wal_flush_lsn()`` of the publisher; on a standby the position it has replayed.

    :raises PgsubError: it cannot be asked.
    """
    with contextlib.closing(connect(conninfo, application_name=application_name)) as connection:
        try:
            return parse_lsn(str(scalar(connection, _POSITION)))
        except psycopg.Error as error:
            raise translate(error, "read the WAL position of the publisher") from None
