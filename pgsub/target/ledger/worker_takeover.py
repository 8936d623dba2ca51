"""Rows of pgsub.control: which worker may write, the take-over of a running one, and its stop flag.

NOTES
A worker is apply (0) or the sync worker of a table (its OID). A launcher starts it by a take-over, which raises the
worker's epoch. Every commit of a worker checks the epoch with which it was started. So of two workers with one number
only the later can commit.

A worker's session is named ``pgsub SUBID ROLE EPOCH``. If it connects after the epoch was raised, its claim fails. If
it connected before, it is listed in pg_stat_activity and is terminated. The new worker reads the ledger only when no
older session is left, so it sees everything that the older worker committed. This breaks if a session of a worker has
another name.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import psycopg

from pgsub.common.errors import Fenced, TargetUnavailable
from pgsub.protocol.lsn import format_lsn
from pgsub.target.session.transactions import durable

APPLY = 0  #: worker number of apply in control and progress; any other is a table's OID
_EVICT_SECONDS = 30

#: Condition for sessions ``a`` of pg_stat_activity whose name is trusted. Any session may take any name, but only one
#: that may write to the ledger can be a worker.
WORKER_SESSIONS = """a.datname = pg_catalog.current_database()
   AND pg_catalog.has_table_privilege(a.usesysid, 'pgsub.control', 'UPDATE')"""
#: application_name of a subscription's workers, as a regular expression.
_PATTERN = "^pgsub {} (apply|sync:[0-9]+|copy:[0-9]+) [0-9]{{1,18}}$"
_EVICT = f"""
SELECT pg_catalog.pg_terminate_backend(a.pid, 1000) FROM pg_catalog.pg_stat_activity a
 WHERE {WORKER_SESSIONS}
   AND CASE WHEN a.application_name ~ %s
            THEN %s::bigint[] IS NULL OR pg_catalog.split_part(a.application_name, ' ', 4)::bigint < (
                 SELECT r.epoch FROM unnest(%s::text[], %s::bigint[]) AS r (role, epoch)
                  WHERE r.role = pg_catalog.split_part(a.application_name, ' ', 3)) END
"""


_SIGN = f"""
SELECT c.claimed_by IS NOT NULL, c.claimed_host, c.claimed_pid, a.sessions, a.works, a.changed
  FROM pgsub.control c CROSS JOIN (
       SELECT count(*) AS sessions, max(a.state_change)::text AS changed, coalesce(pg_catalog.bool_or(
              a.state NOT LIKE 'idle%%' AND a.wait_event_type IS DISTINCT FROM 'Client'), false) AS works
         FROM pg_catalog.pg_stat_activity a
        WHERE {WORKER_SESSIONS} AND a.application_name = %s) AS a
 WHERE c.subid = %s AND c.worker = %s AND c.epoch = %s
"""


_TABLE_SIGN = f"""
SELECT count(*), coalesce(pg_catalog.bool_or(a.state = 'disabled' OR
       a.state NOT LIKE 'idle%%' AND a.wait_event_type IS DISTINCT FROM 'Client'), false),
       max(a.state_change)::text, sum(p.bytes_processed)::text
  FROM pg_catalog.pg_stat_activity a LEFT JOIN pg_catalog.pg_stat_progress_copy p ON p.pid = a.pid
 WHERE {WORKER_SESSIONS} AND a.application_name = ANY (%s)
