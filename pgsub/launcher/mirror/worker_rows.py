"""Rows of pg_stat_subscription: the workers whose task runs, made from their heartbeats."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import psycopg

from pgsub.catalog.rows import TaskRow, WorkerRow
from pgsub.catalog.times import ago, wire_time
from pgsub.common.worker_heartbeat import Heartbeat
from pgsub.launcher.mirror import lock_waits
from pgsub.launcher.mirror.throttled_query import ThrottledQuery
from pgsub.target.ledger import worker_takeover

#: Age in seconds after which a heartbeat is outdated: its worker hangs or is gone.
STALE_SECONDS = 30.0
#: Roles of sessions on the target that synchronize a table: copying, catching up, and preparing both.
_OF_TABLES = ("copy", "sync", "table")


class WorkerRows:
    """The workers of one subscription.

    :param session: a session on the target, which tells what a worker waits for.
    """

    def __init__(self, session: psycopg.Connection, subid: int) -> None:
        self._locks: ThrottledQuery[dict[str, str]] = ThrottledQuery(lambda: lock_waits.locks(session, subid), {})
        self._silent: dict[int, str] = {}  #: workers without a sign of life, and since when
        self._held_up: dict[int, tuple[float, str]] = {}  #: workers that wait without being silent, and since when

    def rows(
        self,
        heard: Sequence[tuple[float, Heartbeat]],
        newest: Heartbeat | None,
        task: TaskRow | None,
        *,
        apply_alive: bool,
        syncing: Mapping[int, str | None],
        away: str | None = None,
    ) -> list[WorkerRow]:
        """Return a row for each worker. A silent worker's row has its last state and its wait.

        :param heard: heartbeats, each with its age in seconds.
        :param newest: the apply worker's newest heartbeat. ``task`` is its task.
        :param apply_alive: whether the apply job runs.
        :param syncing: relids whose sync worker runs, each with what it waits for on the publisher.
        :param away: the standbys without which the publisher sends apply nothing.
        """
        rows: dict[int, WorkerRow] = {}
        for age, heartbeat in heard:
            alive = apply_alive if heartbeat.worker == worker_takeover.APPLY else heartbeat.worker in syncing
            if alive and (heartbeat.chunk < 0 or (heartbeat.worker not in rows and age < STALE_SECONDS)):
                rows[heartbeat.worker] = self._row(age, heartbeat)
        pid = None if task is None or worker_takeover.APPLY in rows else task.pid
        if unheard := apply_alive and pid is not None:
            rows[worker_takeover.APPLY] = WorkerRow("apply", pid)
        # guard: what apply waits for is shown though no heartbeat of it arrives, without "unheard or "
        asked = unheard or (away and worker_takeover.APPLY in rows)
        elsewhere = {worker_takeover.APPLY: away} if asked else {}
        waiting = self._waiting(rows, {**elsewhere, **syncing})
        rows |= {row.relid or worker_takeover.APPLY: row for row in waiting}
        shown = [rows[worker] for worker in sorted(rows)]
        # parallel apply workers are threads of the leader
        if apply_alive and newest is not None and worker_takeover.APPLY in rows:
            shown += [WorkerRow("parallel apply", newest.pid, leader_pid=newest.pid)] * newest.parallel
        return shown

    def _waiting(self, rows: Mapping[int, WorkerRow], syncing: Mapping[int, str | None]) -> Iterator[WorkerRow]:
        """Yield rows of workers that wait without being silent.

        A copy sends heartbeats only while rows arrive. Apply sends them while the publisher waits for a standby, and on
        some networks none of them arrives.
        """
        locks = self._locks() if syncing else {}
        now, before, self._held_up = time.monotonic(), self._held_up, {}
        for relid in sorted(syncing):
            waits = next(filter(None, map(locks.get, _roles(relid))), syncing[relid])
            if waits is None:
                continue
            began, since = self._held_up[relid] = before.get(relid, (now, ago(0)))
            row = rows.get(relid) or WorkerRow("table synchronization", None, relid=relid)
            if now - began >= lock_waits.SILENT_SECONDS and row.waits_for is None:
                yield replace(row, silent_since=row.silent_since or since, waits_for=waits)

    def _row(self, age: float, heartbeat: Heartbeat) -> WorkerRow:
        row = _row(heartbeat)
        if heartbeat.chunk >= 0:
            return row
        if age < lock_waits.SILENT_SECONDS:
            self._silent.pop(heartbeat.worker, None)
            return row
        role = "apply" if heartbeat.worker == worker_takeover.APPLY else f"sync:{heartbeat.worker}"
        since = self._silent.setdefault(heartbeat.worker, ago(age))  # the first value is kept
        return replace(row, silent_since=since, waits_for=self._locks().get(role))


def _roles(worker: int) -> list[str]:
    """Return the roles of a worker's sessions on the target that may wait."""
    return ["apply"] if worker == worker_takeover.APPLY else [f"{role}:{worker}" for role in _OF_TABLES]


def _row(heartbeat: Heartbeat) -> WorkerRow:
    apply = heartbeat.worker == worker_takeover.APPLY
    return WorkerRow(
        "apply" if apply else "table synchronization",
        heartbeat.pid,
        relid=None if apply else heartbeat.worker,
        received_lsn=heartbeat.received_lsn or None,
        last_msg_send_time=wire_time(heartbeat.last_msg_send_time),
        last_msg_receipt_time=wire_time(heartbeat.last_msg_receipt_time),
        latest_end_lsn=heartbeat.latest_end_lsn or None,
        latest_end_time=wire_time(heartbeat.latest_end_time),
        sessions=heartbeat.sessions if apply else None,
        sessions_why=heartbeat.sessions_why or None,
    )
