"""A role that may create in a database makes schema pgsub there before pgsub does: no command runs its code."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from fix_program import Cli, one_error
from psycopg import sql

from pgsub.commands.sessions import connect_target
from pgsub.commands.switchover.parties import SwitchoverOptions, giving_session
from pgsub.common.errors import PermissionMissing, StateForbids
from pgsub.common.subscription import Subscription
from pgsub.target.ledger.schema import installation
from pgsub.target.session import connect as target
from pgsub.target.session import ledger_guard, ledger_privileges

if TYPE_CHECKING:
    from fix_servers import Database

pytestmark = pytest.mark.own_spark

_MALLORY = f"planter_{os.getpid()}"
#: Views in the place of all tables of the ledger; what is read of one is said in the server's log.
_PLANT = """
CREATE FUNCTION pgsub.trap() RETURNS bool LANGUAGE plpgsql AS
    $f$BEGIN RAISE LOG 'captured: %', current_user; RETURN true; END$f$;
DO $plant$
DECLARE it text;
BEGIN
    FOR it IN SELECT relname FROM pg_class WHERE relnamespace = 'pgsub'::regnamespace AND relkind = 'r'
    LOOP
        EXECUTE format('ALTER TABLE pgsub.%1$I RENAME TO "was %1$s"', it);
        EXECUTE format('CREATE VIEW pgsub.%1$I AS SELECT * FROM pgsub."was %1$s" WHERE pgsub.trap()', it);
    END LOOP;
END
$plant$;
GRANT USAGE ON SCHEMA pgsub TO PUBLIC;
GRANT ALL ON ALL TABLES IN SCHEMA pgsub TO PUBLIC;
"""


@contextlib.contextmanager
def planted(database: Database) -> Iterator[None]:
    """Have a role plant a ledger, and see that a superuser who reads it is captured; nobody else may be."""
    name, mallory = sql.Identifier(database.name), sql.Identifier(_MALLORY)
    database.connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(mallory))
    database.connection.execute(sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(name, mallory))
    try:
        with contextlib.closing(target.connect(database.server.conninfo(database.name, _MALLORY), "plant")) as session:
            installation.install(session)
            session.execute(_PLANT.encode())
        assert database.value("SELECT max(version) FROM pgsub.ledger_version") == installation.VERSION
        assert "captured: postgres" in database.server.log.read_text(errors="replace")
        offset = database.server.log.stat().st_size
        yield
        assert b"captured: " not in database.server.log.read_bytes()[offset:]
    finally:
        database.connection.execute(sql.SQL("DROP OWNED BY {0} CASCADE; DROP ROLE {0}").format(mallory))


def test_a_ledger_that_somebody_planted_on_the_target_is_not_even_read(
    cli: Cli, tables: tuple[Database, Database]
) -> None:
    again = ("run", "s", "--from-target", "--connection", cli.connection, "--target", cli.target, "--until-caught-up")
    with planted(tables[1]):
        for words in (again, cli.words("s", "--no-wait")):
            one_error(cli(*words), 11, f'the ledger on the target belongs to role "{_MALLORY}"')


def test_a_ledger_that_comes_behind_the_check_of_a_session_on_the_target_is_not_read(
    pubdb: Database, subdb: Database
) -> None:
    sub = Subscription(1, "s", pubdb.conninfo, subdb.conninfo, ("p",), None)
    with connect_target(sub) as session:
        ledger_privileges.check(session)  # there is none
        with pytest.raises(psycopg.errors.UndefinedTable):
            ledger_guard.check(session)
        with planted(subdb):
            for statement in (
                "SELECT max(version) FROM pgsub.ledger_version",
                "INSERT INTO pgsub.event DEFAULT VALUES",
            ):
                with pytest.raises(StateForbids, match="cannot be trusted"):
                    session.execute(statement)
            with pytest.raises(PermissionMissing):
                ledger_guard.check(session)
            with session.transaction(), ledger_privileges.acting(session):
                assert session.execute("SELECT current_user::text").fetchone() == ("postgres",)
        installation.install(session)
        session.execute("SELECT max(version) FROM pgsub.ledger_version")
        ledger_guard.check(session)


def test_a_ledger_that_somebody_planted_on_the_publisher_is_not_even_read(
    pubdb: Database, subdb: Database, state_dir: Path
) -> None:
    options = SwitchoverOptions("s", state_dir, back_target=pubdb.conninfo)
    sub = Subscription(1, "s", pubdb.conninfo, subdb.conninfo, ("p",), None)
    with planted(pubdb):
        with pytest.raises(PermissionMissing, match="the ledger on the publisher belongs to role") as caught:
            with giving_session(options, sub):
                pass
        assert caught.value.detail is not None and "the user of --target" in caught.value.detail
    with giving_session(options, sub) as giving:
        with planted(pubdb), pytest.raises(StateForbids, match="cannot be trusted"):
            giving.execute("SELECT FROM pgsub.switchover")  # made behind the check


def test_create_reads_no_ledger_that_somebody_planted_on_the_publisher_and_says_so(
    cli: Cli, tables: tuple[Database, Database]
) -> None:
    with planted(tables[0]):
        ended = cli.create("s", "--no-wait", "--origin", "none")
        assert ended.returncode == 0, ended.stderr
        assert "schema pgsub of the publisher is not read" in ended.stderr
