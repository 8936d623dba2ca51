"""The mirror: copies the ledger and the workers' heartbeats to the state store. Nothing here decides anything.

``state.db`` is not part of the chain that guarantees exactly-once. It shows only durable positions. It shows a conflict
before the feedback passes it, because the worker holds back feedback until the event is deleted from the ledger.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg

from pgsub.catalog.rows import CopyRow, HeldRow, PreparedRow, RelationRow, SkippedRow, TaskRow, WorkerRow
from pgsub.catalog.store import StateStore
from pgsub.common import failpoints
from pgsub.common.conflict_rules import Rule
from pgsub.common.errors import Log, StateStoreError
from pgsub.common.subscription import Subscription
from pgsub.common.worker_heartbeat import Heartbeat
from pgsub.launcher.heartbeat_receiver import HeartbeatReceiver
from pgsub.launcher.mirror import worker_rows
from pgsub.launcher.mirror.concurrent_writes import ConcurrentWrites
from pgsub.launcher.mirror.copy_progress import CopyProgress
from pgsub.launcher.mirror.held_stats import HeldTableStats
from pgsub.launcher.mirror.lock_waits import WaitLog
from pgsub.launcher.mirror.throttled_query import ThrottledQuery
from pgsub.launcher.mirror.worker_rows import WorkerRows
from pgsub.launcher.recorder import Run
from pgsub.protocol.lsn import parse_lsn
from pgsub.target.ledger import skip, skipped_changes, subscriptions, two_phase_state, worker_takeover
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.ledger.two_phase_state import Pending
from pgsub.target.session import origins

#: Seconds after which unchanged table states are compared with the state store again, since others may have changed it.
#: Without such a change nothing is written.
AGAIN_SECONDS = 1.0
#: Attempts per refresh to read the ledger and write without a concurrent write by a command.
TRIES = 3

# A new row version has a different ctid or xmin. If the target crashes, the session and this fingerprint are lost.
_FINGERPRINT = """
SELECT count(*), sum(pg_catalog.hashtextextended(
       pg_catalog.concat_ws(' ', r.ctid, r.xmin, c.relnamespace, n.nspname, c.relname), 0))
  FROM pgsub.subscription_rel r LEFT JOIN pg_catalog.pg_class c ON c.oid = r.srrelid
  LEFT JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE r.subid = %s
"""
_PROGRESS = """
SELECT least(p.remote_lsn, p.reported_lsn)::text, p.remote_lsn::text, s.two_phase::text, c.skip_lsn::text, c.skip_rows,
       c.skip_lsns::text[], c.skip_rules, p.reported_lsn::text
  FROM pgsub.progress p JOIN pgsub.subscription s USING (subid) JOIN pgsub.control c USING (subid, worker)
 WHERE subid = %s AND worker = 0
