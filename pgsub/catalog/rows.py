"""Row types of the state store: plain frozen values, one class for each table that is read or written by rows.

Fields are named and ordered as the columns of the server's catalogs and views (``system_views.sql``); what is pgsub's
own follows them. The annotation decides how a field is stored: ``Lsn`` as text ``X/X``, ``Time`` as RFC 3339 UTC text,
``bool`` as 0/1, ``Json`` as a JSON object, ``Rows`` as a JSON array of them. The subscription's id is no field where
the call names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from pgsub.common.errors import PgsubError
from pgsub.protocol.lsn import parse_lsn

Lsn: TypeAlias = int
Time: TypeAlias = str
Json: TypeAlias = dict[str, Any]
Rows: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RelationRow:
    """pg_subscription_rel without srsubid. Only states the server stores: i, d, f, s, r."""

    srrelid: int
    srsubstate: str
    srsublsn: Lsn | None
    schemaname: str
    relname: str


@dataclass(frozen=True, slots=True)
class SequenceRow:
    """pgsub_sequence: a sequence as the last attempt to synchronize it left it.

    Names are those of the publisher, states those of a sequence in the server's pg_subscription_rel. Values are
    last_value and is_called; what was not read is None.

    :ivar srrelid: on the target.
    :ivar ahead: by how much the target is ahead, in the direction of the sequence; negative where it is behind.
    :ivar problem: why it is not synchronized.
    """

    srrelid: int | None
    srsubstate: str
    schemaname: str
    relname: str
    publisher_value: int | None
    publisher_is_called: bool | None
    target_value: int | None
    target_is_called: bool | None
    ahead: int | None
    problem: str | None
    taken_at: Time


@dataclass(frozen=True, slots=True)
class OriginRow:
    """Progress in pg_replication_origin_status: durable positions only."""

    remote_lsn: Lsn | None
    local_lsn: Lsn | None
    #: WAL without a transaction included: what feedback has named
    reported_lsn: Lsn | None = None


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """pgsub_prepared_pending: a transaction that is prepared on the target and not decided on the publisher yet."""

    gid: str
    xid: int  #: on the publisher
    prepare_lsn: Lsn
    prepared_at: Time


@dataclass(frozen=True, slots=True)
class HeldRow:
    """pgsub_held_table: a table whose changes are kept, and how much is kept as was seen last."""

    srrelid: int
    schemaname: str
    relname: str
    held_at: Time
    releasing: bool  #: what is kept is being applied
    kept_changes: int
    kept_bytes: int  #: of their messages


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """pgsub_skipped: how much pgsub.skipped_change of the target holds of a subscription, as was seen last."""

    waiting_changes: int  #: not replayed
    replayed_changes: int
    bytes: int  #: of all of them, as stored


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """pg_stat_subscription without subid and subname: one worker that runs now.

    :ivar silent_since: when it was last heard of, where that is not a moment ago: it is inside a statement. Of a table
        also since when its copy waits for a lock.
    :ivar waits_for: what is known of why.
    :ivar sessions: of the target that apply what was committed, and ``sessions_why`` where apply decides how many.
    """

    worker_type: str  #: apply, parallel apply, table synchronization
    pid: int | None
    leader_pid: int | None = None
    relid: int | None = None
    received_lsn: Lsn | None = None
    last_msg_send_time: Time | None = None
    last_msg_receipt_time: Time | None = None
    latest_end_lsn: Lsn | None = None
    latest_end_time: Time | None = None
    silent_since: Time | None = None
    waits_for: str | None = None
    sessions: int | None = None
    sessions_why: str | None = None


@dataclass(frozen=True, slots=True)
class TaskRow:
    """pgsub_task: the task of the apply worker.

    :ivar stage: ``none``; ``submitted`` to Spark; ``claimed`` on the target; ``alive``, a sign of life was seen.
    :ivar since: when that stage began.
    :ivar host: where it was claimed, by process ``pid``, as far as that was asked.
    :ivar silent_since: since when there is no sign of life, or no slot for the tables; NULL where nothing is missing.
    :ivar waits_for: what is missing then; ``next`` is the command of an operator.
    """

    stage: str
    since: Time
    host: str | None = None
    pid: int | None = None
    silent_since: Time | None = None
    waits_for: str | None = None
    next: str | None = None
    ui: str | None = None  #: address of the pages of Spark's driver


#: Seconds after which what the publisher said of the slot tells nothing any more: it is asked every five.
SLOT_SECONDS = 60.0
#: command of a CopyRow; COMPARE, which the server does not have, is the adoption of a table.
COPY, COMPARE = "COPY FROM", "COMPARE"


@dataclass(frozen=True, slots=True)
class CopyRow:
    """pg_stat_progress_copy: one table that is being copied. Sizes in bytes; totals are 0 where unknown."""

    relid: int
    schemaname: str
    relname: str
    pid: int | None = None
    datid: int | None = None
    datname: str | None = None
    command: str = COPY
    type: str = "CALLBACK"
    bytes_processed: int = 0
    bytes_total: int = 0
    tuples_processed: int = 0
    tuples_excluded: int = 0
    tuples_skipped: int = 0
    chunks_done: int = 0
    chunks_total: int = 0
    tuples_total: int = 0
    started_at: Time | None = None  #: when the launcher first saw it
    bytes_per_second: int | None = None  #: over the last seconds, None before it can be measured

    @property
    def seconds_left(self) -> int | None:
        """Seconds until the end at the present rate; None where that or the total is not known."""
        if not self.bytes_per_second or not self.bytes_total:
            return None
        return -(-max(self.bytes_total - self.bytes_processed, 0) // self.bytes_per_second)


@dataclass(frozen=True, slots=True)
class StatsRow:
    """pg_stat_subscription_stats without subid and subname.

    The last four are pgsub's own: changes executed as sets; of them those that a later change of the same row took
    along; relations of a piece that went row by row although they were many; batches that were rolled back and replayed
    row by row.
    """

    apply_error_count: int = 0
    sync_seq_error_count: int = 0
    sync_table_error_count: int = 0
    confl_insert_exists: int = 0
    confl_update_origin_differs: int = 0
    confl_update_exists: int = 0
    confl_update_deleted: int = 0
    confl_update_missing: int = 0
    confl_delete_origin_differs: int = 0
    confl_delete_missing: int = 0
    confl_multiple_unique_conflicts: int = 0
    stats_reset: Time | None = None
    changes_in_sets: int = 0
    changes_folded: int = 0
    serial_relations: int = 0
    set_fallbacks: int = 0


@dataclass(frozen=True, slots=True)
class ConflictRow:
    """pgsub_conflict: one conflict. ``id`` 0, ``at`` and ``last_at`` None and ``attempts`` are filled in by the store.

    Rows are JSON objects by column name, values as the server's text; a column that did not come is not in them.
    """

    subid: int
    subname: str
    conflict_type: str
    schemaname: str | None
    relname: str | None
    #: stopped while apply cannot get past it; then applied or skipped, as for those that never stopped it; replayed
    action: str
    index_name: str | None = None
    key: str | None = None  #: what the row is searched by, as the server shows it: (a)=(1)
    remote_tuple: Json | None = None
    local_tuple: Json | None = None  #: of the first of local_conflicts
    origin: str | None = None  #: that wrote the local row; NULL for a local client, or where nobody knows
    remote_xid: int | None = None
    finish_lsn: Lsn | None = None
    remote_commit_ts: Time | None = None
    message: str | None = None
    detail: str | None = None
    identical: bool = False
    attempts: int = 1
    at: Time | None = None  #: first seen
    last_at: Time | None = None
    context: str | None = None
    replica_identity: Json | None = None
    local_conflicts: Rows | None = None  #: one an index: index, key, key_columns, row, xid, commit_ts, …
    worker: str | None = None  #: that it stopped, as in ErrorRow
    event: int | None = None  #: its id in the ledger, where it came from there
    skipped_ref: str | None = None  #: ref of the row of pgsub.skipped_change, where it was kept by itself
    replayed_at: Time | None = None
    id: int = 0


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """pgsub_error: the last error of one worker. ``at`` None, ``attempts`` and ``first_at`` are the store's."""

    worker: str  #: whose error: a later success of the same worker clears it
    class_: str
    message: str
    sqlstate: str | None = None
    detail: str | None = None
    hint: str | None = None
    context: str | None = None
    relation: str | None = None
    conflict: str | None = None
    finish_lsn: Lsn | None = None
    xid: int | None = None
    at: Time | None = None
    attempts: int = 1
    first_at: Time | None = None
    column: str | None = None
    position: Lsn | None = None  #: of apply when it ended
    restarts: int = 0  #: ends at that very position before this one, whatever their errors
    stuck_since: Time | None = None  #: the first of them; restarts and this are the store's

    @classmethod
    def of(cls, error: PgsubError, worker: str, position: int | None = None) -> ErrorRow:
        """Return the row of an exception.

        :param worker: the worker, e.g. ``apply`` or ``table synchronization 16390``.
        :param position: of apply.
        """
        names = ("message", "sqlstate", "detail", "hint", "context", "relation", "conflict", "xid", "column")
        fields = {name: getattr(error, name, None) for name in names}  # some are of an ApplyError
        lsn = error.finish_lsn
        place: dict[str, Any] = {**fields, "finish_lsn": parse_lsn(lsn) if lsn else None, "position": position}
        return cls(worker, type(error).__name__, **place)


