"""The tables and views of ``state.db`` as its first version created them, and what later ones changed.

Those that bear a server's name have the columns of the newest server (``pg_subscription.h``,
``pg_subscription_rel.h``, ``system_views.sql``) in its order; pgsub's own columns follow.
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
    pgsub_apply_mode TEXT NOT NULL CHECK (pgsub_apply_mode IN ('batched', 'transactional')),
    pgsub_copy_atomic INTEGER NOT NULL CHECK (pgsub_copy_atomic IN (0, 1)),
    pgsub_max_sync_workers INTEGER NOT NULL,
    pgsub_copy_workers INTEGER NOT NULL,
    pgsub_owner_name TEXT NOT NULL,
    pgsub_unavailable TEXT NOT NULL,
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
"""

_PROGRESS = """
CREATE TABLE pgsub_origin (
    subid INTEGER PRIMARY KEY REFERENCES pg_subscription (oid) ON DELETE CASCADE,
    remote_lsn TEXT,
    local_lsn TEXT
);
CREATE VIEW pg_replication_origin_status AS
    SELECT subid AS local_id, 'pgsub_' || subid AS external_id, remote_lsn, local_lsn FROM pgsub_origin;
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
    latest_end_time TEXT
);
CREATE INDEX pgsub_worker_subid ON pgsub_worker (subid);
CREATE VIEW pg_stat_subscription AS
    SELECT s.oid AS subid, s.subname AS subname, w.worker_type AS worker_type, w.pid AS pid,
           w.leader_pid AS leader_pid, w.relid AS relid, w.received_lsn AS received_lsn,
           w.last_msg_send_time AS last_msg_send_time, w.last_msg_receipt_time AS last_msg_receipt_time,
           w.latest_end_lsn AS latest_end_lsn, w.latest_end_time AS latest_end_time
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
    taken_at TEXT
);
CREATE TABLE pgsub_server (
    subid INTEGER PRIMARY KEY REFERENCES pg_subscription (oid) ON DELETE CASCADE,
    pid INTEGER NOT NULL,
    host TEXT NOT NULL,
    since TEXT NOT NULL
);
"""

_HISTORY = """
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
    stats_reset TEXT
);
CREATE VIEW pg_stat_subscription_stats AS
    SELECT s.oid AS subid, s.subname AS subname, t.apply_error_count AS apply_error_count,
           t.sync_seq_error_count AS sync_seq_error_count, t.sync_table_error_count AS sync_table_error_count,
           t.confl_insert_exists AS confl_insert_exists,
           t.confl_update_origin_differs AS confl_update_origin_differs,
           t.confl_update_exists AS confl_update_exists, t.confl_update_deleted AS confl_update_deleted,
           t.confl_update_missing AS confl_update_missing,
           t.confl_delete_origin_differs AS confl_delete_origin_differs,
           t.confl_delete_missing AS confl_delete_missing,
           t.confl_multiple_unique_conflicts AS confl_multiple_unique_conflicts, t.stats_reset AS stats_reset,
           t.sync_table_error_count AS sync_error_count
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
    action TEXT NOT NULL CHECK (action IN ('error', 'skipped', 'applied')),
    attempts INTEGER NOT NULL,
    message TEXT,
    detail TEXT,
    identical INTEGER NOT NULL CHECK (identical IN (0, 1))
);
CREATE INDEX pgsub_conflict_place ON pgsub_conflict (subid, finish_lsn);
CREATE TABLE pgsub_journal (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at TEXT NOT NULL,
    subid INTEGER,
    subname TEXT,
    action TEXT NOT NULL,
    actor TEXT NOT NULL,
    detail TEXT NOT NULL
);
"""

VERSION_1 = _SUBSCRIPTION + _PROGRESS + _HISTORY

# When a copy was first seen, and how fast it is.
VERSION_2 = """
ALTER TABLE pg_stat_progress_copy ADD COLUMN started_at TEXT;
ALTER TABLE pg_stat_progress_copy ADD COLUMN bytes_per_second INTEGER;
"""

# What is prepared on the target and not decided; whether --password-required was asked for in so many words; options
# of apply; which column of a relation is to blame for an error.
VERSION_3 = """
CREATE TABLE pgsub_prepared_pending (
    subid INTEGER NOT NULL REFERENCES pg_subscription (oid) ON DELETE CASCADE,
    gid TEXT NOT NULL,
    xid INTEGER NOT NULL,
    prepare_lsn TEXT NOT NULL,
    prepared_at TEXT NOT NULL,
    PRIMARY KEY (subid, gid)
);
ALTER TABLE pg_subscription ADD COLUMN pgsub_password_enforced INTEGER NOT NULL DEFAULT 0
    CHECK (pgsub_password_enforced IN (0, 1));
ALTER TABLE pg_subscription ADD COLUMN pgsub_max_parallel_apply_workers INTEGER NOT NULL DEFAULT 2;
ALTER TABLE pg_subscription ADD COLUMN pgsub_messages INTEGER NOT NULL DEFAULT 0 CHECK (pgsub_messages IN (0, 1));
ALTER TABLE pgsub_error ADD COLUMN "column" TEXT;
"""