"""


class Mirror:
    """The rows of one subscription in the state store.

    :param session: the launcher's own session on the target.
    :param run: runs a write to the store or raises StateStoreError. See :class:`pgsub.launcher.recorder.Recorder`.
    :ivar relations: the ledger's table states. ``two_phase``, ``remote_lsn`` and ``reported_lsn`` are also from it.
    :ivar held: the held tables, whose changes are kept.
    """

    def __init__(
        self,
        session: psycopg.Connection,
        store: StateStore,
        sub: Subscription,
        heartbeats: HeartbeatReceiver,
        run: Run = lambda work: work(),
        log: Log = lambda level, text: None,
    ) -> None:
        self._session = session
        self._store = store
        self._sub = sub
        self._heartbeats = heartbeats
        self._run = run
        self._copies = CopyProgress()
        self.held = HeldTableStats(session, sub.subid)
        self._shown_tables = ConcurrentWrites(lambda: frozenset(store.relations(sub.subid)))
        self._shown_held = ConcurrentWrites(lambda: frozenset(store.held(sub.subid)))
        self._shown_skip = ConcurrentWrites(self._skips)
        self._outdated = False  #: a command wrote rows that the mirror was about to write
        self._shown_skipped = ConcurrentWrites(lambda: store.skipped(sub.subid))
        with contextlib.suppress(StateStoreError):  # rows that cannot be read now count as changed
            for shown in (self._shown_tables, self._shown_held, self._shown_skip, self._shown_skipped):
                run(shown.remember)
        self._skipped = ThrottledQuery(
            lambda: skipped_changes.usage(session, sub.subid), skipped_changes.Usage(0, 0, 0)
        )
        self._workers = WorkerRows(session, sub.subid)
        self._wait_log = WaitLog(sub, log)
        self._fingerprint: tuple[Any, ...] | None = None
        self._write_at = 0.0  #: latest time of the next write of the table states
        self._shown_two_phase = sub.two_phase  #: as the state store shows it
        self.two_phase = sub.two_phase
        self.relations: list[RelationState] = []
        self.remote_lsn = self.reported_lsn = 0
        self._task: TaskRow | None = None
        self._publisher_waits: Mapping[str, str] = {}
        self._followed: tuple[Any, ...] | None = None  #: what :meth:`follow` wrote last

    def refresh(
        self,
        *,
        apply_alive: bool,
        syncing: set[int],
        task: TaskRow | None = None,
        publisher_waits: Mapping[str, str] | None = None,
    ) -> None:
        """Read the ledger and write what changed. Repeat this if a command changed the state store meanwhile.

        :raises StateStoreError: nothing was written. The attributes have the values that were read.
        :param apply_alive: whether the apply job runs.
        :param syncing: relids whose sync worker runs.
        :param task: the task of the apply worker, None if nothing serves the subscription.
        :param publisher_waits: what apply and the synchronization of tables wait for there, by the name of the slot.
        """
        self._task, self._publisher_waits = task, publisher_waits or {}
        for _ in range(TRIES):
            self._outdated = False
            self._refresh(apply_alive, syncing)
            if not self._outdated:
                return

    def _refresh(self, apply_alive: bool, syncing: set[int]) -> None:
        subid = self._sub.subid
        self._read_relations()
        row = self._session.execute(_PROGRESS.encode(), (subid,)).fetchone()
        prepared = (
            two_phase_state.pending(self._session, subid)
            if row is not None and row[2] != two_phase_state.DISABLED
            else []
        )
        heard = self._heartbeats.of(subid)
        heartbeats = [p for age, p in heard if age < worker_rows.STALE_SECONDS]
        newest = self._heartbeats.newest(subid, worker_takeover.APPLY)
        elsewhere = {r.srrelid: self._publisher_waits.get(r.sync_slot or "") for r in self.relations}
        locks = {relid: elsewhere.get(relid) for relid in syncing}
        away = self._publisher_waits.get(self._sub.slot_name or "")
        workers = self._workers.rows(heard, newest, self._task, apply_alive=apply_alive, syncing=locks, away=away)
        self._wait_log.tell(workers, self.relations)
        copies = self._copying(_newest([heartbeat for _, heartbeat in heard]), syncing)
        held, skipped = self.held.read(self.relations), SkippedRow(*self._skipped())
        if row is not None:
            self.remote_lsn, self.two_phase = parse_lsn(row[1]), row[2]
            self.reported_lsn = parse_lsn(row[7])
        failpoints.point("mirror.before_state_db")
        self._run(lambda: self._write(row, prepared, heartbeats, workers, copies, held, skipped))
        self._answer(row)

    def follow(self) -> None:
        """Write only the progress of apply to the state store, for commands that wait for ``replay_lsn``.

        :raises StateStoreError: nothing was written.
        """
        row = self._session.execute(_PROGRESS.encode(), (self._sub.subid,)).fetchone()
        if row is not None and row != self._followed:
            self._run(lambda: self._write_origin(row))
            self._followed = row
        self._answer(row)

    def _answer(self, row: tuple[Any, ...] | None) -> None:
        """Tell the apply worker which position the state store shows, so that its feedback may include it."""
        if row is not None:
            self._heartbeats.answer(self._sub.subid, worker_takeover.APPLY, parse_lsn(row[0]))

    def _write_origin(self, row: tuple[Any, ...]) -> None:
        self._store.put_origin(self._sub.subid, parse_lsn(row[0]), None, parse_lsn(row[7]))

    def _write(
        self,
        row: tuple[Any, ...] | None,
        prepared: list[Pending],
        heartbeats: list[Heartbeat],
        workers: list[WorkerRow],
        copies: list[CopyRow],
        held: list[HeldRow],
        skipped: SkippedRow,
    ) -> None:
        subid = self._sub.subid
        steps = self._heartbeats.uncounted(subid)
        with self._store.batch():
            self._write_relations()
            if row is not None:
                self._write_origin(row)
                self._two_phase(row[2], prepared)
                self._skip(skip.decoded(*row[3:6]), skip.decoded_rules(row[6]))
            self._store.put_workers(subid, workers)
            self._store.put_task(subid, self._task)
            self._store.put_copy_progress(subid, copies)
            self._write_held(held)
            self._write_skipped(skipped)
            self._origins(heartbeats)
            if steps:
                self._store.add_stats(subid, **steps)
        self._heartbeats.counted(subid, steps)  # after the commit: what is rolled back is written the next time
        if row is not None:
            self._shown_two_phase = row[2]

    def _origins(self, heartbeats: list[Heartbeat]) -> None:
        """Update whether origins are available. Privileges may change, and origins may run out."""
        shown = self._store.subscription_by_id(self._sub.subid)
        for heartbeat in heartbeats:
            if heartbeat.worker == worker_takeover.APPLY and shown is not None:
                others = tuple(name for name in shown.unavailable if name != origins.FEATURE)
                found = (*others, origins.FEATURE) if heartbeat.untagged else others
                if set(found) != set(shown.unavailable):
                    self._store.alter(self._sub.subid, unavailable=found)

    def _two_phase(self, state: str, prepared: list[Pending]) -> None:
        rows = [PreparedRow(one.gid, one.xid, one.prepare_lsn, one.prepared_at) for one in prepared]
        self._store.put_prepared(self._sub.subid, rows)
        if state != self._shown_two_phase:
            self._store.alter(self._sub.subid, two_phase=state)

    def _skip(self, pending: skip.Skip | None, rules: Sequence[Rule]) -> None:
        """Write the pending skip. The command that set it may write it after the worker has already consumed it."""
        wanted = (pending.lsn if pending is not None else 0, skip.shown(pending, rules))
        alter = partial(self._store.alter, self._sub.subid, skip_lsn=wanted[0], skips=wanted[1])
        if not self._shown_skip.write(wanted, alter):
            self._outdated = True

    def _skips(self) -> tuple[int, tuple[str, ...]] | None:
        shown = self._store.subscription_by_id(self._sub.subid)
        return None if shown is None else (shown.skip_lsn, shown.skips)

    def _read_relations(self) -> None:
        """Read the table states if one changed. Reading a thousand of them each time would take all the time."""
        found = self._session.execute(_FINGERPRINT.encode(), (self._sub.subid,)).fetchone()
        if found != self._fingerprint:
            self.relations = subscriptions.relations(self._session, self._sub.subid)
            self._fingerprint, self._write_at = found, 0.0

    def _write_relations(self) -> None:
        clock = time.monotonic()
        if clock < self._write_at:
            return
        rows = [RelationRow(r.srrelid, r.srsubstate, r.srsublsn, r.schemaname, r.relname) for r in self.relations]
        if self._shown_tables.write(frozenset(rows), lambda: self._store.put_relations(self._sub.subid, rows)):
            self._write_at = clock + AGAIN_SECONDS
        else:
            self._fingerprint, self._outdated = None, True

    def _write_held(self, rows: Sequence[HeldRow]) -> None:
        if not self._shown_held.write(frozenset(rows), lambda: self._store.put_held(self._sub.subid, rows)):
            self.held.read_again()
            self._outdated = True

    def _write_skipped(self, row: SkippedRow) -> None:
        shown = row if row.waiting_changes or row.replayed_changes else None
        if not self._shown_skipped.write(shown, lambda: self._store.put_skipped(self._sub.subid, row)):
            self._skipped.expire()
            self._outdated = True

    def position(self) -> int:
        """Return the position of apply in the ledger, including WAL without transactions."""
        return max(self.remote_lsn, self.reported_lsn)

    def _copying(self, heartbeats: list[Heartbeat], syncing: set[int]) -> list[CopyRow]:
        relations = [one for one in self.relations if one.srrelid in syncing]
        rows = self._copies.read(self._session, self._sub.subid, relations, heartbeats)
        return [replace(row, datid=self._sub.dboid, datname=self._session.info.dbname) for row in rows]


def _newest(heartbeats: list[Heartbeat]) -> list[Heartbeat]:
    """Return the heartbeats of each worker's newest attempt, however old: a waiting copy keeps its progress."""
    epochs: dict[int, int] = {}
    for one in heartbeats:
        epochs[one.worker] = max(epochs.get(one.worker, 0), one.epoch)
    return [one for one in heartbeats if one.epoch == epochs[one.worker]]
