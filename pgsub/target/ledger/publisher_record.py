"""The publisher as recorded in the ledger: database, timeline, and the positions that bind the timeline.

NOTES
A publisher whose timeline branched off before a position of the ledger has lost changes that the target has. Once the
new timeline is recorded, nobody compares positions with the branch point any more. So all positions are compared
before. No worker that began on the old timeline may go on: the old server may still run, and its sessions with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from pgsub.common.errors import Fenced
from pgsub.common.query import scalar
from pgsub.protocol.lsn import format_lsn, parse_lsn
from pgsub.target.ledger import worker_takeover
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session import transactions

# A table that is still being copied does not count: its rows are compared with the next snapshot, or removed.
_FURTHEST = """
SELECT greatest(p.remote_lsn, p.reported_lsn,
                (SELECT max(r.srsublsn) FROM pgsub.subscription_rel r WHERE r.subid = p.subid),
                (SELECT max(greatest(own.remote_lsn, own.reported_lsn)) FROM pgsub.progress own
                   JOIN pgsub.subscription_rel r ON r.subid = own.subid AND r.srrelid = own.worker
                  WHERE own.subid = p.subid AND r.srsubstate = 'f'))::text
  FROM pgsub.progress p WHERE p.subid = %s AND p.worker = 0
"""

_TIME = """
SELECT (EXTRACT(epoch FROM remote_commit_ts - '2000-01-01 00:00:00+00'::timestamptz) * 1000000)::bigint
  FROM pgsub.progress WHERE subid = %s AND worker = %s AND remote_lsn = %s::pg_lsn
"""


def commit_time(connection: psycopg.Connection, subid: int, worker: int, remote_lsn: int) -> int | None:
    """Return the commit time of the transaction that ends at a worker's position, in microseconds since 2000-01-01 UTC.

    :return: None if no transaction ends there, or if the position has changed since.
    """
    found = scalar(connection, _TIME, (subid, worker, format_lsn(remote_lsn)))
    return None if found is None else int(found)


def furthest(connection: psycopg.Connection, subid: int) -> int:
    """Return the furthest position of the publisher up to which the target has changes.

    It is the position of apply, of a hand-over, or of a table that catches up.

    :raises Fenced: the subscription is gone.
    """
    return parse_lsn(worker_takeover.present(scalar(connection, _FURTHEST, (subid,))))


def follow(connection: psycopg.Connection, claims: Sequence[Claim], timeline: int) -> None:
    """Record the timeline that the publisher moved to, after its history was checked.

    :param claims: claims of all workers, made before the positions for the check were read.
    :raises Fenced: another worker was started since.
    """
    subid = claims[0].subid
    with transactions.durable(connection):
        transactions.lock_timeout(connection)
        # no worker is started meanwhile
        connection.execute("LOCK TABLE pgsub.control IN SHARE ROW EXCLUSIVE MODE")
        worker_takeover.fence(connection, *claims)
        # guard: no worker continues on an abandoned timeline
        if worker_takeover.started(connection, subid) != set(worker_takeover.numbers(claims)):
            raise Fenced("another worker was started meanwhile")
        connection.execute("UPDATE pgsub.subscription SET timeline = %s WHERE subid = %s", (timeline, subid))