# Both rows of a conflict as JSON, when it was met first and last, and where it came from; how many of them the bound
# has taken. What was text of rows before is in the detail too. How often apply ended at one position; how fast the
# publisher writes WAL.
VERSION_4 = """
ALTER TABLE pgsub_conflict RENAME TO pgsub_conflict_3;
DROP INDEX pgsub_conflict_place;
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
    event INTEGER
);
INSERT INTO pgsub_conflict (id, subid, subname, at, conflict_type, schemaname, relname, index_name, key, origin,
                            remote_xid, finish_lsn, remote_commit_ts, action, attempts, message, detail, identical,
                            last_at)
    SELECT id, subid, subname, at, conflict_type, schemaname, relname, index_name, key, origin, remote_xid, finish_lsn,
           remote_commit_ts, CASE action WHEN 'error' THEN 'stopped' ELSE action END, attempts, message, detail,
           identical, at FROM pgsub_conflict_3;
DROP TABLE pgsub_conflict_3;
CREATE INDEX pgsub_conflict_event ON pgsub_conflict (subid, event) WHERE event IS NOT NULL;
CREATE INDEX pgsub_conflict_stopped ON pgsub_conflict (subid) WHERE action = 'stopped';
CREATE TABLE pgsub_conflict_dropped (subid INTEGER PRIMARY KEY, dropped INTEGER NOT NULL);
ALTER TABLE pgsub_error ADD COLUMN position TEXT;
ALTER TABLE pgsub_error ADD COLUMN restarts INTEGER NOT NULL DEFAULT 0;
ALTER TABLE pgsub_error ADD COLUMN stuck_since TEXT;
ALTER TABLE pgsub_slot ADD COLUMN current_lsn TEXT;
ALTER TABLE pgsub_slot ADD COLUMN wal_bytes_per_second INTEGER;
"""

VERSION_5 = """
ALTER TABLE pgsub_stats ADD COLUMN changes_in_sets INTEGER NOT NULL DEFAULT 0;
ALTER TABLE pgsub_stats ADD COLUMN changes_folded INTEGER NOT NULL DEFAULT 0;
ALTER TABLE pgsub_stats ADD COLUMN serial_relations INTEGER NOT NULL DEFAULT 0;
ALTER TABLE pgsub_stats ADD COLUMN set_fallbacks INTEGER NOT NULL DEFAULT 0;
DROP VIEW pg_stat_subscription_stats;
CREATE VIEW pg_stat_subscription_stats AS
    SELECT s.oid AS subid, s.subname AS subname, t.apply_error_count AS apply_error_count,
           t.sync_seq_error_count AS sync_seq_error_count, t.sync_table_error_count AS sync_table_error_count,
           t.confl_insert_exists AS confl_insert_exists,
           t.confl_update_origin_differs AS confl_update_origin_differs,
           t.confl_update_exists AS confl_update_exists, t.confl_update_deleted AS confl_update_deleted,
           t.confl_update_missing AS confl_update_missing,
           t.confl_delete_origin_differs AS confl_delete_origin_differs,
           t.confl_delete_missing AS confl_delete_missing,
           t.confl_multiple_unique_conflicts AS confl_multiple_unique_conflicts, t.stats_reset AS stats_reset,
           t.sync_table_error_count AS sync_error_count, t.changes_in_sets AS changes_in_sets,
           t.changes_folded AS changes_folded, t.serial_relations AS serial_relations,
           t.set_fallbacks AS set_fallbacks
      FROM pg_subscription s JOIN pgsub_stats t ON t.subid = s.oid;
"""

# Which change that was left out is a conflict's, and when it was applied after all.
VERSION_6 = """
ALTER TABLE pgsub_conflict ADD COLUMN letter TEXT;
ALTER TABLE pgsub_conflict ADD COLUMN replayed_at TEXT;
"""

# All that is to be skipped: subskiplsn is the next of several.
VERSION_7 = """
ALTER TABLE pg_subscription ADD COLUMN pgsub_skips TEXT NOT NULL DEFAULT '[]';
"""

# What waits behind a transaction that blocks, and whether there is more of it.
VERSION_8 = """
ALTER TABLE pgsub_slot ADD COLUMN waiting_transactions INTEGER;
ALTER TABLE pgsub_slot ADD COLUMN waiting_at_least INTEGER;
"""

# Tables whose changes are kept.
VERSION_9 = """
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
"""

# What is done with conflicts.
VERSION_10 = """
ALTER TABLE pg_subscription ADD COLUMN pgsub_on_conflict TEXT NOT NULL DEFAULT '[]';
"""

# How much is kept of what was skipped.
VERSION_11 = """
CREATE TABLE pgsub_skipped (
    subid INTEGER PRIMARY KEY REFERENCES pg_subscription (oid) ON DELETE CASCADE,
    waiting_changes INTEGER NOT NULL,
    replayed_changes INTEGER NOT NULL,
    bytes INTEGER NOT NULL
);
"""

# Since when a worker has given no sign of life, and what it waits for.
VERSION_12 = """
ALTER TABLE pgsub_worker ADD COLUMN silent_since TEXT;
ALTER TABLE pgsub_worker ADD COLUMN waits_for TEXT;
"""

# The origin bears the name by which queries written for the server find it (ReplicationOriginNameForLogicalRep).
VERSION_13 = """
DROP VIEW pg_replication_origin_status;
CREATE VIEW pg_replication_origin_status AS
    SELECT subid AS local_id, 'pg_' || subid AS external_id, remote_lsn, local_lsn FROM pgsub_origin;
"""
