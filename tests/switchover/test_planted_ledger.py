"""A role with CREATE on the publisher's database plants schema pgsub, whose columns run code when they are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from fix_program import one_error
from fix_servers import Database
from fix_switchover import Mover

from pgsub.common.errors import StateForbids
from pgsub.publisher import connect as publisher
from pgsub.switchover import journal, lost_side
from pgsub.target.session import connect as target
from pgsub.target.session import ledger_guard

_PLANTED = """
SET default_transaction_read_only = off;
SET ROLE {0};
CREATE SCHEMA {1};
CREATE TYPE {1}.evil AS (a text);
CREATE FUNCTION {1}.run({1}.evil) RETURNS text LANGUAGE plpgsql AS $f$
BEGIN EXECUTE 'ALTER ROLE {0} SUPERUSER'; RETURN '0/1'; END $f$;
CREATE CAST ({1}.evil AS text) WITH FUNCTION {1}.run({1}.evil);
CREATE TABLE {1}.subscription (subid int, subname text);
CREATE TABLE {1}.switchover (id uuid, side text, subid int, subname text, back_name text, back_subid int, phase text,
    fence text, saved json, definition json, position {1}.evil, fenced_at timestamptz, began_at timestamptz,
    changed_at timestamptz);
INSERT INTO {1}.switchover (id, side, subid, subname, back_name, phase, fence, position, began_at)
    VALUES ('{2}', 'taking', 1, 'moved', 'moved_back', 'done', 'read-only', ROW('x'), now());
GRANT USAGE ON SCHEMA {1} TO PUBLIC; GRANT SELECT ON ALL TABLES IN SCHEMA {1} TO PUBLIC;
"""
_ID = "00000000-0000-0000-0000-000000000001"
_SUPER = "SELECT rolsuper FROM pg_roles WHERE rolname = %s"


class Stranger:
    """A role that may create schemas in a database, and nothing else."""

    def __init__(self, database: Database) -> None:
        self.name = f"stranger_{database.name}"
        self._database = database
        self._run(f'CREATE ROLE {self.name}; GRANT CREATE ON DATABASE "{database.name}" TO {self.name}')

    def plant(self, schema: str = "pgsub", id: str = _ID) -> None:
        self._run(_PLANTED.format(self.name, schema, id))

    def rename(self, schema: str) -> None:
        self._run(f"SET ROLE {self.name}; ALTER SCHEMA {schema} RENAME TO pgsub")

    def is_superuser(self) -> bool:
        with closing(self._database.connect()) as session:
            [(found,)] = session.execute(_SUPER.encode(), (self.name,)).fetchall()
            return bool(found)

    def remove(self) -> None:
        more = f"SET default_transaction_read_only = off; DROP OWNED BY {self.name} CASCADE; DROP ROLE {self.name}"
        self._run(f"SET default_transaction_read_only = off; ALTER ROLE {self.name} NOSUPERUSER; {more}")

    def _run(self, statements: str) -> None:
        with closing(self._database.connect()) as session:
            session.execute(statements.encode())


@pytest.fixture
def stranger(pubdb: Database) -> Iterator[Stranger]:
    """One on the publisher."""
    made = Stranger(pubdb)
    yield made
    made.remove()


def test_a_ledger_that_comes_behind_the_check_of_a_session_is_not_read(pubdb: Database, stranger: Stranger) -> None:
    """A command of a switchover opened its session where there was no ledger, and found one when it read."""
    stranger.plant("soon")
    with closing(target.connect(pubdb.conninfo, "test", replica=False, views=False)) as session:
        with pytest.raises(psycopg.errors.UndefinedTable):
            journal.latest(session, journal.TAKING, "moved")
        stranger.rename("soon")
        with pytest.raises(StateForbids, match=r'schema "pgsub" of database .* cannot be trusted'):
            journal.latest(session, journal.TAKING, "moved")
    assert not stranger.is_superuser()


def test_a_planted_ledger_of_a_publisher_is_not_read(pubdb: Database, stranger: Stranger) -> None:
    stranger.plant()
    with closing(publisher.connect(pubdb.conninfo, application_name="test")) as session:
        ledger_guard.guard(session)
        for read in (lambda: journal.of(session, _ID), lambda: lost_side.knows(session, 1)):
            with pytest.raises(StateForbids, match="cannot be trusted"):
                read()
    assert not stranger.is_superuser()


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ("switchover", "moved", "--status"),
        ("switchover", "moved", "--yes"),
        ("reconcile", "moved_back", "--force", "--yes"),
    ],
    ids=lambda words: words[0] + words[-1],
)
def test_a_command_does_not_read_what_was_planted_where_the_ledger_was_lost(
    mover: Mover, words: tuple[str, ...]
) -> None:
    mover("--no-verify")
    [(id,)] = mover.rows(0, "SELECT id::text FROM pgsub.switchover")
    mover.alone(1, "DROP SCHEMA pgsub CASCADE")
    stranger = Stranger(mover.databases[1])
    try:
        stranger.plant(id=id)
        one_error(mover.cli(*words), 3, "cannot be trusted")
        assert not stranger.is_superuser()
    finally:
        stranger.remove()
