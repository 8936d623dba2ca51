"""Free sessions: how many more a role may open on either server (max_connections, CONNECTION LIMIT)."""

from __future__ import annotations

from typing import NamedTuple

import psycopg

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
