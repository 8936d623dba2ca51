"""The publisher's position of this moment, for commands that wait until apply has reached it.

Mirrors what ``wait_for_catchup`` in ``src/test/perl/PostgreSQL/Test/Cluster.pm`` asks for.
"""

from __future__ import annotations

import psycopg

from pgsub.errors import PublisherUnavailable
from pgsub.protocol.lsn import parse_lsn
from pgsub.publisher.connect import connect, scalar
from pgsub.publisher.faults import translate
from pgsub.subscription import Subscription


def flush_position(subscription: Subscription) -> int:
    """``pg_current_wal_flush_lsn()`` of the publisher; on a standby the position it has replayed.

    :raises PublisherUnavailable: if it cannot be asked.
    """
    connection = connect(subscription.connection, application_name=subscription.name)
    try:
        text = scalar(connection, _POSITION)
    except psycopg.Error as error:
        raise translate(error, "read the WAL position of the publisher") from None
    finally:
        connection.close()
    if not isinstance(text, str):
        raise PublisherUnavailable("the publisher did not tell its WAL position")
    return parse_lsn(text)


_POSITION = """
SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
            ELSE pg_catalog.pg_current_wal_flush_lsn() END::pg_catalog.text
"""
