"""From the ledger and the workers' pulses into the state store. Nothing here decides anything.

``state.db`` follows outside the chain that carries the promise: only durable positions, and conflicts before the
feedback that passes them (the worker holds its feedback back until the event is gone from the ledger).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import psycopg

from pgsub import failpoints
from pgsub.catalog.conflicts import APPLIED, SKIPPED
from pgsub.catalog.rows import CopyRow, PreparedRow, RelationRow, WorkerRow
from pgsub.catalog.store import StateStore
from pgsub.catalog.times import wire_time
from pgsub.launcher import faults
from pgsub.launcher.copies import Copies
from pgsub.launcher.held import HeldTables
from pgsub.protocol.lsn import parse_lsn
from pgsub.pulse import Pulse, PulseReceiver
from pgsub.subscription import Subscription
from pgsub.target import ledger, skip, two_phase
from pgsub.target.ledger import RelationState
from pgsub.target.two_phase import Pending

Log = Callable[[str, str], None]

_COUNTED = ("changes_in_sets", "changes_folded", "serial_relations", "set_fallbacks")
#: A pulse older than this shows nothing any more: its worker hangs or is gone.
STALE_SECONDS = 30.0
#: Table states that did not change in the ledger are written again so often, for the store may have been changed by
#: others; without a change of theirs nothing is written.
AGAIN_SECONDS = 1.0

# A new row version has another place or another xmin. Both are gone with the session when the target crashes.
_FINGERPRINT = """
SELECT count(*), sum(pg_catalog.hashtextextended(
       pg_catalog.concat_ws(' ', r.ctid, r.xmin, c.relnamespace, n.nspname, c.relname), 0))
  FROM pgsub.subscription_rel r LEFT JOIN pg_catalog.pg_class c ON c.oid = r.srrelid
  LEFT JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE r.subid = %s
"""
_PROGRESS = """
SELECT least(p.remote_lsn, p.reported_lsn)::text, p.remote_lsn::text, s.two_phase::text, c.skip_lsn::text, c.skip_rows,
       c.skip_lsns::text[], c.skip_rules
  FROM pgsub.progress p JOIN pgsub.subscription s USING (subid) JOIN pgsub.control c USING (subid, worker)
 WHERE subid = %s AND worker = 0
