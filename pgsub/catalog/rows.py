"""Row types of the state store: frozen values, one class for each table that is read or written by rows.

Fields have the names and order of columns in the server's catalogs and views (``system_views.sql``), followed by
pgsub's own. The annotation determines how a field is stored: ``Lsn`` as text ``X/X``, ``Time`` as RFC 3339 UTC text,
``bool`` as 0/1, ``Json`` as a JSON object, ``Rows`` as a JSON array of objects. The subscription's ID is not a field if
calls have it as a parameter.
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
    """pg_subscription_rel without srsubid. Only states that the server stores: i, d, f, s, r."""

    srrelid: int
    srsubstate: str
    srsublsn: Lsn | None
    schemaname: str
    relname: str


@dataclass(frozen=True, slots=True)
class SequenceRow:
    """pgsub_sequence: a sequence after the last attempt to synchronize it.

    Names are the publisher's. States are those of sequences in the server's pg_subscription_rel. Values are last_value
    and is_called, None if not read.

    :ivar srrelid: OID on the target.
    :ivar ahead: how much the target is ahead in the sequence's direction, negative if it is behind.
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
    #: position in feedback, including WAL without transactions
    reported_lsn: Lsn | None = None


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """pgsub_prepared_pending: a transaction that is prepared on the target and undecided on the publisher."""

    gid: str
    xid: int  #: on the publisher
    prepare_lsn: Lsn
    prepared_at: Time


@dataclass(frozen=True, slots=True)
class HeldRow:
    """pgsub_held_table: a table whose changes are kept, and their amount when last seen."""

    srrelid: int
    schemaname: str
    relname: str
    held_at: Time
    releasing: bool  #: its kept changes are being applied
    kept_changes: int
    kept_bytes: int  #: total size of their messages


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """pgsub_skipped: the amount of a subscription's rows in pgsub.skipped_change of the target when last seen."""

    waiting_changes: int  #: not replayed
    replayed_changes: int
    bytes: int  #: of all of them as stored


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """pg_stat_subscription without subid and subname: a running worker.

    :ivar silent_since: time of its last sign of life if that is not recent, because it is inside a statement. For a
        table, also the time since which its copy waits for a lock. For apply, that since which the publisher waits for
        a standby.
    :ivar waits_for: the reason if known.
    :ivar sessions: number of the target's sessions that apply. ``sessions_why`` is the reason if apply chooses it.
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

    :ivar stage: ``none``; ``submitted`` to Spark; ``claimed`` on the target; ``alive``, with a sign of life.
    :ivar since: when that stage began.
    :ivar host: where process ``pid`` claimed it, if known.
    :ivar silent_since: since when there is no sign of life, or no slot for the tables; NULL if nothing is missing.
    :ivar waits_for: what is missing. ``next`` is the operator's command.
    """

    stage: str
    since: Time
    host: str | None = None
    pid: int | None = None
    silent_since: Time | None = None
    waits_for: str | None = None
    next: str | None = None
    ui: str | None = None  #: address of the Spark driver's web pages


#: Seconds after which data of the slot are outdated. The publisher is asked every five seconds.
SLOT_SECONDS = 60.0
#: Commands of a CopyRow. COMPARE, the adoption of a table, does not exist in the server.
COPY, COMPARE = "COPY FROM", "COMPARE"


