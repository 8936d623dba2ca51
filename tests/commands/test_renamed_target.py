"""The owner of the target's database gives its name to another one, which is his: nothing of that is used."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psycopg
import pytest
from fix_program import Cli, one_error
from psycopg import sql
from swapped import CODE, Ran

from pgsub.target.ledger.schema import installation
from pgsub.target.session import connect as target

if TYPE_CHECKING:
    from fix_servers import Database

_MALLORY = f"renamer_{os.getpid()}"
_SAID = 'the target of subscription "s" is a different database'
#: Tables as those of the target, with code; and a ledger as of a subscription that has received nothing yet.
_FORGED = """
CREATE TABLE a (id int PRIMARY KEY, t text);
CREATE TABLE b (id int PRIMARY KEY, n numeric);
CREATE TRIGGER fired BEFORE INSERT ON b EXECUTE FUNCTION fired();
ALTER TABLE b ENABLE ALWAYS TRIGGER fired;
"""
_LEDGER = """
INSERT INTO pgsub.subscription (subid, subname, state_store, slot_name) VALUES ({0}, 's', '/', 's');
INSERT INTO pgsub.control (subid, worker, token) VALUES ({0}, 0, pg_catalog.gen_random_uuid());
INSERT INTO pgsub.progress (subid, worker) VALUES ({0}, 0);
INSERT INTO pgsub.subscription_rel (subid, srrelid, schemaname, relname, srsubstate)
SELECT {0}, oid, 'public', relname, 'r' FROM pg_catalog.pg_class WHERE relname IN ('a', 'b') AND relkind = 'r';
"""


def _forge(database: Database, subid: int) -> str:
    """Make a database of the owner's, and return its name."""
    name = f"{database.name}_forged"
    with contextlib.closing(database.server.connect("postgres", _MALLORY)) as session:
        session.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(sql.Identifier(name)))
    with contextlib.closing(database.server.connect(name, _MALLORY)) as session:
        session.execute(f"{CODE}{_FORGED}".encode())
    with contextlib.closing(target.connect(database.server.conninfo(name, _MALLORY), "forge")) as session:
        installation.install(session)
        session.execute(sql.SQL(_LEDGER).format(subid))
    return name


@contextlib.contextmanager
def renamed(database: Database, subid: int) -> Iterator[Ran]:
    """Let the owner of a database, who may create others, give its name to one of these for the length of the block."""
    mallory, real = sql.Identifier(_MALLORY), sql.Identifier(database.name)
    database.connection.execute(sql.SQL("CREATE ROLE {} LOGIN CREATEDB").format(mallory))
    database.connection.execute(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(real, mallory))
    forged = sql.Identifier(_forge(database, subid))
    away = sql.Identifier(f"{database.name}_away")
    rename = sql.SQL("ALTER DATABASE {} RENAME TO {}")

    def change(*names: sql.Identifier) -> None:
        database.close()
        with contextlib.closing(database.server.connect("postgres", _MALLORY)) as session:
            for before, after in itertools.pairwise(names):
                session.execute(rename.format(before, after))

    try:
        change(real, away)
        change(forged, real)
        try:
            yield Ran(database)
        finally:
            change(real, forged)
            change(away, real)
    finally:
        database.connection.execute(sql.SQL("ALTER DATABASE {} OWNER TO postgres").format(real))
        database.connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(forged))
        database.connection.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(mallory))


def _of(database: Database) -> list[tuple[int, str | None]]:
    with contextlib.closing(psycopg.connect(database.conninfo)) as session:
        return session.execute("SELECT id, n::text FROM b ORDER BY id").fetchall()


@pytest.mark.long
def test_a_database_that_took_the_name_of_the_targets_gets_no_change_and_runs_no_code(
    cli: Cli, tables: tuple[Database, Database]
) -> None:
    pubdb, subdb = tables
    ended = cli.create("s")
    assert ended.returncode == 0, ended.stderr
    [(subid,)] = cli.sql("SELECT oid FROM pg_subscription")
    pubdb.execute("INSERT INTO b VALUES (1, 1.5)")
    with renamed(subdb, subid) as other:
        ended = cli("run", "--until-caught-up", "--timeout", "3s")
        assert ended.returncode != 0 and _SAID in ended.stderr, ended.stderr
        for words in (("refresh", "s"), ("verify", "s"), ("alter", "s", "--target", subdb.conninfo), ("drop", "s")):
            one_error(cli(*words, *(["--yes"] if words[0] == "drop" else [])), 3, _SAID)
        assert cli("disable", "s").returncode == 0
        assert _of(subdb) == []
        assert not other.ran
    assert cli("enable", "s").returncode == 0
    ended = cli("run", "--until-caught-up", "--timeout", "1m")
    assert ended.returncode == 0, ended.stderr
    assert _of(subdb) == [(1, "1.5")]
