"""The locks on the target for which silent workers wait, and their holders."""

from __future__ import annotations

import psycopg

from pgsub.target.ledger.worker_takeover import WORKER_SESSIONS

#: Seconds without a heartbeat from which on a worker is taken to be inside a statement: it sends several a second.
SILENT_SECONDS = 2.0

_LOCKS = f"""
SELECT pg_catalog.split_part(a.application_name, ' ', 3), t.oid::pg_catalog.regclass::text, b.pid,
       b.usename::text, b.application_name, b.state,
       pg_catalog.left(pg_catalog.regexp_replace(b.query, '\\s+', ' ', 'g'), 80)
  FROM pg_catalog.pg_stat_activity a
 CROSS JOIN LATERAL (SELECT p.pid FROM pg_catalog.unnest(pg_catalog.pg_blocking_pids(a.pid)) AS p (pid) LIMIT 1) AS by
  JOIN pg_catalog.pg_stat_activity b ON b.pid = by.pid
  LEFT JOIN pg_catalog.pg_locks l ON l.pid = a.pid AND NOT l.granted
  LEFT JOIN pg_catalog.pg_class t ON l.locktype IN ('relation', 'tuple') AND t.oid = l.relation
 WHERE {WORKER_SESSIONS} AND a.wait_event_type = 'Lock'
   AND pg_catalog.starts_with(a.application_name, %s)
"""
_STANDBY = f"""
SELECT DISTINCT pg_catalog.split_part(a.application_name, ' ', 3),
       pg_catalog.current_setting('synchronous_standby_names')
  FROM pg_catalog.pg_stat_activity a
 WHERE {WORKER_SESSIONS} AND a.wait_event = 'SyncRep'
   AND pg_catalog.starts_with(a.application_name, %s)
"""


def locks(session: psycopg.Connection, subid: int) -> dict[str, str]:
    """Find the locks, or standbys that confirm a commit, that sessions of a subscription wait for.

    :param session: the launcher's, on the target.
    :return: by role of the session (``apply``, ``sync:16385``): which lock, and who holds it; or which standbys.
    """
    rows = session.execute(_LOCKS.encode(), (f"pgsub {subid} ",)).fetchall()
    found: dict[str, str] = {}
    for role, table, pid, user, name, state, query in rows:
        lock = "" if table is None else f" on table {table}"
        who = ", ".join(filter(None, (user, name or "no name", state)))
        does = f": {query}" if state is not None else ""  # None: only pg_read_all_stats may see that
        found.setdefault(role, f"a lock that PID {pid} holds{lock} ({who}){does}")
    for role, names in session.execute(_STANDBY.encode(), (f"pgsub {subid} ",)).fetchall():
        found[role] = f"a synchronous standby of the target to confirm a commit (synchronous_standby_names = '{names}')"
    return found
