"""The tables of the ledger, by version. A released version is never edited; each change is a new version.

Mirrors pg_subscription_rel, pg_replication_origin and the launcher's shared memory.
"""

from __future__ import annotations

#: Runs after an upgrade: roles that use the ledger get privileges on its new tables.
GRANTS = """
DO $$
DECLARE
    grantee regrole;
BEGIN
    FOR grantee IN
        SELECT a.grantee FROM pg_catalog.pg_class c, pg_catalog.aclexplode(c.relacl) a
         WHERE c.oid = 'pgsub.control'::regclass AND a.privilege_type = 'DELETE' AND a.grantee NOT IN (0, c.relowner)
    LOOP
        EXECUTE pg_catalog.format(
            'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA pgsub TO %s', grantee);
    END LOOP;
END $$;
"""

#: Runs after the installation: default privileges of the owner let no other role use the ledger.
REVOKES = """
DO $$
DECLARE
    grantee text;
BEGIN
    FOR grantee IN
        SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END
          FROM (SELECT n.nspowner, n.nspacl FROM pg_catalog.pg_namespace n WHERE n.nspname = 'pgsub'
                 UNION ALL
                SELECT c.relowner, c.relacl FROM pg_catalog.pg_class c WHERE c.relnamespace = 'pgsub'::regnamespace)
               AS o (owner, acl), pg_catalog.aclexplode(o.acl) a WHERE a.grantee <> o.owner
    LOOP
        EXECUTE 'REVOKE ALL ON SCHEMA pgsub FROM ' || grantee || ' CASCADE';
        EXECUTE 'REVOKE ALL ON ALL TABLES IN SCHEMA pgsub FROM ' || grantee || ' CASCADE';
        EXECUTE 'REVOKE ALL ON ALL SEQUENCES IN SCHEMA pgsub FROM ' || grantee || ' CASCADE';
    END LOOP;
END $$;
"""