"""


class Mirror:
    """Keeps one subscription's rows of the state store.

    :param session: the launcher's own target session.
    :ivar relations: the ledger's table states; ``two_phase`` and ``remote_lsn`` likewise.
    :ivar held: tables whose changes are kept.
    """

    def __init__(
        self, session: psycopg.Connection, store: StateStore, sub: Subscription, pulses: PulseReceiver, log: Log
    ) -> None:
        self._session = session
        self._store = store
        self._sub = sub
        self._pulses = pulses
        self._log = log
        self._copies = Copies()
        self.held = HeldTables(session, sub.subid)
        self._counted: dict[tuple[int, int], Counter[str]] = {}  #: by worker and epoch
        self._fingerprint: tuple[Any, ...] | None = None
        self._write_at = 0.0  #: when the table states are written at the latest
        self._shown_two_phase = sub.two_phase  #: in the state store
        self.two_phase = sub.two_phase
        self.relations: list[RelationState] = []
        self.remote_lsn = 0

    def refresh(self, *, apply_alive: bool, syncing: set[int]) -> None:
        """Read the ledger and write what changed.

        :param apply_alive: whether the apply job runs.
        :param syncing: relids whose sync worker runs.
        """
        subid = self._sub.subid
        self._read_relations()
        row = self._session.execute(_PROGRESS.encode(), (subid,)).fetchone()
        prepared = two_phase.pending(self._session, subid) if row is not None and row[2] != two_phase.DISABLED else []
        pulses = [p for age, p in self._pulses.of(subid) if age < STALE_SECONDS]
        copies = self._copying(pulses, syncing)
        held = self.held.read(self.relations)
        failpoints.point("mirror.before_state_db")
        with self._store.batch():
            self._write_relations()
            if row is not None:
                self.remote_lsn = parse_lsn(row[1])
                self._store.put_origin(subid, parse_lsn(row[0]), None)
                self._two_phase(row[2], prepared)
                self._skip(skip.decoded(*row[3:6]), skip.floods(row[6]))
            self._store.put_workers(subid, self._workers(pulses, apply_alive, syncing))
            self._store.put_copy_progress(subid, copies)
            self._store.put_held(subid, held)
            self._count(pulses)

    def _count(self, pulses: list[Pulse]) -> None:
        """Add what workers have counted since it was last added; a pulse tells what its worker has since its start."""
        steps: Counter[str] = Counter()
        for pulse in pulses:
            if pulse.chunk < 0:
                worker, now = (pulse.worker, pulse.epoch), Counter({name: getattr(pulse, name) for name in _COUNTED})
                steps.update(now - self._counted.get(worker, Counter()))
                self._counted[worker] = now
        if steps:
            self._store.add_stats(self._sub.subid, **steps)

    def _two_phase(self, state: str, prepared: list[Pending]) -> None:
        rows = [PreparedRow(one.gid, one.xid, one.prepare_lsn, one.prepared_at) for one in prepared]
        self._store.put_prepared(self._sub.subid, rows)
        self.two_phase = state
        if state != self._shown_two_phase:
            self._store.alter(self._sub.subid, two_phase=state)
            self._shown_two_phase = state
            if state == two_phase.ENABLED:
                self._log("LOG", f'two_phase is enabled for subscription "{self._sub.name}"')

    def _skip(self, pending: skip.Skip | None, rules: Sequence[skip.Flood]) -> None:
        """What the command that set it wrote may have come after it was consumed."""
        shown, lsn, skips = self._store.subscription_by_id(self._sub.subid), 0, skip.shown(pending, rules)
        if pending is not None:
            lsn = pending.lsn
        if shown is not None and (shown.skip_lsn, shown.skips) != (lsn, skips):
            self._store.alter(self._sub.subid, skip_lsn=lsn, skips=skips)

    def _read_relations(self) -> None:
        """Read the table states if one changed: a thousand of them four times a second would be all that is done."""
        found = self._session.execute(_FINGERPRINT.encode(), (self._sub.subid,)).fetchone()
        if found != self._fingerprint:
            self.relations = ledger.relations(self._session, self._sub.subid)
            self._fingerprint, self._write_at = found, 0.0

    def _write_relations(self) -> None:
        clock = time.monotonic()
        if clock >= self._write_at:
            rows = [RelationRow(r.srrelid, r.srsubstate, r.srsublsn, r.schemaname, r.relname) for r in self.relations]
            self._store.put_relations(self._sub.subid, rows)
            self._write_at = clock + AGAIN_SECONDS

    def apply_pulse(self) -> Pulse | None:
        """The apply worker's newest pulse."""
        return self._pulses.newest(self._sub.subid, ledger.APPLY)

    def _workers(self, pulses: list[Pulse], apply_alive: bool, syncing: set[int]) -> list[WorkerRow]:
        rows: dict[int, WorkerRow] = {}
        for pulse in pulses:
            alive = apply_alive if pulse.worker == ledger.APPLY else pulse.worker in syncing
            if alive and (pulse.worker not in rows or pulse.chunk < 0):
                rows[pulse.worker] = _worker(pulse)
        shown = [rows[worker] for worker in sorted(rows)]
        apply = self.apply_pulse() if apply_alive else None
        if apply is not None and ledger.APPLY in rows:  # threads of the leader's process
            shown += [WorkerRow("parallel apply", apply.pid, leader_pid=apply.pid)] * apply.parallel
        return shown

    def _copying(self, pulses: list[Pulse], syncing: set[int]) -> list[CopyRow]:
        relations = [one for one in self.relations if one.srrelid in syncing]
        rows = self._copies.read(self._session, self._sub.subid, relations, pulses)
        return [replace(row, datid=self._sub.dboid, datname=self._session.info.dbname) for row in rows]

    def events(self) -> None:
        """Move conflicts and messages from the ledger into log and state store, then let the worker's feedback pass."""
        rows = self._session.execute(
            "SELECT id, body FROM pgsub.event WHERE subid = %s ORDER BY id LIMIT 1000", (self._sub.subid,)
        ).fetchall()
        if not rows:
            return
        with self._store.batch():
            for _, body in rows:
                self._tell(body)
            self._record([(event, body) for event, body in rows if body["kind"] == "conflict"])
            for _, body in rows:  # what became of conflicts, those of the same commit too
                if body["kind"] == "skipped":
                    self._store.conflicts_skipped(self._sub.subid, parse_lsn(body["finish_lsn"]))
                elif body["kind"] == "replayed":
                    place = (parse_lsn(body["finish_lsn"]), body.get("conflict"), body.get("table"))
                    self._store.conflicts_replayed(self._sub.subid, *place)
                elif body["kind"] == "advanced":
                    self._store.conflicts_left_out(self._sub.subid, parse_lsn(body["from"]), parse_lsn(body["to"]))
        self._session.execute("DELETE FROM pgsub.event WHERE id = ANY (%s)", ([row[0] for row in rows],))

    def _record(self, conflicts: list[tuple[int, dict[str, Any]]]) -> None:
        if conflicts:
            found = [faults.conflict_row(self._sub, body, _action(body), event) for event, body in conflicts]
            added = self._store.add_conflicts(found)
            met = Counter(f"confl_{row.conflict_type}" for row, one in zip(found, added, strict=True) if one.new)
            self._store.add_stats(self._sub.subid, **met)

    def _tell(self, body: dict[str, Any]) -> None:
        """What the log is told of an event."""
        if body["kind"] == "message":
            self._message(body)
        elif body["kind"] == "log":
            self._log(body["level"], body["text"])
        elif body["kind"] == "conflict" and not body.get("quiet"):
            self._conflict(body)

    def _message(self, body: dict[str, Any]) -> None:
        place = f" in transaction {body['xid']}" if body["transactional"] else ""
        text = f'logical decoding message "{body["prefix"]}": {body["content"]}'.replace("\n", "\n\t")
        self._log(
            "LOG",
            f'{text}\nCONTEXT:  processing remote data for replication origin "pgsub_{self._sub.subid}" during message'
            f' type "MESSAGE"{place}, emitted at {body["lsn"]}',
        )

    def _conflict(self, body: dict[str, Any]) -> None:
        self._log("LOG", f"{body['message']}\nDETAIL:  {body['detail']}\nCONTEXT:  {body['context']}")


def _action(body: dict[str, Any]) -> str:
    """What a worker did with a conflict that did not stop it, or does not any more."""
    if body.get("action"):
        return str(body["action"])
    return APPLIED if body["conflict_type"].endswith("_origin_differs") else SKIPPED


def _worker(pulse: Pulse) -> WorkerRow:
    apply = pulse.worker == ledger.APPLY
    return WorkerRow(
        "apply" if apply else "table synchronization",
        pulse.pid,
        relid=None if apply else pulse.worker,
        received_lsn=pulse.received_lsn or None,
        last_msg_send_time=wire_time(pulse.last_msg_send_time) if pulse.last_msg_send_time else None,
        last_msg_receipt_time=wire_time(pulse.last_msg_receipt_time) if pulse.last_msg_receipt_time else None,
        latest_end_lsn=pulse.latest_end_lsn or None,
        latest_end_time=wire_time(pulse.latest_end_time) if pulse.latest_end_time else None,
    )