@dataclass(frozen=True, slots=True)
class CopyRow:
    """pg_stat_progress_copy: a table that is being copied. Sizes are bytes, totals 0 if unknown."""

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
        """The seconds until the end at the present rate, None if the rate or the rest is unknown."""
        left = self.bytes_total - self.bytes_processed
        return -(-left // self.bytes_per_second) if left > 0 and self.bytes_per_second else None


@dataclass(frozen=True, slots=True)
class StatsRow:
    """pg_stat_subscription_stats without subid and subname.

    The last four are pgsub's own: changes executed as sets; those of them that were merged with a later change of the
    same row; relations with many changes that were applied row by row; batches that were rolled back and repeated row
    by row.
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
    """pgsub_conflict: a conflict. The store sets ``id`` 0, ``attempts``, and ``at`` and ``last_at`` if None.

    Rows are JSON objects by column name with the server's text of values, without columns that were not sent.
    """

    subid: int
    subname: str
    conflict_type: str
    schemaname: str | None
    relname: str | None
    #: stopped while apply cannot get past it, then applied or skipped; these also without a stop; replayed
    action: str
    index_name: str | None = None
    key: str | None = None  #: search key of the row as the server shows it: (a)=(1)
    remote_tuple: Json | None = None
    local_tuple: Json | None = None  #: of the first of local_conflicts
    origin: str | None = None  #: origin that wrote the local row; NULL for a local client or if unknown
    remote_xid: int | None = None
    finish_lsn: Lsn | None = None
    remote_commit_ts: Time | None = None
    message: str | None = None
    detail: str | None = None
    identical: bool = False
    attempts: int = 1
    at: Time | None = None  #: time of the first occurrence
    last_at: Time | None = None
    context: str | None = None
    replica_identity: Json | None = None
    local_conflicts: Rows | None = None  #: one per index: index, key, key_columns, row, xid, commit_ts, …
    worker: str | None = None  #: worker that it stopped, as in ErrorRow
    event: int | None = None  #: ID of its event in the ledger, if it was one
    skipped_ref: str | None = None  #: ref of its row of pgsub.skipped_change, if kept by itself
    replayed_at: Time | None = None
    id: int = 0


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """pgsub_error: the last error of a worker. The store sets ``attempts``, ``first_at``, and ``at`` if None."""

    worker: str  #: the worker, whose next success clears the error
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
    restarts: int = 0  #: number of previous ends at the same position, with whatever error
    stuck_since: Time | None = None  #: time of the first of them; the store sets this and restarts

    @classmethod
    def of(cls, error: PgsubError, worker: str, position: int | None = None) -> ErrorRow:
        """Return the row of an exception.

        :param worker: the worker, e.g. ``apply`` or ``table synchronization 16390``.
        :param position: the position of apply.
        """
        names = ("message", "sqlstate", "detail", "hint", "context", "relation", "conflict", "xid", "column")
        fields = {name: getattr(error, name, None) for name in names}  # some exist only in an ApplyError
        lsn = error.finish_lsn
        place: dict[str, Any] = {**fields, "finish_lsn": parse_lsn(lsn) if lsn else None, "position": position}
        return cls(worker, type(error).__name__, **place)


@dataclass(frozen=True, slots=True)
class SlotRow:
    """The subscription's slot in the publisher's pg_replication_slots, and when it was read."""

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
    retained_bytes: int | None = None  #: WAL that the publisher keeps for this slot
    taken_at: Time | None = None
    current_lsn: Lsn | None = None  #: end of the publisher's WAL
    wal_bytes_per_second: int | None = None  #: growth over the last minutes, None before it can be measured
    waiting_transactions: int | None = None  #: behind the transaction that blocks apply, None if none does
    waiting_at_least: bool | None = None  #: whether there may be more


@dataclass(frozen=True, slots=True)
class JournalRow:
    """pgsub_journal: an operator action."""

    id: int
    at: Time
    subid: int | None
    subname: str | None
    action: str
    actor: str
    detail: Json


@dataclass(frozen=True, slots=True)
class VerifiedRow:
    """pgsub_verified: what an unfinished verify has found equal in a table.

    :ivar compared: identifies what was compared and how. The row is valid only for the same.
    :ivar lsn: the position at which the whole table was equal, None if only ranges are known.
    :ivar ranges: bounds, and the equal ranges between them with their positions.
    """

    schemaname: str
    relname: str
    compared: str
    lsn: Lsn | None
    ranges: Json


@dataclass(frozen=True, slots=True)
class ServerRow:
    """pgsub_server: the launcher that serves a subscription. Only a held lock proves that it is alive."""

    pid: int
    host: str
    since: Time
