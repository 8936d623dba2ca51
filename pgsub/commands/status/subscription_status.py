"""One subscription as its views show it. The parts are rows of the server's views (``system_views.sql``).

The state, the lag, and the operator's next command are derived from them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from pgsub.catalog.conflicts import STOPPED
from pgsub.catalog.locks import launcher_lock, subscription_lock
from pgsub.catalog.rows import SLOT_SECONDS, ConflictRow, ErrorRow, RelationRow, ServerRow, WorkerRow
from pgsub.catalog.store import StateStore
from pgsub.catalog.times import ago, seconds_since
from pgsub.commands.status import apply_lag, blocked_state
from pgsub.common import errors
from pgsub.common.errors import PgsubError, ReplicationBroken, SlotLost, SparkUnusable, WorkerDied
from pgsub.common.quoting import word
from pgsub.common.subscription import BACK_SUFFIX, Subscription
from pgsub.launcher.error_handling import APPLY
from pgsub.protocol.lsn import format_lsn, parse_lsn

Row = dict[str, Any]
#: Seconds without the launcher's sign of life, which comes every second, after which its data are outdated.
UNHEARD_SECONDS = 15.0
_BOOLEANS = {
    *("subenabled", "subbinary", "subdisableonerr", "subpasswordrequired", "subrunasowner", "subfailover"),
    *("subretaindeadtuples", "subretentionactive", "pgsub_copy_atomic", "pgsub_password_enforced"),
    "pgsub_messages",
    *("temporary", "active", "two_phase", "conflicting", "failover", "synced", "identical", "waiting_at_least"),
    *("releasing", "pgsub_sequences", "publisher_is_called", "target_is_called"),
}
_JSON = {
    *("subpublications", "pgsub_unavailable", "pgsub_skips", "pgsub_on_conflict"),
    *("remote_tuple", "local_tuple", "replica_identity", "local_conflicts"),
}


@dataclass(frozen=True)
class SubscriptionStatus:
    """One subscription as its views show it."""

    definition: Subscription
    state: str  #: running, waiting, stopped, disabled, blocked, error
    lag: float | None  #: lag of apply in seconds, from the publisher's last messages
    waits: Row | None  #: since when apply has been silent, and what it waits for
    table_waits: list[Row]  #: the same for tables whose synchronization waits for a lock
    applying: Row | None  #: number of applying sessions and the reason, if apply chooses it
    task: Row | None  #: pgsub_task: submitted, claimed, alive
    columns: Row  #: pg_subscription
    relations: list[Row]
    sequences: list[Row]  #: pgsub_sequence
    origin: Row | None
    reported_lsn: str | None  #: last position in feedback, even of a worker that has ended
    workers: list[Row]
    stats: Row | None
    slot: Row | None
    prepared: list[Row]  #: pgsub_prepared_pending, oldest first
    held: list[Row]  #: pgsub_held_table
    skipped: Row | None  #: pgsub_skipped
    copies: list[Row]  #: pg_stat_progress_copy with the seconds left
    errors: list[ErrorRow]  #: unresolved ones, newest first
    blocked: Row | None  #: since when, why, and the amount of waiting changes
    served: bool  #: a living launcher serves it
    launched: bool  #: a launcher serves the whole state folder, with all enabled subscriptions
    stopped_by: list[ConflictRow]  #: conflicts that stop apply, newest first
    unheard: int | None  #: PID of a launcher that is silent or waits for the target
    switchover: str | None  #: command that shows the state of a running switchover

    @property
    def broken(self) -> ErrorRow | None:
        """The permanent error of apply, None if there is none. Errors of tables do not count."""
        rows = (row for row in self.errors if row.worker == APPLY)
        return next((row for row in rows if issubclass(error_class(row), ReplicationBroken)), None)

    @property
    def lost(self) -> bool:
        """Whether replication cannot continue: there is a permanent error, or the slot has lost WAL."""
        return self.broken is not None or (self.slot or {}).get("wal_status") == "lost"

    @property
    def slot_lost(self) -> bool:
        """Whether an error says that the slot is lost. The slot may no longer exist then."""
        return self.broken is not None and error_class(self.broken) is SlotLost

    @property
    def next(self) -> str | None:
        """The operator's next command, None if nothing has failed or stopped."""
        if self.state == "waiting" and self.task is not None and self.task["next"]:
            return str(self.task["next"])
        if self.state == "stopped" and not self.launched:
            return f"pgsub run {word(self.definition.name)}"
        if self.blocked is not None:
            return str(self.blocked["next"])
        return blocked_state.next_command(self.definition, self.errors, self.stopped_by) or self.switchover

    @property
    def last_error(self) -> str | None:
        """The newest error in one line, None if there is none."""
        return blocked_state.said(self.errors[0]) if self.errors else None

    @property
    def applied_lsn(self) -> str | None:
        """The position up to which everything is applied, including WAL without transactions."""
        apply = next((row for row in self.workers if row["worker_type"] == APPLY), {})
        known = (self.origin or {}).get("remote_lsn"), apply.get("latest_end_lsn"), self.reported_lsn
        texts = filter(None, (*known, (self.slot or {}).get("confirmed_flush_lsn")))
        return max(texts, key=parse_lsn, default=None)

    @property
    def waits_for(self) -> str | None:
        """What the subscription, else apply, else a table waits for; None if nothing is known."""
        if self.state == "waiting" and self.task is not None:
            return str(self.task["waits_for"])
        if self.waits is not None and self.waits["for"]:
            return str(self.waits["for"])
        return next((f"{row['for']} ({row['schemaname']}.{row['relname']})" for row in self.table_waits), None)

    @property
    def slot_as_of(self) -> str | None:
        """When the slot was last seen, if that is so long ago that its figures are outdated, else None."""
        taken_at: str | None = (self.slot or {}).get("taken_at")
        return taken_at if taken_at is not None and seconds_since(taken_at) >= SLOT_SECONDS else None

    def document(self) -> Row:
        """Return the subscription's object in JSON documents. Its schema is part of the contract."""
        before = ("relations", "origin", "workers", "stats", "slot", "prepared", "held", "skipped", "copies", "state")
        after = ("blocked", "waits", "table_waits", "applying", "task", "sequences")
        return {
            **self.columns,
            **{part: getattr(self, part) for part in before},
            "last_error": _error_object(self.errors[0]) if self.errors else None,
            **{part: getattr(self, part) for part in after},
        }


