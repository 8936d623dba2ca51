"""The ledger's tables in schema ``pgsub`` of the target database, and their migrations.

Only the target can commit progress in the same transaction as the data, so the authority lives here.
Mirrors pg_subscription_rel, pg_replication_origin and the launcher's shared memory.
"""

from __future__ import annotations

from collections.abc import Callable

import psycopg

from pgsub.common import server_words
from pgsub.common.errors import PermissionMissing, StateForbids
from pgsub.target.query import scalar
from pgsub.target.session import ledger_privileges

VERSION = 4


# Those who use the ledger may use the tables that an upgrade adds.
_GRANTS = """
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

_V1 = """
REVOKE ALL ON SCHEMA pgsub FROM PUBLIC;
COMMENT ON SCHEMA pgsub IS 'ledger of pgsub: replication progress committed together with the data; do not edit';

CREATE TABLE pgsub.ledger_version (version integer PRIMARY KEY, installed_at timestamptz NOT NULL DEFAULT now());

-- identity: whose slot, on which system. slot_intent is durable before the slot is created, so none is orphaned.
-- two_phase: d disabled, p pending, e the slot may be two-phase
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
    consistent_point pg_lsn,
    sync_groups integer NOT NULL DEFAULT 0,
    two_phase "char" NOT NULL DEFAULT 'd' CHECK (two_phase IN ('d', 'p', 'e')),
    created_at timestamptz NOT NULL DEFAULT now());

-- worker 0 is apply, any other the table that a sync worker serves. Short locks only: never held with data.
-- skip_lsn is cleared in the commit of the transaction that it skips. skip_lsns: several of them, the next one first;
-- NULL where there is only one, which any transaction clears. skip_rules: the limit of each rule that has one
CREATE TABLE pgsub.control (
    subid integer NOT NULL REFERENCES pgsub.subscription ON DELETE CASCADE,
    worker oid NOT NULL,
    epoch bigint NOT NULL DEFAULT 0,
    token uuid NOT NULL,
    claimed_by uuid,
    claimed_host text,
    claimed_pid integer,
    stop boolean NOT NULL DEFAULT false,
    skip_lsn pg_lsn,
    skip_rows text CHECK (skip_rows IN ('whole', 'conflicting')),
    skip_lsns pg_lsn[],
    skip_rules jsonb,
    PRIMARY KEY (subid, worker));

CREATE TABLE pgsub.progress (
    subid integer NOT NULL REFERENCES pgsub.subscription ON DELETE CASCADE,
    worker oid NOT NULL,
    remote_lsn pg_lsn NOT NULL DEFAULT '0/0',
    remote_commit_ts timestamptz,
    reported_lsn pg_lsn NOT NULL DEFAULT '0/0',
    states_version bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (subid, worker)) WITH (fillfactor = 20);

-- tables that are copied together share a slot, named here by each of them
CREATE TABLE pgsub.subscription_rel (
    subid integer NOT NULL REFERENCES pgsub.subscription ON DELETE CASCADE,
    srrelid oid NOT NULL,
    schemaname text NOT NULL,
    relname text NOT NULL,
    srsubstate "char" NOT NULL CHECK (srsubstate IN ('i', 'd', 'f', 's', 'r')),
    srsublsn pg_lsn,
    handover_lsn pg_lsn,
    sync_slot text,
    attempt integer NOT NULL DEFAULT 0,
    copy_mode text CHECK (copy_mode IN ('atomic', 'chunked')),
    spare_slot text,
    copy_bytes bigint,
    PRIMARY KEY (subid, srrelid),
    UNIQUE (subid, schemaname, relname));