"""


class TableSign(NamedTuple):
    """Evidence of tasks that synchronize tables, as in :class:`Sign`; ``copied``: bytes of copies in progress."""

    sessions: int
    works: bool
    changed: str | None
    copied: str | None


@dataclass(frozen=True, slots=True)
class Claim:
    """The fence of one attempt of one worker. Its task receives it, and every commit checks it."""

    subid: int
    worker: int
    epoch: int
    token: str


@dataclass(frozen=True, slots=True)
class Sign:
    """Evidence of a worker on the target.

    :ivar claimed: a task has begun, in process ``pid`` of ``host``.
    :ivar sessions: number of its sessions.
    :ivar works: one of its statements runs and does not wait for the worker itself.
    :ivar changed: when one of its statements last began or ended.
    """

    claimed: bool = False
    host: str | None = None
    pid: int | None = None
    sessions: int = 0
    works: bool = False
    changed: str | None = None


def sign(connection: psycopg.Connection, claim: Claim) -> Sign:
    """Look for a worker's sessions on the target. Nothing is found for an epoch that was raised."""
    [role, *_] = _roles(claim.worker)
    name = f"pgsub {claim.subid} {role} {claim.epoch}"
    row = connection.execute(_SIGN.encode(), (name, claim.subid, claim.worker, claim.epoch)).fetchone()
    return Sign() if row is None else Sign(*row)


def table_sign(connection: psycopg.Connection, claims: Sequence[Claim]) -> TableSign:
    """Look for the sessions of tasks that copy tables or catch up with them."""
    names = [f"pgsub {one.subid} {role} {one.epoch}" for one in claims for role in _roles(one.worker)]
    found = connection.execute(_TABLE_SIGN.encode(), (names,)).fetchone()
    assert found is not None
    return TableSign(*found)


def is_worker(connection: psycopg.Connection, pid: int, subid: int) -> bool:
    """Return whether a take-over of a worker of the subscription would end this session of the target."""
    query = (
        f"SELECT FROM pg_catalog.pg_stat_activity a WHERE a.pid = %s AND {WORKER_SESSIONS} AND application_name ~ %s"
    )
    return connection.execute(query.encode(), (pid, _PATTERN.format(subid))).fetchone() is not None


def take_over(connection: psycopg.Connection, subid: int, worker: int) -> Claim:
    """Raise the epoch of a worker and end every session of an older one. No worker starts without it.

    :param worker: :data:`APPLY` or a table's OID.
    :raises TargetUnavailable: an older session did not end within 30 s.
    """
    return take_over_many(connection, subid, [worker])[worker]


def take_over_others(connection: psycopg.Connection, claims: Sequence[Claim]) -> list[Claim]:
    """Take over all workers of a subscription except those that ask for it; return the claims of the others.

    :raises Fenced: a worker that asks was taken over. If two do it at once, only the first goes on.
    """
    subid = claims[0].subid
    others = started(connection, subid) - set(numbers(claims))
    return list(take_over_many(connection, subid, others, under=claims).values())


def started(connection: psycopg.Connection, subid: int) -> set[int]:
    """Return the workers of a subscription that were ever started."""
    rows = connection.execute("SELECT worker::bigint FROM pgsub.control WHERE subid = %s", (subid,))
    return {worker for (worker,) in rows}


def take_over_many(
    connection: psycopg.Connection, subid: int, workers: Collection[int], *, under: Sequence[Claim] = ()
) -> dict[int, Claim]:
    """Take over several workers in one commit; return their claims by worker.

    :param under: claims of other workers, which must be valid.
    :raises Fenced: one of these was taken over.
    """
    token = uuid.uuid4()
    with durable(connection):
        if under:  # one caller at a time: each locks its own rows and waits for those of the other
            connection.execute("SELECT FROM pgsub.subscription WHERE subid = %s FOR NO KEY UPDATE", (subid,))
            fence(connection, *under)
        rows = connection.execute(
            "INSERT INTO pgsub.control AS c (subid, worker, epoch, token)"
            " SELECT %s, w, 1, %s FROM pg_catalog.unnest(%s::oid[]) AS w ORDER BY w"
            " ON CONFLICT (subid, worker) DO UPDATE SET epoch = c.epoch + 1, token = excluded.token,"
            " claimed_by = NULL, claimed_host = NULL, claimed_pid = NULL, stop = false RETURNING worker::bigint, epoch",
            (subid, token, list(workers)),
        ).fetchall()
    epochs: dict[int, int] = dict(rows)
    roles = {role: epoch for worker, epoch in epochs.items() for role in _roles(worker)}
    # guard: a take-over ends older sessions
    evict(connection, subid, roles)
    return {worker: Claim(subid, worker, epoch, str(token)) for worker, epoch in epochs.items()}