def serving(store: StateStore, folder: Path, subid: int) -> bool:
    """Return whether a living launcher serves the subscription: the recorded one still holds its lock."""
    server = store.server(subid)
    if server is None:
        return False
    holders = (launcher_lock(folder).holder(), subscription_lock(folder, subid).holder())
    return any(holder is not None and holder.startswith(f"pid {server.pid} ") for holder in holders)


def error_class(row: ErrorRow) -> type[PgsubError]:
    """Return the exception class of a recorded error."""
    found = getattr(errors, row.class_, None)
    return found if isinstance(found, type) and issubclass(found, PgsubError) else PgsubError


def of_spark(row: ErrorRow, task: Row) -> bool:
    """Return whether an error only says how a worker ended, and nothing about the next worker.

    :param task: the next worker's row of pgsub_task. Errors of Spark concern it until Spark has accepted it.
    """
    found = error_class(row)
    return issubclass(found, WorkerDied) or (issubclass(found, SparkUnusable) and task["stage"] != "none")


def read_status(store: StateStore, folder: Path, sub: Subscription) -> SubscriptionStatus:
    """Read the status of a subscription from one snapshot of the store."""

    def rows(view: str, *order: str, own: bool = False) -> list[Row]:
        found = view_rows(store, view, sub.subid)[1]
        found = [{key: value for key, value in row.items() if key != "subid"} for row in found] if own else found
        return sorted(found, key=itemgetter(*order)) if order else found

    def row(view: str, *, own: bool = False) -> Row | None:
        return next(iter(rows(view, own=own)), None)

    problems = store.errors(sub.subid)
    served = serving(store, folder, sub.subid)
    silence = subscription_lock(folder, sub.subid).silence() if served else 0.0
    server = store.server(sub.subid)
    # Only the holder's machine sees its lock held, so the clock is the same. Host names may differ, as in containers.
    # guard: a silent launcher is noticed under any host name, without "server if silence > UNHEARD_SECONDS else "
    unheard = server if silence > UNHEARD_SECONDS else None
    task = row("pgsub_task", own=True) if served else None
    if unheard is not None:
        task = _unheard(sub, unheard, task, silence)
    workers = store.workers(sub.subid)
    worker = next((one for one in workers if one.worker_type == APPLY), None)
    waits = _waits(worker) if served else None
    state = _state(sub, problems, served, task, waits if unheard is None else None)
    conflicts = store.conflicts(sub.subid, 10, action=STOPPED)
    left = {copy.relid: copy.seconds_left for copy in store.copy_progress(sub.subid)}
    copies = rows("pg_stat_progress_copy", "schemaname", "relname")
    origin = store.origin(sub.subid)
    lag = apply_lag.seconds(worker, origin, store.slot(sub.subid)) if served else None
    return SubscriptionStatus(
        definition=sub,
        state=state,
        lag=lag if unheard is None else max(lag or 0.0, silence),
        waits=waits,
        table_waits=_table_waits(workers, store.relations(sub.subid)) if served else [],
        applying=_applying(worker),
        task=task,
        columns=rows("pg_subscription")[0],
        relations=rows("pg_subscription_rel", "schemaname", "relname"),
        sequences=rows("pgsub_sequence", "schemaname", "relname", own=True),
        origin=row("pg_replication_origin_status"),
        reported_lsn=format_lsn(origin.reported_lsn) if origin is not None and origin.reported_lsn else None,
        workers=[one for one in rows("pg_stat_subscription") if one["worker_type"] is not None],
        stats=row("pg_stat_subscription_stats"),
        slot=row("pgsub_slot", own=True),
        prepared=rows("pgsub_prepared_pending", "prepared_at", "gid", own=True),
        held=rows("pgsub_held_table", "schemaname", "relname", own=True),
        skipped=row("pgsub_skipped", own=True),
        copies=[{**copy, "seconds_left": left[copy["relid"]]} for copy in copies],
        errors=problems,
        blocked=blocked_state.blocked(sub.name, problems, conflicts, store.slot(sub.subid), waits, state),
        served=served,
        launched=launcher_lock(folder).holder() is not None,
        stopped_by=conflicts,
        unheard=None if unheard is None else unheard.pid,
        switchover=_switchover(store, sub),
    )


