"""Databases that are emptied and used again: a new one takes a fifth of a second, and the suite uses two thousand.

A database is only used again if nothing shows that it was used: no object of a user is left in any catalog, and what
system objects may be used by whom is as it was. Whoever still knows its name does not find it, for each test's has
another. With ``PGSUB_TEST_THOROUGH=1`` every test gets a new one.

To install the ledger and to drop it takes longer than all of that. Tests that begin with its installation are given a
database in which it is installed, with no row in it, if its definition is still the one that was installed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import closing

import psycopg
from embedded import Server
from psycopg import sql

from pgsub.target.ledger.schema import installation

_FIRST_USER_OID = 16384
_WAIT_SECONDS = 5.0

_EMPTY = """
DO $$
DECLARE it record;
BEGIN
    FOR it IN SELECT pubname FROM pg_publication LOOP
        EXECUTE format('DROP PUBLICATION %I', it.pubname);
    END LOOP;
    FOR it IN SELECT extname FROM pg_extension WHERE oid >= 16384 LOOP
        EXECUTE format('DROP EXTENSION %I CASCADE', it.extname);
    END LOOP;
    FOR it IN SELECT nspname FROM pg_namespace
        WHERE nspname NOT LIKE 'pg\\_%' AND nspname NOT IN ('information_schema', 'KEPT') LOOP
        EXECUTE format('DROP SCHEMA %I CASCADE', it.nspname);
    END LOOP;
    EXECUTE format('ALTER DATABASE %I RESET ALL', current_database());
END $$;
CREATE SCHEMA public AUTHORIZATION pg_database_owner;
GRANT USAGE ON SCHEMA public TO PUBLIC;
"""

#: Rows of all tables but the one that says which version is installed; nothing where they took so much room that it
#: would be felt.
_FORGET = """
DO $$
DECLARE it record;
BEGIN
    IF (SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relnamespace = 'pgsub'::regnamespace
        AND relkind = 'r') > 2000000 THEN
        DROP SCHEMA pgsub CASCADE;
        RETURN;
    END IF;
    PERFORM set_config('session_replication_role', 'replica', true);
    FOR it IN SELECT oid::regclass AS name, relkind FROM pg_class WHERE relnamespace = 'pgsub'::regnamespace LOOP
        IF it.relkind = 'S' THEN
            PERFORM setval(it.name, 1, false);
        ELSIF it.relkind = 'r' AND it.name <> 'pgsub.ledger_version'::regclass THEN
            EXECUTE format('DELETE FROM %s', it.name);
        END IF;
    END LOOP;
END $$
"""

_DEFINITION = """
WITH ledger AS (SELECT * FROM pg_class WHERE relnamespace = to_regnamespace('pgsub'))
SELECT ARRAY[
    (SELECT string_agg(concat_ws(' ', relname, relkind, relowner, relacl, relpersistence, relreplident, relrowsecurity,
        relforcerowsecurity, relhasrules, relhastriggers, relchecks, relispartition, reloptions), ',' ORDER BY relname)
       FROM ledger),
    (SELECT string_agg(concat_ws(' ', relname, attname, atttypid, atttypmod, attnotnull, attidentity, attgenerated,
        attisdropped, attacl, attstorage, attcollation, attoptions, (SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef
         WHERE adrelid = attrelid AND adnum = attnum)), ',' ORDER BY relname, attnum)
       FROM ledger l, pg_attribute WHERE attrelid = l.oid),
    (SELECT string_agg(concat_ws(' ', relname, conname, pg_get_constraintdef(k.oid)), ',' ORDER BY relname, conname)
       FROM ledger l, pg_constraint k WHERE conrelid = l.oid),
    (SELECT string_agg(concat_ws(' ', relname, tgfoid, tgtype, tgenabled), ',' ORDER BY relname, tgfoid, tgtype)
       FROM ledger l, pg_trigger WHERE tgrelid = l.oid)
]::text
"""

_CATALOGS = """
SELECT c.relname::text FROM pg_class c, pg_attribute a
 WHERE c.relnamespace = 'pg_catalog'::regnamespace AND c.relkind = 'r' AND NOT c.relisshared
   AND a.attrelid = c.oid AND a.attname = 'oid' ORDER BY 1
