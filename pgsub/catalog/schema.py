"""The tables and views of ``state.db`` by version. A released version is never edited. A change is a new one.

Those with a server's name have the columns of the newest server (``pg_subscription.h``, ``pg_subscription_rel.h``,
``system_views.sql``) in its order, followed by pgsub's own.
"""

_SUBSCRIPTION = """
CREATE TABLE pg_subscription (
    oid INTEGER PRIMARY KEY,
    subdbid INTEGER,
    subskiplsn TEXT NOT NULL DEFAULT '0/0',
    subname TEXT NOT NULL UNIQUE,
    subowner INTEGER,
    subenabled INTEGER NOT NULL CHECK (subenabled IN (0, 1)),
    subbinary INTEGER NOT NULL CHECK (subbinary IN (0, 1)),
    substream TEXT NOT NULL CHECK (substream IN ('f', 't', 'p')),
    subtwophasestate TEXT NOT NULL CHECK (subtwophasestate IN ('d', 'p', 'e')),
    subdisableonerr INTEGER NOT NULL CHECK (subdisableonerr IN (0, 1)),
    subpasswordrequired INTEGER NOT NULL CHECK (subpasswordrequired IN (0, 1)),
    subrunasowner INTEGER NOT NULL CHECK (subrunasowner IN (0, 1)),
    subfailover INTEGER NOT NULL CHECK (subfailover IN (0, 1)),
    subretaindeadtuples INTEGER,
    submaxretention INTEGER,
    subretentionactive INTEGER,
    subserver INTEGER,
    subconflictlogrelid INTEGER,
    subconflictlogdest TEXT,
    subconninfo TEXT NOT NULL,
    subslotname TEXT,
    subsynccommit TEXT NOT NULL,
    subwalrcvtimeout TEXT,
    subpublications TEXT NOT NULL,
    suborigin TEXT NOT NULL CHECK (suborigin IN ('any', 'none')),
    pgsub_target TEXT NOT NULL,
    pgsub_owner_name TEXT NOT NULL,
    pgsub_apply_mode TEXT NOT NULL CHECK (pgsub_apply_mode IN ('batched', 'transactional')),
    pgsub_apply_workers INTEGER NOT NULL DEFAULT 1,
    pgsub_max_parallel_apply_workers INTEGER NOT NULL DEFAULT 2,
    pgsub_max_sync_workers INTEGER NOT NULL,
    pgsub_copy_workers INTEGER NOT NULL,
    pgsub_copy_atomic INTEGER NOT NULL CHECK (pgsub_copy_atomic IN (0, 1)),
    pgsub_messages INTEGER NOT NULL DEFAULT 0 CHECK (pgsub_messages IN (0, 1)),
    pgsub_sequences INTEGER NOT NULL DEFAULT 0 CHECK (pgsub_sequences IN (0, 1)),
    pgsub_on_conflict TEXT NOT NULL DEFAULT '[]',
    pgsub_skips TEXT NOT NULL DEFAULT '[]',
    pgsub_password_enforced INTEGER NOT NULL DEFAULT 0 CHECK (pgsub_password_enforced IN (0, 1)),
    pgsub_unavailable TEXT NOT NULL,
    pgsub_moves INTEGER NOT NULL DEFAULT 0,
    pgsub_generation INTEGER NOT NULL DEFAULT 0,
    pgsub_unrefreshed INTEGER NOT NULL DEFAULT 0 CHECK (pgsub_unrefreshed IN (0, 1)),
    pgsub_recorded INTEGER NOT NULL DEFAULT 0,
    pgsub_table_set INTEGER NOT NULL DEFAULT 0,
    pgsub_way_back_of INTEGER,
    pgsub_options_changed_at TEXT NOT NULL
);
CREATE TABLE pg_subscription_rel (
    srsubid INTEGER NOT NULL REFERENCES pg_subscription (oid) ON DELETE CASCADE,
    srrelid INTEGER NOT NULL,
    srsubstate TEXT NOT NULL CHECK (srsubstate IN ('i', 'd', 'f', 's', 'r')),
    srsublsn TEXT,
    schemaname TEXT NOT NULL,
    relname TEXT NOT NULL,
    PRIMARY KEY (srsubid, srrelid)
);
CREATE TABLE pgsub_sequence (
    subid INTEGER NOT NULL REFERENCES pg_subscription (oid) ON DELETE CASCADE,
    srrelid INTEGER,
    srsubstate TEXT NOT NULL CHECK (srsubstate IN ('i', 'r')),
    schemaname TEXT NOT NULL,
    relname TEXT NOT NULL,
    publisher_value INTEGER,
    publisher_is_called INTEGER,
    target_value INTEGER,
    target_is_called INTEGER,
    ahead INTEGER,
    problem TEXT,
    taken_at TEXT NOT NULL,
    PRIMARY KEY (subid, schemaname, relname)
);
"""

