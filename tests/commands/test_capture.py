"""Owners of databases plant what they may: none of it is ever called by a session of pgsub.

Functions, operators, types and views with the names of the server's own (``capture.sql``) stand first in the search
path that the database gives its sessions, beside other settings that bend what statements mean. Operators for domains
stand in the schema of the extension whose types these are of. Whatever calls one fails, which is in the server's log.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
import sources
from fix_program import Cli
from fix_servers import Database
from psycopg import sql
from psycopg.conninfo import make_conninfo

if TYPE_CHECKING:
    from embedded import Server

pytestmark = pytest.mark.own_spark

_OWNER, _PLAIN = f"mallory_{os.getpid()}", f"plain_{os.getpid()}"
_numbers = itertools.count(1)
_PLANT = Path(__file__).with_name("capture.sql").read_bytes()
_OPERATORS = "= <> < > <= >= || ~ !~ ~* ~~ !~~ @> <@ && + - * / % & | -> ->> ?"
_TABLES = """
CREATE EXTENSION citext SCHEMA public;
CREATE DOMAIN email AS citext;
CREATE TABLE a (id int PRIMARY KEY, t text);
CREATE TABLE b (id int PRIMARY KEY, n numeric);
CREATE TABLE d (mail email PRIMARY KEY, n int);
CREATE TABLE e (mail email, n int);
ALTER TABLE e REPLICA IDENTITY FULL;
"""
#: What an owner may set for the sessions of his database, and what could bend a statement or end a session.
_SETTINGS = {
    "default_transaction_read_only": "on",
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "standard_conforming_strings": "off",
    "quote_all_identifiers": "on",
    "bytea_output": "escape",
    "row_security": "on",
    "datestyle": "German",
    "intervalstyle": "sql_standard",
    "timezone": "Asia/Kathmandu",
    "extra_float_digits": "-15",
    "transform_null_equals": "on",
    "array_nulls": "off",
    "client_encoding": "LATIN1",
    "lock_timeout": "1ms",
    "statement_timeout": "20s",
    "idle_in_transaction_session_timeout": "1ms",
    "plan_cache_mode": "force_generic_plan",
    "role": _OWNER,
    "lc_monetary": "POSIX",
    "gin_fuzzy_search_limit": "1",
}
_LEDGERS_OWNERS = "SELECT DISTINCT relowner::regrole::text FROM pg_class WHERE relnamespace = 'pgsub'::regnamespace"


def _called() -> list[str]:
    """Names of all functions that the program calls, and of more."""
    texts = sources.modules().values()
    return sorted(set(itertools.chain.from_iterable(re.findall(r"\b([a-z_0-9]+)\(", text) for text in texts)))


def _plant(database: Database) -> None:
    """Give the database to the owner, who does his worst."""
    name = sql.Identifier(database.name)
    database.connection.execute(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(name, sql.Identifier(_OWNER)))
    with contextlib.closing(database.connect(_OWNER)) as owner:
        for setting, names in {"plant.names": _called(), "plant.operators": _OPERATORS.split()}.items():
            owner.execute("SELECT set_config(%s, %s::text[]::text, false)", (setting, names))
        owner.execute(_PLANT)
        for catalog, column in {"proc": "pro", "operator": "opr", "class": "rel", "type": "typ"}.items():
            query = f"SELECT count(*) > 50 FROM pg_{catalog} WHERE {column}namespace = 'evil'::regnamespace"
            assert owner.execute(query.encode()).fetchone() == (True,), catalog
        with pytest.raises(psycopg.errors.RaiseException, match="captured: domain ="):
            owner.execute("SELECT 'a'::public.email OPERATOR(public.=) 'a'::public.email")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            owner.execute("CREATE EVENT TRIGGER evil ON ddl_command_start EXECUTE FUNCTION evil.trap()")
        for setting, value in _SETTINGS.items():
            if setting == "standard_conforming_strings" and owner.info.server_version >= 190000:
                continue  # cannot be switched off there
            change = sql.SQL("ALTER DATABASE {} SET {} = {}")
            owner.execute(change.format(name, sql.Identifier(setting), sql.Literal(value)))
        owner.execute(sql.SQL("ALTER DATABASE {} SET search_path = evil, pg_catalog, public").format(name))


@pytest.fixture(scope="module")
def roles(publisher: Server, target: Server) -> Iterator[None]:
    """The owner of the databases, and a user without privileges."""
    for server in (publisher, target):
        with contextlib.closing(server.connect()) as session:
            session.execute(f"CREATE ROLE {_OWNER} LOGIN; CREATE ROLE {_PLAIN} LOGIN REPLICATION".encode())
    yield
    for server in (publisher, target):
        with contextlib.closing(server.connect()) as session:
            session.execute(f"DROP ROLE {_OWNER}, {_PLAIN}".encode())


@pytest.fixture
def planted(publisher: Server, target: Server, roles: None) -> Iterator[tuple[Database, Database]]:
    """A publisher's and a target's database of the owner; the test's own sessions are from before he came."""
    made = [Database(server, f"captured_{os.getpid()}_{next(_numbers)}") for server in (publisher, target)]
    for database in made:
        database.execute(_TABLES)
        database.execute(f"GRANT SELECT ON a, b, d, e TO {_PLAIN}")
        database.execute(f"GRANT CREATE ON DATABASE {database.name} TO {_PLAIN}")
    made[0].execute("INSERT INTO a SELECT g, 'row ' || g FROM generate_series(1, 500) g; INSERT INTO b VALUES (1, 1.5)")
    made[0].execute("INSERT INTO d VALUES ('a@x', 1), ('b@x', 1); INSERT INTO e SELECT * FROM d")
    made[0].execute("CREATE PUBLICATION p FOR TABLE a, b, d, e")
    for database in made:
        _plant(database)
    offsets = [database.server.log.stat().st_size for database in made]
    yield made[0], made[1]
    logs = [database.server.log.read_bytes()[offset:] for database, offset in zip(made, offsets, strict=True)]
    for database in made:
        database.drop()
    assert [line for log in logs for line in log.decode(errors="replace").splitlines() if "captured: " in line] == []