def _switchover(store: StateStore, sub: Subscription) -> str | None:
    """Return the command that shows a subscription's switchover. During one, its reverse subscription exists."""
    back = store.way_back_of(sub.subid)
    if back is None:
        return None
    is_back = sub.name == f"{back.name}{BACK_SUFFIX}"
    return f"pgsub switchover {word(back.name if is_back else sub.name)}{' --back' if is_back else ''} --status"


def _unheard(sub: Subscription, server: ServerRow, task: Row | None, silence: float) -> Row:
    """Return the row of a task whose launcher is silent, or waits for the target. Earlier data are outdated."""
    nothing = {"stage": "none", "since": ago(silence), "host": None, "pid": None, "ui": None}
    return {
        **(task or nothing),
        "silent_since": ago(silence),
        "waits_for": f"an answer of the target, or of pgsub run (PID {server.pid})",
        "next": f"pgsub status {word(sub.name)} --runbook",
    }


def _state(
    subscription: Subscription, problems: Sequence[ErrorRow], served: bool, task: Row | None, held_up: Row | None
) -> str:
    """Return the state; ``held_up`` is what apply waits for, unless that is outdated."""
    if not subscription.enabled:
        return "disabled"
    # guard: apply that waits for a transaction that the subscription has prepared is blocked
    if blocked_state.own_prepared(held_up) is not None:
        return "blocked"
    failed = next((problem for problem in problems if problem.worker == APPLY), None)
    waits = task is not None and bool(task["waits_for"])
    if failed is not None and not (waits and task is not None and of_spark(failed, task)):
        return "blocked" if blocked_state.blocks(failed) else "error"
    # guard: a subscription is not running while a table has lost its slot
    if any(error_class(problem) is SlotLost for problem in problems):
        return "error"
    if not served:
        return "stopped"
    return "waiting" if waits else "running"


def _applying(worker: WorkerRow | None) -> Row | None:
    if worker is None or worker.sessions_why is None:
        return None
    return {"sessions": worker.sessions, "why": worker.sessions_why}


def _waits(worker: WorkerRow | None) -> Row | None:
    """Return since when the apply worker has been silent, and what it waits for if known."""
    if worker is None or worker.silent_since is None:
        return None
    return {"since": worker.silent_since, "seconds": seconds_since(worker.silent_since), "for": worker.waits_for}


def _table_waits(workers: Sequence[WorkerRow], relations: Sequence[RelationRow]) -> list[Row]:
    """Return the same for tables whose synchronization waits for something known."""
    waiting = {one.relid: _waits(one) for one in workers if one.relid is not None and one.waits_for is not None}
    found = ((one, waiting.get(one.srrelid)) for one in relations)
    return [{"schemaname": one.schemaname, "relname": one.relname, **row} for one, row in found if row is not None]


def view_rows(store: StateStore, view: str, subid: int | None = None) -> tuple[tuple[str, ...], list[Row]]:
    """Return column names and rows of a view or table of the store."""
    columns, rows = store.view(view, subid)
    return columns, [{column: _value(column, value) for column, value in zip(columns, row)} for row in rows]


def _value(column: str, value: Any) -> Any:
    if value is None:
        return None
    if column in _BOOLEANS:
        return bool(value)
    return json.loads(value) if column in _JSON else value


def _error_object(row: ErrorRow) -> Row:
    names = ("sqlstate", "message", "detail", "relation", "column", "conflict", "finish_lsn", "xid", "at", "attempts")
    fields = {name: getattr(row, name) for name in names}
    return {"class": row.class_, **fields, "finish_lsn": None if row.finish_lsn is None else format_lsn(row.finish_lsn)}