# external_id: queries for the server find an origin by this name (ReplicationOriginNameForLogicalRep).
_PROGRESS = """
CREATE TABLE pgsub_origin (
    subid INTEGER PRIMARY KEY REFERENCES pg_subscription (oid) ON DELETE CASCADE,
    remote_lsn TEXT,
    local_lsn TEXT,
    reported_lsn TEXT
);
CREATE VIEW pg_replication_origin_status (local_id, external_id, remote_lsn, local_lsn) AS
    SELECT subid, 'pg_' || subid, remote_lsn, local_lsn FROM pgsub_origin;
CREATE TABLE pgsub_worker (
    subid INTEGER NOT NULL REFERENCES pg_subscription (oid) ON DELETE CASCADE,
    worker_type TEXT NOT NULL,
    pid INTEGER,
    leader_pid INTEGER,
    relid INTEGER,
    received_lsn TEXT,
    last_msg_send_time TEXT,
    last_msg_receipt_time TEXT,
    latest_end_lsn TEXT,
    latest_end_time TEXT,
    silent_since TEXT,
    waits_for TEXT,
    sessions INTEGER,
    sessions_why TEXT
);
CREATE INDEX pgsub_worker_subid ON pgsub_worker (subid);
CREATE VIEW pg_stat_subscription AS
    SELECT s.oid AS subid, subname, worker_type, pid, leader_pid, relid, received_lsn, last_msg_send_time,
           last_msg_receipt_time, latest_end_lsn, latest_end_time
      FROM pg_subscription s LEFT JOIN pgsub_worker w ON w.subid = s.oid;
CREATE TABLE pg_stat_progress_copy (
    pid INTEGER,
    datid INTEGER,
    datname TEXT,
    relid INTEGER NOT NULL,
    command TEXT NOT NULL,
    type TEXT NOT NULL,
    bytes_processed INTEGER NOT NULL,
    bytes_total INTEGER NOT NULL,
    tuples_processed INTEGER NOT NULL,
    tuples_excluded INTEGER NOT NULL,
    tuples_skipped INTEGER NOT NULL,
    subid INTEGER NOT NULL REFERENCES pg_subscription (oid) ON DELETE CASCADE,
    schemaname TEXT NOT NULL,
    relname TEXT NOT NULL,
    chunks_done INTEGER NOT NULL,
    chunks_total INTEGER NOT NULL,
    tuples_total INTEGER NOT NULL,
    started_at TEXT,
    bytes_per_second INTEGER,
    PRIMARY KEY (subid, relid)
);
CREATE TABLE pgsub_slot (
    subid INTEGER PRIMARY KEY REFERENCES pg_subscription (oid) ON DELETE CASCADE,
    slot_name TEXT NOT NULL,
    plugin TEXT,
    slot_type TEXT,
    database TEXT,
    temporary INTEGER,
    active INTEGER,
    active_pid INTEGER,
    restart_lsn TEXT,
    confirmed_flush_lsn TEXT,
    wal_status TEXT,
    safe_wal_size INTEGER,
    two_phase INTEGER,
    inactive_since TEXT,
    conflicting INTEGER,
    invalidation_reason TEXT,
    failover INTEGER,
    synced INTEGER,
    retained_bytes INTEGER,
    taken_at TEXT,
    current_lsn TEXT,
    wal_bytes_per_second INTEGER,
    waiting_transactions INTEGER,
    waiting_at_least INTEGER
);
CREATE TABLE pgsub_task (
    subid INTEGER PRIMARY KEY REFERENCES pg_subscription (oid) ON DELETE CASCADE,
    stage TEXT NOT NULL,
    since TEXT NOT NULL,
    host TEXT,
    pid INTEGER,
    silent_since TEXT,
    waits_for TEXT,
    next TEXT,
    ui TEXT
);
CREATE TABLE pgsub_server (
    subid INTEGER PRIMARY KEY REFERENCES pg_subscription (oid) ON DELETE CASCADE,
    pid INTEGER NOT NULL,
    host TEXT NOT NULL,
    since TEXT NOT NULL
);
CREATE TABLE pgsub_prepared_pending (
    subid INTEGER NOT NULL REFERENCES pg_subscription (oid) ON DELETE CASCADE,
    gid TEXT NOT NULL,
    xid INTEGER NOT NULL,
    prepare_lsn TEXT NOT NULL,
    prepared_at TEXT NOT NULL,
    PRIMARY KEY (subid, gid)
);
CREATE TABLE pgsub_held_table (
    subid INTEGER NOT NULL REFERENCES pg_subscription (oid) ON DELETE CASCADE,
    srrelid INTEGER NOT NULL,
    schemaname TEXT NOT NULL,
    relname TEXT NOT NULL,
    held_at TEXT NOT NULL,
    releasing INTEGER NOT NULL CHECK (releasing IN (0, 1)),
    kept_changes INTEGER NOT NULL,
    kept_bytes INTEGER NOT NULL,
    PRIMARY KEY (subid, srrelid)
);
CREATE TABLE pgsub_skipped (
    subid INTEGER PRIMARY KEY REFERENCES pg_subscription (oid) ON DELETE CASCADE,
    waiting_changes INTEGER NOT NULL,
    replayed_changes INTEGER NOT NULL,
    bytes INTEGER NOT NULL
);
"""