@dataclass(frozen=True, slots=True)
class SlotRow:
    """The subscription's slot as pg_replication_slots on the publisher showed it, and when."""

    slot_name: str
    plugin: str | None = None
    slot_type: str | None = None
    database: str | None = None
    temporary: bool | None = None
    active: bool | None = None
    active_pid: int | None = None
    restart_lsn: Lsn | None = None
    confirmed_flush_lsn: Lsn | None = None
    wal_status: str | None = None
    safe_wal_size: int | None = None
    two_phase: bool | None = None
    inactive_since: Time | None = None
    conflicting: bool | None = None
    invalidation_reason: str | None = None
    failover: bool | None = None
    synced: bool | None = None
    retained_bytes: int | None = None  #: WAL kept on the publisher for this slot
    taken_at: Time | None = None
    current_lsn: Lsn | None = None  #: where the publisher's WAL ended
    wal_bytes_per_second: int | None = None  #: that it grew by over the last minutes, None before it can be measured
    waiting_transactions: int | None = None  #: behind the one that apply is stuck at, None where it is not
    waiting_at_least: bool | None = None  #: there may be more of them


@dataclass(frozen=True, slots=True)
class JournalRow:
    """pgsub_journal: one operator action."""

    id: int
    at: Time
    subid: int | None
    subname: str | None
    action: str
    actor: str
    detail: Json


@dataclass(frozen=True, slots=True)
class VerifiedRow:
    """pgsub_verified: what a verify that has not ended has found equal of one table.

    :ivar compared: a mark of what was compared, and how: with another one the row says nothing.
    :ivar lsn: where all of it was equal; None where ranges of it are known.
    :ivar ranges: bounds, and which ranges between them were equal, and where.
    """

    schemaname: str
    relname: str
    compared: str
    lsn: Lsn | None
    ranges: Json


@dataclass(frozen=True, slots=True)
class ServerRow:
    """pgsub_server: the launcher that serves a subscription. Only a held lock proves that it still lives."""

    pid: int
    host: str
    since: Time
