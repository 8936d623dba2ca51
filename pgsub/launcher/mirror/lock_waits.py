"""The locks that workers wait for on the target, and copies on the publisher, with their holders.

The publisher itself waits for its standbys: a walsender of a failover slot sends nothing that the standbys of
synchronized_standby_slots lack (StandbySlotsHaveCaughtup). The server writes that to the publisher's log only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from pgsub.catalog.rows import WorkerRow
from pgsub.catalog.times import seconds_since
from pgsub.common.errors import Log, log_text
from pgsub.common.query import STATEMENT, shown
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.target.ledger.prepared_xacts import GENUINE, gid_prefix
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.ledger.worker_takeover import APPLY, WORKER_SESSIONS

#: Seconds without a heartbeat after which a worker is assumed to run a statement. It sends several per second.
SILENT_SECONDS = 2.0
#: Seconds without an answer after which a connected standby counts as one that keeps the publisher waiting.
STANDBY_SILENT_SECONDS = 30
#: Seconds of waiting after which the wait is logged.
LOG_SECONDS = 8.0

# A session that waits for another worker of the same subscription is not reported; that other worker is.
_WAITS = f"""
SELECT {{role}}, t.oid::pg_catalog.regclass::text, by.pid, b.usename::text, b.application_name,
       b.state || CASE b.wait_event WHEN 'SyncRep' THEN ', waits for a synchronous standby' ELSE '' END,
       {STATEMENT.format("b")}, {{prepared}}
  FROM pg_catalog.pg_stat_activity a
 CROSS JOIN LATERAL pg_catalog.unnest(pg_catalog.pg_blocking_pids(a.pid)) AS by (pid)
  LEFT JOIN pg_catalog.pg_stat_activity b ON b.pid = by.pid
  LEFT JOIN pg_catalog.pg_locks l ON l.pid = a.pid AND NOT l.granted
  LEFT JOIN pg_catalog.pg_class t ON l.locktype IN ('relation', 'tuple') AND t.oid = l.relation
 WHERE a.wait_event_type = 'Lock' AND pg_catalog.starts_with(a.application_name, %(own)s) AND {{ours}}
   AND CASE WHEN by.pid = 0 THEN true
            ELSE b.pid IS NOT NULL AND NOT (b.application_name ~ %(workers)s AND {{theirs}}) END
 ORDER BY b.xact_start, by.pid
"""
# The name of the subscription's prepared transaction that holds the lock, if one does. A lock on a table that TRUNCATE
# takes or waits for conflicts with every other; those of other changes do not conflict.
_OWN_PREPARED = f"""
(SELECT x.gid FROM pg_catalog.pg_prepared_xacts x
   JOIN pg_catalog.pg_locks own ON own.locktype = 'transactionid' AND own.transactionid = x.transaction
   JOIN pg_catalog.pg_locks h USING (virtualtransaction)
  WHERE by.pid = 0 AND own.pid IS NULL AND h.pid IS NULL AND h.granted AND h.locktype = l.locktype
    AND (h.transactionid = l.transactionid
         OR h.database = l.database AND h.relation = l.relation AND 'AccessExclusiveLock' IN (h.mode, l.mode))
    AND pg_catalog.starts_with(x.gid, %(gids)s) AND ({GENUINE}) LIMIT 1)"""
_LOCKS = _WAITS.format(
    prepared=_OWN_PREPARED,
    role="pg_catalog.split_part(a.application_name, ' ', 3)",
    ours=WORKER_SESSIONS,
    theirs="pg_catalog.has_table_privilege(b.usesysid, 'pgsub.control', 'UPDATE')",
)
# The query runs only now and then, and a short wait would be shown until the next run. So it skips short waits.
_PUBLISHER_LOCKS = _WAITS.format(
    prepared="NULL",
    role="a.application_name",
    ours=f"""a.datname = pg_catalog.current_database() AND a.usename = current_user
   AND l.waitstart < pg_catalog.clock_timestamp() - '{SILENT_SECONDS} s'::pg_catalog.interval""",
    theirs="b.usename = current_user",
)
# Here workers of the subscription are reported as holders, because apply may hold the row that a command wants.
_OF_SESSION = _WAITS.format(prepared="NULL", role="a.application_name", ours="a.pid = %(pid)s", theirs="false")
_STANDBY = f"""
SELECT DISTINCT pg_catalog.split_part(a.application_name, ' ', 3),
       pg_catalog.current_setting('synchronous_standby_names')
  FROM pg_catalog.pg_stat_activity a
 WHERE {WORKER_SESSIONS} AND a.wait_event = 'SyncRep'
   AND pg_catalog.starts_with(a.application_name, %s)