_HISTORY = """
CREATE TABLE pgsub_verified (
    subid INTEGER NOT NULL REFERENCES pg_subscription (oid) ON DELETE CASCADE,
    schemaname TEXT NOT NULL,
    relname TEXT NOT NULL,
    compared TEXT NOT NULL,
    lsn TEXT,
    ranges TEXT NOT NULL,
    PRIMARY KEY (subid, schemaname, relname)
);
CREATE TABLE pgsub_stats (
    subid INTEGER PRIMARY KEY REFERENCES pg_subscription (oid) ON DELETE CASCADE,
    apply_error_count INTEGER NOT NULL DEFAULT 0,
    sync_seq_error_count INTEGER NOT NULL DEFAULT 0,
    sync_table_error_count INTEGER NOT NULL DEFAULT 0,
    confl_insert_exists INTEGER NOT NULL DEFAULT 0,
    confl_update_origin_differs INTEGER NOT NULL DEFAULT 0,
    confl_update_exists INTEGER NOT NULL DEFAULT 0,
    confl_update_deleted INTEGER NOT NULL DEFAULT 0,
    confl_update_missing INTEGER NOT NULL DEFAULT 0,
    confl_delete_origin_differs INTEGER NOT NULL DEFAULT 0,
    confl_delete_missing INTEGER NOT NULL DEFAULT 0,
    confl_multiple_unique_conflicts INTEGER NOT NULL DEFAULT 0,
    stats_reset TEXT,
    changes_in_sets INTEGER NOT NULL DEFAULT 0,
    changes_folded INTEGER NOT NULL DEFAULT 0,
    serial_relations INTEGER NOT NULL DEFAULT 0,
    set_fallbacks INTEGER NOT NULL DEFAULT 0
);
CREATE VIEW pg_stat_subscription_stats AS
    SELECT t.subid, subname, apply_error_count, sync_seq_error_count, sync_table_error_count, confl_insert_exists,
           confl_update_origin_differs, confl_update_exists, confl_update_deleted, confl_update_missing,
           confl_delete_origin_differs, confl_delete_missing, confl_multiple_unique_conflicts, stats_reset,
           sync_table_error_count AS sync_error_count, changes_in_sets, changes_folded, serial_relations, set_fallbacks
      FROM pg_subscription s JOIN pgsub_stats t ON t.subid = s.oid;
CREATE TABLE pgsub_error (
    subid INTEGER NOT NULL REFERENCES pg_subscription (oid) ON DELETE CASCADE,
    worker TEXT NOT NULL,
    class TEXT NOT NULL,
    message TEXT NOT NULL,
    sqlstate TEXT,
    detail TEXT,
    hint TEXT,
    context TEXT,
    relation TEXT,
    conflict TEXT,
    finish_lsn TEXT,
    xid INTEGER,
    at TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    first_at TEXT NOT NULL,
    "column" TEXT,
    position TEXT,
    restarts INTEGER NOT NULL DEFAULT 0,
    stuck_since TEXT,
    PRIMARY KEY (subid, worker)
);
CREATE TABLE pgsub_conflict (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    subid INTEGER NOT NULL,
    subname TEXT NOT NULL,
    at TEXT NOT NULL,
    conflict_type TEXT NOT NULL,
    schemaname TEXT,
    relname TEXT,
    index_name TEXT,
    key TEXT,
    remote_tuple TEXT,
    local_tuple TEXT,
    origin TEXT,
    remote_xid INTEGER,
    finish_lsn TEXT,
    remote_commit_ts TEXT,
    action TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    message TEXT,
    detail TEXT,
    identical INTEGER NOT NULL CHECK (identical IN (0, 1)),
    last_at TEXT NOT NULL,
    context TEXT,
    replica_identity TEXT,
    local_conflicts TEXT,
    worker TEXT,
    event INTEGER,
    skipped_ref TEXT,
    replayed_at TEXT
);
CREATE INDEX pgsub_conflict_event ON pgsub_conflict (subid, event) WHERE event IS NOT NULL;
CREATE INDEX pgsub_conflict_stopped ON pgsub_conflict (subid) WHERE action = 'stopped';
CREATE TABLE pgsub_conflict_dropped (subid INTEGER PRIMARY KEY, dropped INTEGER NOT NULL);
CREATE TABLE pgsub_journal (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at TEXT NOT NULL,
    subid INTEGER,
    subname TEXT,
    action TEXT NOT NULL,
    actor TEXT NOT NULL,
    detail TEXT NOT NULL
);
CREATE INDEX pgsub_journal_first ON pgsub_journal (subid, at);
"""

#: Schema version, and the SQL that upgrades the previous version. ``user_version`` of the file contains the version.
MIGRATIONS: tuple[tuple[int, str], ...] = ((1, _SUBSCRIPTION + _PROGRESS + _HISTORY),)