CREATE TABLE pgsub.copy_chunk (
    subid integer NOT NULL,
    srrelid oid NOT NULL,
    attempt integer NOT NULL,
    chunk integer NOT NULL,
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
"""

_V2 = """
-- wanted_lsn: somebody waits until the ledger has this position
ALTER TABLE pgsub.control ADD COLUMN wanted_lsn pg_lsn;

-- adopt: the rows that are there are compared with the publisher's, and not emptied; adopted: rows that were missing,
-- extra, different, as far as they were brought
ALTER TABLE pgsub.subscription_rel ADD COLUMN adopt boolean NOT NULL DEFAULT false, ADD COLUMN adopted bigint[];

-- apply stops where it has applied all that lsn covers, and nothing else, and says so in reached_lsn. token names the
-- request; apply takes it away once it has stood for so many seconds (target/ledger/barrier.py). stood: seconds that it
-- has stood at where the barrier was before
CREATE TABLE pgsub.barrier (
    subid integer PRIMARY KEY REFERENCES pgsub.subscription ON DELETE CASCADE,
    token uuid NOT NULL,
    lsn pg_lsn NOT NULL,
    seconds double precision NOT NULL,
    reached_lsn pg_lsn,
    stood double precision NOT NULL DEFAULT 0);

-- options: the definition as the state store has it, without connection strings: one that is lost is made anew from
-- it. json and not jsonb, which refuses names that this database's encoding does not have.
-- moves: how often that was done; a state store of an older number is out of date
CREATE TABLE pgsub.definition (
    subid integer PRIMARY KEY REFERENCES pgsub.subscription ON DELETE CASCADE,
    options json,
    moves integer NOT NULL DEFAULT 0);
"""

_V3 = """
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

-- part: the blocks of the publisher that the chunk reads, and the columns; a copy that broke off goes on with what its
-- chunks brought. json, as for options above
ALTER TABLE pgsub.copy_chunk ADD COLUMN part json;
"""

_V4 = """
-- new_slot: a reconciliation is under way, which makes the slot of this name; apply does not start
-- (target/ledger/reconciliation.py)
ALTER TABLE pgsub.subscription ADD COLUMN new_slot text;

-- keep: rows that an adoption may still keep of those that it replaces or deletes; kept: those that it has kept
ALTER TABLE pgsub.subscription_rel
    ADD COLUMN keep integer NOT NULL DEFAULT 0, ADD COLUMN kept integer NOT NULL DEFAULT 0;
"""

#: version: SQL that leads to it from the one before. A released one is never edited; a change is a new version.
_MIGRATIONS = {1: _V1, 2: _V2, 3: _V3, 4: _V4}


def installed_version(connection: psycopg.Connection) -> int:
    """Return the ledger's version in this database, 0 where there is none.

    :raises PermissionMissing: it is a stranger's: to read a view is to run the code of who made it.
    """
    if not scalar(connection, "SELECT pg_catalog.to_regclass('pgsub.ledger_version') IS NOT NULL"):
        return 0
    # guard: a ledger that is a stranger's is not even read
    ledger_privileges.check(connection)
    return int(scalar(connection, "SELECT max(version) FROM pgsub.ledger_version") or 0)


def check(connection: psycopg.Connection) -> None:
    """Check that :func:`install` would succeed, without doing it.

    :raises PermissionMissing: the role may not create what is missing.
    """
    row = connection.execute(
        "SELECT CASE WHEN n.oid IS NULL THEN pg_catalog.has_database_privilege(current_database(), 'CREATE')"
        " ELSE pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND (pg_catalog.has_schema_privilege(n.oid, 'CREATE')"
        " OR EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.relnamespace = n.oid AND c.relkind = 'r'))"
        " AND NOT EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.relnamespace = n.oid AND c.relkind = 'r'"
        " AND NOT (pg_catalog.has_table_privilege(c.oid, 'SELECT') AND pg_catalog.has_table_privilege(c.oid, 'INSERT')"
        " AND pg_catalog.has_table_privilege(c.oid, 'UPDATE') AND pg_catalog.has_table_privilege(c.oid, 'DELETE'))) END"
        " FROM (VALUES (pg_catalog.to_regnamespace('pgsub')::oid)) AS n(oid)"
    ).fetchone()
    if not row or not row[0]:
        raise PermissionMissing(
            "permission denied to keep the ledger on the target",
            detail="pgsub keeps its progress in schema pgsub of the target database, committed with the data.",
            hint=_hint(connection),
            sqlstate="42501",
        )


def install(connection: psycopg.Connection, clear: Callable[[], None] = lambda: None) -> None:
    """Create or upgrade the ledger, and give the session's user what it lacks there; safe with several callers at once.

    :param clear: ends who must not go on anyhow; called before an upgrade, which needs the tables for itself.
    :raises PermissionMissing: the role may not; the hint holds the statement to run.
    :raises StateForbids: the ledger was written by a newer pgsub.
    """
    ledger_privileges.give(connection)
    version = installed_version(connection)
    if version > VERSION:
        raise StateForbids(
            f"the ledger on the target has version {version}, this pgsub knows {VERSION}",
            hint="Upgrade pgsub.",
        )
    if version < VERSION:
        clear()
        _install(connection, version)
        ledger_privileges.give(connection)


def _install(connection: psycopg.Connection, version: int) -> None:
    try:
        with connection.transaction():
            ledger_privileges.lock(connection)
            connection.execute("SET LOCAL lock_timeout = '5s'")  # workers of other subscriptions are at work
            with ledger_privileges.acting(connection):
                _migrate(connection)
    except psycopg.errors.InsufficientPrivilege as error:
        if version:
            raise _not_upgraded(version, error) from None
        raise PermissionMissing(
            f"could not create the ledger schema on the target: {server_words.said(error).message}",
            detail="pgsub keeps its progress in schema pgsub of the target database, committed with the data.",
            hint=_hint(connection),
            sqlstate=error.sqlstate,
        ) from None


def _migrate(connection: psycopg.Connection) -> None:
    if scalar(connection, "SELECT pg_catalog.to_regnamespace('pgsub') IS NULL"):
        connection.execute("CREATE SCHEMA pgsub")
    version = installed_version(connection)
    for number in range(version + 1, VERSION + 1):
        connection.execute(_MIGRATIONS[number].encode())
        connection.execute("INSERT INTO pgsub.ledger_version (version) VALUES (%s)", (number,))
    if version:
        connection.execute(_GRANTS.encode())


def _not_upgraded(version: int, error: psycopg.Error) -> PermissionMissing:
    statements = [
        f"{_MIGRATIONS[number].strip()}\nINSERT INTO pgsub.ledger_version (version) VALUES ({number});"
        for number in range(version + 1, VERSION + 1)
    ]
    return PermissionMissing(
        f"could not upgrade the ledger on the target: {server_words.said(error).message}",
        detail=f"It has version {version}, this pgsub needs {VERSION}.",
        hint="\n".join(
            [
                "Let the owner of schema pgsub use this pgsub once, or run:",
                "BEGIN;",
                *statements,
                _GRANTS.strip(),
                "COMMIT;",
            ]
        ),
        sqlstate=error.sqlstate,
    )


def _hint(connection: psycopg.Connection) -> str:
    row = connection.execute("SELECT pg_catalog.quote_ident(current_database()), pg_catalog.quote_ident(current_user)")
    database, user = row.fetchone() or ("", "")
    if scalar(connection, "SELECT pg_catalog.to_regnamespace('pgsub') IS NOT NULL"):
        return f"Let the owner of schema pgsub run:\n{ledger_privileges.grants(user)}"
    return (
        "Let an owner of the database run one of these:\n"
        f"GRANT CREATE ON DATABASE {database} TO {user};\n"
        f"CREATE SCHEMA pgsub AUTHORIZATION {user};"
    )
