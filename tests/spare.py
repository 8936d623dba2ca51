"""Databases that are emptied and used again: a new one takes a fifth of a second, and the suite uses two thousand.

A database is only used again if nothing shows that it was used: no object of a user is left in any catalog, and what
system objects may be used by whom is as it was. Whoever still knows its name does not find it, for each test's has
another. With ``PGSUB_TEST_THOROUGH=1`` every test gets a new one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import closing

import psycopg
from psycopg import sql

from pgsub.demo.servers import Server

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
    FOR it IN SELECT nspname FROM pg_namespace WHERE nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema' LOOP
        EXECUTE format('DROP SCHEMA %I CASCADE', it.nspname);
    END LOOP;
END $$;
CREATE SCHEMA public AUTHORIZATION pg_database_owner;
GRANT USAGE ON SCHEMA public TO PUBLIC;
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

_spares: dict[Server, str] = {}  #: a database of each server that can be used again
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
    _spares.pop(server, None)
    if server in _outside:
        _outside.pop(server).close()


def take(server: Server, name: str) -> bool:
    """Give a database that was used before this name.

    :return: whether there was one.
    """
    spare = _spares.pop(server, None)
    if spare is not None:
        with outside(server) as session:
            _rename(session, spare, name)
    return spare is not None


def keep(server: Server, name: str) -> None:
    """Empty a database for another test; drop it where that cannot be done."""
    spare = f"spare_{name}"
    try:
        with outside(server) as session:
            _rename(session, name, spare)
        with closing(server.connect(spare)) as session:
            session.execute(_EMPTY.encode())
            as_new = _as_new(server, session)
    except psycopg.Error:
        as_new = False
    if as_new and server not in _spares and not os.environ.get("PGSUB_TEST_THOROUGH"):
        _spares[server] = spare
        return
    with outside(server) as session:
        for used in (name, spare):
            session.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(used)))


def _rename(session: psycopg.Connection, before: str, after: str) -> None:
    """Sessions of the database are ended; the server itself would look for them ten times a second only."""
    deadline = time.monotonic() + _WAIT_SECONDS
    ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = %s"
    while session.execute(ended, (before,)).fetchone() != (0,) and time.monotonic() < deadline:
        time.sleep(0.005)
    session.execute(sql.SQL("ALTER DATABASE {} RENAME TO {}").format(sql.Identifier(before), sql.Identifier(after)))


def _as_new(server: Server, session: psycopg.Connection) -> bool:
    if server not in _left:
        names = [name for (name,) in session.execute(_CATALOGS.encode()) if name != "pg_namespace"]
        counts = [*(sql.SQL(_LEFT).format(sql.Identifier(name)) for name in names), sql.SQL(_SCHEMAS)]
        _left[server] = sql.SQL("SELECT {}").format(sql.SQL(" + ").join(counts))
        with outside(server) as unused:
            _rights[server] = _rights_in(unused)
    left = session.execute(_left[server], {"first": _FIRST_USER_OID}).fetchone()
    return left == (0,) and _rights_in(session) == _rights[server]


def _rights_in(session: psycopg.Connection) -> str:
    row = session.execute(_RIGHTS.encode()).fetchone()
    assert row is not None
    return str(row[0])