_V1 = """
REVOKE ALL ON SCHEMA pgsub FROM PUBLIC;
COMMENT ON SCHEMA pgsub IS 'ledger of pgsub: replication progress committed together with the data; do not edit';

CREATE TABLE pgsub.ledger_version (version integer PRIMARY KEY, installed_at timestamptz NOT NULL DEFAULT now());

-- identity: whose slot, on which system. slot_intent is durable before the slot is created, so none is orphaned.
-- new_slot: a reconciliation is under way, which makes the slot of this name; apply does not start
-- (maintenance/reconciliation.py). two_phase: d disabled, p pending, e the slot may be two-phase
CREATE TABLE pgsub.subscription (
    subid integer PRIMARY KEY,
    subname text NOT NULL,
    state_store text NOT NULL,
    system_identifier text,
    publisher_dbname text,
    publisher_dboid oid,
    timeline integer,
    slot_name text,
    slot_intent boolean NOT NULL DEFAULT false,
    new_slot text,
    consistent_point pg_lsn,
    sync_groups integer NOT NULL DEFAULT 0,
    two_phase "char" NOT NULL DEFAULT 'd' CHECK (two_phase IN ('d', 'p', 'e')),
    created_at timestamptz NOT NULL DEFAULT now());

-- options: the definition as the state store has it, without connection strings: one that is lost is made anew from
-- it. json and not jsonb, which refuses names that this database's encoding does not have. It also has the slot and the
-- number of the copy, recorded: a state store that does not know of it is out of date.
-- moves: how often that was done; a state store of an older number is out of date
CREATE TABLE pgsub.definition (
    subid integer PRIMARY KEY REFERENCES pgsub.subscription ON DELETE CASCADE,
    options json,
    moves integer NOT NULL DEFAULT 0);

-- worker 0 is apply, any other the table that a sync worker serves. Short locks only: never held with data.
-- wanted_lsn: somebody waits until the ledger has this position. skip_lsn is cleared in the commit of the transaction
-- that it skips. skip_lsns: several of them, the next one first; NULL where there is only one, which any transaction
-- clears. skip_rules: the limit of each rule that has one
CREATE TABLE pgsub.control (
    subid integer NOT NULL REFERENCES pgsub.subscription ON DELETE CASCADE,
    worker oid NOT NULL,
    epoch bigint NOT NULL DEFAULT 0,
    token uuid NOT NULL,
    claimed_by uuid,
    claimed_host text,
    claimed_pid integer,
    stop boolean NOT NULL DEFAULT false,
    wanted_lsn pg_lsn,
    skip_lsn pg_lsn,
    skip_rows text CHECK (skip_rows IN ('whole', 'conflicting')),
    skip_lsns pg_lsn[],
    skip_rules jsonb,
    PRIMARY KEY (subid, worker));

-- apply stops where it has applied all that lsn covers, and nothing else, and says so in reached_lsn. token names the
-- request; apply takes it away once it has stood for so many seconds (maintenance/barrier.py). stood: seconds that it
-- has stood at where the barrier was before
CREATE TABLE pgsub.barrier (
    subid integer PRIMARY KEY REFERENCES pgsub.subscription ON DELETE CASCADE,
    token uuid NOT NULL,
    lsn pg_lsn NOT NULL,
    seconds double precision NOT NULL,
    reached_lsn pg_lsn,
    stood double precision NOT NULL DEFAULT 0);

-- remote_commit_ts: when the transaction ended whose end remote_lsn is; NULL where it is that of none
CREATE TABLE pgsub.progress (
    subid integer NOT NULL REFERENCES pgsub.subscription ON DELETE CASCADE,
    worker oid NOT NULL,
    remote_lsn pg_lsn NOT NULL DEFAULT '0/0',
    remote_commit_ts timestamptz,
    reported_lsn pg_lsn NOT NULL DEFAULT '0/0',
    states_version bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (subid, worker)) WITH (fillfactor = 20);

-- tables that are copied together share a slot, named here by each of them. adopt: the rows that are there are compared
-- with the publisher's, and not emptied; adopted: rows that were missing, extra, different, as far as they were
-- brought. keep: rows that an adoption may still keep of those that it replaces or deletes; kept: those that it kept.
-- covered_skips: what was skipped of the table up to this id of skipped_change is older than its copy, which has it;
-- covered_events: the same of conflicts, by the id of event
CREATE TABLE pgsub.subscription_rel (
    subid integer NOT NULL REFERENCES pgsub.subscription ON DELETE CASCADE,
    srrelid oid NOT NULL,
    schemaname text NOT NULL,
    relname text NOT NULL,
    srsubstate "char" NOT NULL CHECK (srsubstate IN ('i', 'd', 'f', 's', 'r')),
    srsublsn pg_lsn,
    handover_lsn pg_lsn,
    sync_slot text,
    spare_slot text,
    attempt integer NOT NULL DEFAULT 0,
    copy_mode text CHECK (copy_mode IN ('atomic', 'chunked')),
    copy_bytes bigint,
    adopt boolean NOT NULL DEFAULT false,
    adopted bigint[],
    keep integer NOT NULL DEFAULT 0,
    kept integer NOT NULL DEFAULT 0,
    covered_skips bigint,
    covered_events bigint,
    PRIMARY KEY (subid, srrelid),
    UNIQUE (subid, schemaname, relname));

-- part: the blocks of the publisher that the chunk reads, and the columns; a copy that broke off goes on with what its
-- chunks brought. json, as for options above
CREATE TABLE pgsub.copy_chunk (
    subid integer NOT NULL,
    srrelid oid NOT NULL,
    attempt integer NOT NULL,
    chunk integer NOT NULL,
    part json,
    bytes_total bigint,
    rows_total bigint,
    bytes_done bigint,
    rows_done bigint,
    xid xid8,
    PRIMARY KEY (subid, srrelid, attempt, chunk),
    FOREIGN KEY (subid, srrelid) REFERENCES pgsub.subscription_rel ON DELETE CASCADE);

-- what the launcher must have in its log and state store before feedback passes it
CREATE TABLE pgsub.event (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    subid integer NOT NULL REFERENCES pgsub.subscription ON DELETE CASCADE,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    body jsonb NOT NULL);

-- markers of prepared transactions, part of each of them
CREATE TABLE pgsub.prepared_xact (
    subid integer NOT NULL REFERENCES pgsub.subscription ON DELETE CASCADE,
    gid text NOT NULL,
    PRIMARY KEY (subid, gid));

-- prepared and not decided; written after the PREPARE by a commit of its own
CREATE TABLE pgsub.prepared_pending (
    subid integer NOT NULL REFERENCES pgsub.subscription ON DELETE CASCADE,
    gid text NOT NULL,
    prepare_lsn pg_lsn NOT NULL,
    xid bigint NOT NULL,
    prepared_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (subid, gid));

-- changes that were skipped
CREATE TABLE pgsub.skipped_change (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    subid integer NOT NULL,
    finish_lsn pg_lsn NOT NULL,
    xid bigint NOT NULL,
    schemaname text NOT NULL,
    relname text NOT NULL,
    body jsonb NOT NULL,
    skipped_at timestamptz NOT NULL DEFAULT now(),
    replayed_at timestamptz);

-- tables whose changes are held, and the changes: one row a stretch of one transaction's messages for one table, as
-- pgoutput sent them, each behind its length, in the order of id. No foreign key: the rows may be part of a prepared
-- transaction, which would hold its lock until the publisher decides. releasing: what is held is being applied.
-- drained_lsn: where apply was when all that could be seen was applied (target/ledger/tables/held_tables.py)
CREATE TABLE pgsub.held_table (
    subid integer NOT NULL,
    srrelid oid NOT NULL,
    held_at timestamptz NOT NULL DEFAULT now(),
    releasing boolean NOT NULL DEFAULT false,
    drained_lsn pg_lsn,
    PRIMARY KEY (subid, srrelid));

CREATE TABLE pgsub.held_change (
    id bigint GENERATED ALWAYS AS IDENTITY,
    subid integer NOT NULL,
    srrelid oid NOT NULL,
    xid bigint NOT NULL,
    finish_lsn pg_lsn NOT NULL,
    committed_at timestamptz NOT NULL,
    relation bytea NOT NULL,
    messages bytea NOT NULL,
    changes integer NOT NULL,
    bytes integer NOT NULL,
    PRIMARY KEY (subid, srrelid, id) INCLUDE (changes, bytes));

-- One side of a switchover: the server that gives the right to write, or the one that takes it. No foreign key: the
-- subscription that ends leaves its row behind. saved: what the fence replaced. definition: the options of the
-- subscription that ends, without connection strings. subid: of this ledger; back_subid: of the one that leads back,
-- once that is made. position: where the slot of the way back begins (pgsub/switchover/journal.py)
CREATE TABLE pgsub.switchover (
    id uuid PRIMARY KEY,
    side text NOT NULL CHECK (side IN ('giving', 'taking')),
    subid integer NOT NULL,
    subname text NOT NULL,
    back_name text NOT NULL,
    back_subid integer,
    phase text NOT NULL,
    fence text NOT NULL,
    saved json,
    definition json,
    position pg_lsn,
    fenced_at timestamptz,
    began_at timestamptz NOT NULL DEFAULT now(),
    changed_at timestamptz NOT NULL DEFAULT now());
"""

#: By version, the SQL that upgrades from the previous one.
MIGRATIONS = {1: _V1}