@pytest.mark.parametrize("user", ["postgres", pytest.param(_PLAIN, id="plain", marks=pytest.mark.long)])
def test_nothing_that_the_owner_of_a_database_planted_is_called(
    launcher: Cli, planted: tuple[Database, Database], user: str
) -> None:
    pubdb, subdb = planted
    name = f"c_{user}"

    def ok(*words: str) -> str:
        ended = launcher(*words)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def same(*tables: str) -> None:
        ok("wait", name, "--for", "caught-up", "--timeout", "2m")
        for table in tables:
            query = f"SELECT * FROM {table} ORDER BY 1"
            assert subdb.rows(query) == pubdb.rows(query)

    for table in "abde":
        subdb.execute(f"ALTER TABLE {table} OWNER TO {user}")
    launcher.connection, launcher.target = (make_conninfo(database.conninfo, user=user) for database in planted)
    ended = launcher.create(name, "--no-wait")
    assert ended.returncode == 0, ended.stderr
    assert subdb.rows(_LEDGERS_OWNERS) == [(user,)]
    same("a", "b")
    pubdb.execute(
        r"UPDATE a SET t = E'\\ and ''' WHERE id < 100; DELETE FROM a WHERE id > 400; INSERT INTO b VALUES (2, 0);"
        "UPDATE d SET n = 2 WHERE mail::text = 'a@x'; UPDATE e SET n = 2 WHERE mail::text = 'a@x'"
    )
    same("a", "b")
    for table in "de":
        query = f"SELECT mail::text, n FROM {table} ORDER BY 1"
        assert subdb.rows(query) == pubdb.rows(query) == [("a@x", 2), ("b@x", 1)]
    for database in planted:
        database.execute("CREATE TABLE c (id int PRIMARY KEY, w timestamptz DEFAULT now(), f float8, b bytea)")
    pubdb.execute(f"INSERT INTO c VALUES (1, now(), 0.1, '\\x00ff'); GRANT SELECT ON c TO {_PLAIN}")
    pubdb.execute("ALTER PUBLICATION p ADD TABLE c")
    subdb.execute(f"ALTER TABLE c OWNER TO {user}")
    ok("refresh", name, "--no-wait")
    ok("wait", name, "--for", "synced", "--timeout", "2m")
    pubdb.execute("UPDATE c SET f = 1e-300, w = 'infinity'")
    same("a", "b")
    subdb.execute("INSERT INTO a VALUES (1000, 'mine')")
    pubdb.execute("INSERT INTO a VALUES (1000, 'theirs')")
    ok("wait", name, "--for", "error", "--timeout", "2m")
    assert "insert_exists" in launcher("skip-lsn", name, "--preview").stdout
    ok("skip-lsn", name, "--yes")
    ok("wait", name, "--for", "caught-up", "--timeout", "2m")
    ok("conflicts", "list", name)
    ok("status", name)
    ok("drop", name, "--yes")