"""
_LEFT = "(SELECT count(*) FROM pg_catalog.{} WHERE oid >= %(first)s)"
_SCHEMAS = r"""
(SELECT count(*) FROM pg_namespace WHERE oid >= %(first)s AND nspname NOT LIKE 'pg\_%%' AND nspname <> 'public')
"""

_RIGHTS = """
SELECT ARRAY[
    (SELECT string_agg(concat(oid, proacl), ',' ORDER BY oid) FROM pg_proc WHERE proacl IS NOT NULL),
    (SELECT string_agg(concat(oid, relacl), ',' ORDER BY oid) FROM pg_class WHERE relacl IS NOT NULL),
    (SELECT string_agg(concat(attrelid, attname, attacl), ',' ORDER BY attrelid, attnum)
       FROM pg_attribute WHERE attacl IS NOT NULL),
    (SELECT string_agg(concat(nspname, nspowner, nspacl), ',' ORDER BY nspname)
       FROM pg_namespace WHERE nspname !~ '^pg_(toast_)?temp_'),
    (SELECT string_agg(concat(oid, lanacl), ',' ORDER BY oid) FROM pg_language),
    (SELECT string_agg(concat(oid, typacl), ',' ORDER BY oid) FROM pg_type WHERE typacl IS NOT NULL),
    (SELECT string_agg(concat(setrole, setconfig), ',') FROM pg_db_role_setting, pg_database d
      WHERE setdatabase = d.oid AND datname = current_database()),
    (SELECT concat(datdba, datistemplate, datallowconn, datconnlimit, datacl) FROM pg_database
      WHERE datname = current_database())
]::text
"""

_spares: dict[tuple[Server, bool], str] = {}  #: databases that can be used again, without and with the ledger
_installed: dict[Server, tuple[object, ...]] = {}  #: what a database is like in which only the ledger was installed
_rights: dict[Server, str] = {}  #: in a database that nobody has used
_left: dict[Server, sql.Composed] = {}  #: the query that counts what is left
_outside: dict[Server, psycopg.Connection] = {}  #: a session of each server that no test has


@contextlib.contextmanager
def outside(server: Server) -> Iterator[psycopg.Connection]:
    """A session that is not in a test's database; it stays, as every new one costs a process of the server."""
    if server not in _outside:
        _outside[server] = server.connect()
    yield _outside[server]


def forget(server: Server) -> None:
    """The server ends."""
    for ledger in (False, True):
        _spares.pop((server, ledger), None)
    if server in _outside:
        _outside.pop(server).close()


def take(server: Server, name: str, *, ledger: bool) -> bool:
    """Give a database that was used before this name.

    :param ledger: one in which the ledger is installed, if there is one.
    :return: whether there was one.
    """
    kinds = [kind for kind in ((True, False) if ledger else (False,)) if (server, kind) in _spares]
    if kinds:
        with outside(server) as session:
            _rename(session, _spares.pop((server, kinds[0])), name)
    return bool(kinds)


def keep(server: Server, name: str, *, ledger: bool) -> None:
    """Empty a database for another test; drop it where that cannot be done.

    :param ledger: let the ledger be installed in it.
    """
    spare = f"spare_{name}"
    try:
        with outside(server) as session:
            _rename(session, name, spare)
        with closing(server.connect(spare)) as session:
            ledger = ledger and _keep_ledger(server, session)
            as_new = ledger or _empty(server, session)
    except psycopg.Error:
        as_new = False
    if as_new and (server, ledger) not in _spares and not os.environ.get("PGSUB_TEST_THOROUGH"):
        _spares[server, ledger] = spare
        return
    with outside(server) as session:
        for used in (name, spare):
            session.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(used)))


def _keep_ledger(server: Server, session: psycopg.Connection) -> bool:
    """Remove everything but the ledger, and its rows.

    :return: whether it is then as one that was installed just now.
    """
    if server not in _installed:
        if not _empty(server, session):
            return False
        installation.install(session)
        _installed[server] = _with_ledger(server, session)
    elif session.execute("SELECT to_regclass('pgsub.ledger_version')").fetchone() != (None,):
        session.execute(_FORGET.encode())
        session.execute(_EMPTY.replace("KEPT", "pgsub").encode())
    return _with_ledger(server, session) == _installed[server]


def _with_ledger(server: Server, session: psycopg.Connection) -> tuple[object, ...]:
    definition = session.execute(_DEFINITION.encode()).fetchone()
    return _left_in(server, session), definition, _rights_in(session)


def _rename(session: psycopg.Connection, before: str, after: str) -> None:
    """Sessions of the database are ended; the server itself would look for them ten times a second only."""
    deadline = time.monotonic() + _WAIT_SECONDS
    ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = %s"
    while session.execute(ended, (before,)).fetchone() != (0,) and time.monotonic() < deadline:
        time.sleep(0.005)
    session.execute(sql.SQL("ALTER DATABASE {} RENAME TO {}").format(sql.Identifier(before), sql.Identifier(after)))


def _empty(server: Server, session: psycopg.Connection) -> bool:
    """Remove everything.

    :return: whether it is then as one that nobody has used.
    """
    session.execute(_EMPTY.encode())
    if server not in _rights:
        with outside(server) as unused:
            _rights[server] = _rights_in(unused)
    return _left_in(server, session) == (0,) and _rights_in(session) == _rights[server]


def _left_in(server: Server, session: psycopg.Connection) -> object:
    """How many objects are there."""
    if server not in _left:
        names = [name for (name,) in session.execute(_CATALOGS.encode()) if name != "pg_namespace"]
        counts = [*(sql.SQL(_LEFT).format(sql.Identifier(name)) for name in names), sql.SQL(_SCHEMAS)]
        _left[server] = sql.SQL("SELECT {}").format(sql.SQL(" + ").join(counts))
    return session.execute(_left[server], {"first": _FIRST_USER_OID}).fetchone()


def _rights_in(session: psycopg.Connection) -> str:
    row = session.execute(_RIGHTS.encode()).fetchone()
    assert row is not None
    return str(row[0])