"""
# A standby that only lags answers, at least every 10 s by default (wal_receiver_status_interval). Others see wait_event
# and the answers only with pg_read_all_stats.
_STANDBYS_AWAY = """
SELECT own.slot_name::text, away.named
  FROM pg_catalog.pg_replication_slots own
  JOIN pg_catalog.pg_stat_activity a ON a.pid = own.active_pid AND a.wait_event = 'WaitForStandbyConfirmation'
 CROSS JOIN LATERAL (
       SELECT pg_catalog.string_agg(pg_catalog.format('slot "%%s" of synchronized_standby_slots %%s', n.name,
              CASE WHEN s.slot_name IS NULL THEN 'does not exist' WHEN s.wal_status = 'lost' THEN 'is lost'
                   WHEN s.active THEN 'is of a standby that does not answer' ELSE 'is inactive' END), ', ')
         FROM (SELECT pg_catalog.lower(pg_catalog.btrim(one, ' "'))
                 FROM pg_catalog.unnest(pg_catalog.string_to_array(
                      pg_catalog.current_setting('synchronized_standby_slots', true), ',')) AS one) AS n (name)
         LEFT JOIN pg_catalog.pg_replication_slots s ON s.slot_name = n.name
         LEFT JOIN pg_catalog.pg_stat_replication r ON r.pid = s.active_pid
        WHERE s.active IS NOT TRUE OR r.reply_time < pg_catalog.clock_timestamp() - %(silent)s::interval
       ) AS away (named)
 WHERE (own.slot_name = %(slot)s OR pg_catalog.starts_with(own.slot_name::text, %(own)s)) AND away.named IS NOT NULL
"""


def locks(session: psycopg.Connection, subid: int) -> dict[str, str]:
    """Find what sessions of a subscription wait for: locks, or standbys that must confirm a commit.

    :param session: the launcher's session on the target.
    :return: by role of the session (``apply``, ``copy:16385``): the lock and its holder, or the standbys.
    """
    own, workers = f"pgsub {subid} ", f"^pgsub {subid} (apply|copy|sync|table)[ :]"
    names = {"own": own, "workers": workers, "gids": gid_prefix(subid)}
    found = _waits(session, _LOCKS, names, "a lock")
    for role, standbys in session.execute(_STANDBY.encode(), (own,)):
        found[role] = _standby(standbys)
    return found


def of_session(session: psycopg.Connection, pid: int) -> str | None:
    """Find the lock or standby that one session of the target waits for.

    :param session: another session of the target.
    """
    query = "SELECT pg_catalog.current_setting('synchronous_standby_names') FROM pg_catalog.pg_stat_activity"
    for (standbys,) in session.execute(f"{query} WHERE pid = %s AND wait_event = 'SyncRep'".encode(), (pid,)):
        return _standby(standbys)
    found = _waits(session, _OF_SESSION, {"own": "", "workers": "", "pid": pid}, "a lock")
    return next(iter(found.values()), None)


def _standby(names: str) -> str:
    what = f"synchronous_standby_names = '{names}'"
    return f"a synchronous standby of the target to confirm a commit ({what})"


def publisher_locks(connection: psycopg.Connection[Any], subid: int) -> dict[str, str]:
    """Find the publisher's locks that table synchronization waits for.

    :return: the lock and its holder, by the name of the slot.
    """
    prefix = f"pgsub_{subid}_sync_"
    return _waits(connection, _PUBLISHER_LOCKS, {"own": prefix, "workers": f"^{prefix}"}, "a lock of the publisher")


def standbys_away(connection: psycopg.Connection[Any], subid: int, slot_name: str) -> dict[str, str]:
    """Find the standbys that the publisher waits for before it sends changes, and that are not connected to it.

    :return: their slots, by the name of the subscription's slot that is kept waiting.
    """
    names = {"slot": slot_name, "own": f"pgsub_{subid}_sync_", "silent": f"{STANDBY_SILENT_SECONDS} s"}
    found = shown(connection, _STANDBYS_AWAY, names)
    return {name: f"a standby of the publisher to receive the changes ({away})" for name, away in found}


def _waits(session: psycopg.Connection[Any], query: str, names: dict[str, Any], lock: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for role, table, pid, user, name, state, text, gid in shown(session, query, names):
        what = "" if table is None else f" on table {table}"
        who = ", ".join(filter(None, (user, name or "no name", state)))
        does = f": {text}" if state is not None else ""  # None: only members of pg_read_all_stats may see it
        prepared = "a prepared transaction" if gid is None else f"the subscription's prepared transaction {gid}"
        holder = f"PID {pid} holds{what} ({who}){does}" if pid else f"{prepared} holds{what}"
        found.setdefault(role, f"{lock} that {holder}")
    return found


class WaitLog:
    """The log records of workers that wait: one with the holder when the wait begins, and one when it ends."""

    def __init__(self, sub: Subscription, log: Log) -> None:
        self._sub = sub
        self._log = log
        self._told: dict[int, str] = {}  #: workers that wait, with their names in the log

    def tell(self, rows: Sequence[WorkerRow], relations: Sequence[RelationState]) -> None:
        """Log what is new in the rows of the workers.

        :param relations: the tables, for their names.
        """
        waiting = {row.relid or APPLY: row for row in rows if row.waits_for is not None}
        for worker in self._told.keys() - waiting.keys():
            self._log("LOG", log_text(f"{self._told.pop(worker)} no longer waits"))
        for worker, row in waiting.items():
            if worker not in self._told and seconds_since(row.silent_since) >= LOG_SECONDS:
                self._told[worker] = self._called(row, relations)
                hint = f"See what to do:\npgsub status {word(self._sub.name)} --runbook"
                self._log("WARNING", log_text(f"{self._told[worker]} waits for {row.waits_for}", hint=hint))

    def _called(self, row: WorkerRow, relations: Sequence[RelationState]) -> str:
        table = next((f', table "{one.relname}"' for one in relations if one.srrelid == row.relid), "")
        return f'logical replication {row.worker_type} worker for subscription "{self._sub.name}"{table}'
