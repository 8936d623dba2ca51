"""Free sessions: how many more a role may open on either server (max_connections, CONNECTION LIMIT)."""

from __future__ import annotations

from typing import NamedTuple

import psycopg

from pgsub.target.session import origins

#: Sessions of the target that ``--apply-workers auto`` leaves to others: the larger of this number and this part of
#: max_connections.
LEFT_TO_OTHERS, PART_OF_OTHERS = 4, 0.1
# Reserved connections are not available to everyone. Roles and databases have limits of their own. A session whose
# backend_type the role may not see counts as a client's. "present" are the subscription's own sessions.
_SESSIONS = """
SELECT least(
       current_setting('max_connections')::bigint - CASE WHEN r.rolsuper THEN 0 ELSE
           current_setting('superuser_reserved_connections')::bigint
           + coalesce(current_setting('reserved_connections', true)::bigint, 0) END - a.clients,
       CASE WHEN r.rolconnlimit >= 0 AND NOT r.rolsuper THEN r.rolconnlimit - a.ours END,
       CASE WHEN d.datconnlimit >= 0 AND NOT r.rolsuper THEN d.datconnlimit - a.here END),
       a.present, current_setting('max_connections')::bigint
  FROM pg_catalog.pg_roles r, pg_catalog.pg_database d,
       (SELECT count(*), count(*) FILTER (WHERE usename = current_user),
               count(*) FILTER (WHERE datname = current_database()),
               count(*) FILTER (WHERE usename = current_user AND datname = current_database()
                                  AND application_name LIKE %s)
          FROM pg_catalog.pg_stat_activity
         WHERE datid IS NOT NULL AND coalesce(backend_type, 'client backend') = 'client backend'
       ) AS a (clients, ours, here, present)
 WHERE r.rolname = current_user AND d.datname = current_database()
"""


class SessionCounts(NamedTuple):
    """The sessions of a server, counted.

    :ivar free: sessions that the role may still open.
    :ivar present: existing sessions of the subscription.
    :ivar most: max_connections.
    """

    free: int
    present: int
    most: int


def free_sessions(connection: psycopg.Connection, subid: int = 0) -> SessionCounts | None:
    """Count the sessions that the role of a connection may still open.

    :param subid: subscription whose sessions are counted as present; 0: none.
    :return: None if the server does not tell.
    """
    row = connection.execute(_SESSIONS.encode(), (f"pgsub {subid} %",)).fetchone()
    return None if row is None else SessionCounts(*(int(one) for one in row))


def further_sessions(connection: psycopg.Connection, subid: int, present: int, *, tagged: bool) -> tuple[int, str]:
    """Return how many more sessions ``--apply-workers auto`` may take from the target, and why not more.

    :param connection: the worker's own session, besides which ``present`` others are open.
    :param tagged: each of them needs a replication origin.
    """
    found = free_sessions(connection, subid)
    if found is None:
        return 0, "The target does not say how many sessions are free."
    free = found.free - max(LEFT_TO_OTHERS, round(PART_OF_OTHERS * found.most))
    if free < 1:
        return 0, f"Only {max(found.free, 0)} sessions are free on the target, which are left to others."
    left = origins.spare(connection, subid) if tagged else None
    if left is None:
        return free, ""
    left -= 1 + present
    return min(free, left), "Replication origins of the target are left to others." if left < 1 else ""