def _roles(worker: int) -> tuple[str, ...]:
    return ("apply",) if worker == APPLY else (f"sync:{worker}", f"copy:{worker}")


def evict(connection: psycopg.Connection, subid: int, epochs: dict[str, int] | None = None) -> None:
    """Terminate sessions of a subscription's workers and wait until none is left.

    :param epochs: ends sessions of these roles with a lower epoch; None ends all sessions.
    """
    name = _PATTERN.format(subid)
    numbers = None if epochs is None else list(epochs.values())
    deadline = time.monotonic() + _EVICT_SECONDS
    while connection.execute(_EVICT, (name, numbers, list(epochs or ()), numbers)).fetchall():
        if time.monotonic() > deadline:
            raise TargetUnavailable("could not end an older worker's session on the target")


def present(value: str | None) -> str:
    """Return a value of the ledger that every subscription has.

    :raises Fenced: the subscription is gone.
    """
    if value is None:
        raise Fenced("the subscription was removed from the ledger")
    return value


def fence(connection: psycopg.Connection, *claims: Claim) -> None:
    """Protect control rows of a subscription's workers from a take-over until this (short) transaction ends."""
    if not claims:
        return
    if len(_held(connection, claims, "FOR SHARE OF c")) != len(claims):
        raise Fenced("another worker took over")


def taken_over(connection: psycopg.Connection, claims: Sequence[Claim]) -> set[int]:
    """Return the workers of a subscription whose epoch was raised since their claims were made."""
    return set(numbers(claims)) - _held(connection, claims)


def _held(connection: psycopg.Connection, claims: Sequence[Claim], lock: str = "") -> set[int]:
    rows = connection.execute(
        "SELECT worker::bigint FROM pgsub.control c JOIN unnest(%s::oid[], %s::bigint[], %s::uuid[])"
        f" AS k (worker, epoch, token) USING (worker, epoch, token) WHERE c.subid = %s ORDER BY worker {lock}".encode(),
        (numbers(claims), [c.epoch for c in claims], [c.token for c in claims], claims[0].subid),
    )
    return {worker for (worker,) in rows}


def numbers(claims: Sequence[Claim]) -> list[int]:
    """Return the workers of these claims."""
    return [claim.worker for claim in claims]


def ask_to_stop(connection: psycopg.Connection, subid: int) -> None:
    """Set the stop flag of every worker. Each worker reads it at a transaction boundary.

    A row that another session has locked is passed over: ask again.
    """
    connection.execute(
        "UPDATE pgsub.control SET stop = true WHERE (subid, worker) IN (SELECT subid, worker FROM pgsub.control"
        " WHERE subid = %s AND NOT stop FOR UPDATE SKIP LOCKED)",
        (subid,),
    )


def ask_to_record(connection: psycopg.Connection, subid: int, position: int) -> None:
    """Ask apply to record a position in the ledger as soon as it is reached, not only at the status interval.

    The last request counts. A row that another session has locked is passed over: the position is recorded later then.
    """
    connection.execute(
        "UPDATE pgsub.control SET wanted_lsn = %s WHERE (subid, worker) IN (SELECT subid, worker FROM pgsub.control"
        " WHERE subid = %s AND worker = 0 FOR UPDATE SKIP LOCKED)",
        (format_lsn(position), subid),
    )


def withdraw(connection: psycopg.Connection, claim: Claim) -> bool:
    """Raise the epoch of a worker that has not taken its claim yet, so that it ends as soon as it begins.

    :return: whether it had not taken it. A worker that has must be asked: :func:`ask_to_stop`.
    """
    row = connection.execute(
        "UPDATE pgsub.control SET epoch = epoch + 1"
        " WHERE subid = %s AND worker = %s AND epoch = %s AND claimed_by IS NULL RETURNING true",
        (claim.subid, claim.worker, claim.epoch),
    ).fetchone()
    return row is not None
