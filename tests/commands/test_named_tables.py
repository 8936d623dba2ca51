"""Every statement that names a table of the publisher comes after a lock of the table in the same transaction."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fix_program import Cli, until
from fix_servers import Database
from swapped import Swapped

from pgsub.commands.preflight import adoption
from pgsub.commands.preflight.findings import Table
from pgsub.common.errors import TableReplaced
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher.tables import describe_tables
from pgsub.target.catalog.relation import describe

#: A record of the server's log: process, application, statement; further lines of it begin with a tab.
_RECORD = re.compile(r"^\S+ \S+ \S+ \[(\d+)\] (.*?) ?LOG:  (?:statement|execute [^:]*): (.*(?:\n\t.*)*)", re.MULTILINE)
_LITERAL = re.compile(r"'(?:[^']|'')*'")
_NAMED = re.compile(r'"public"\."(\w+)"')
_LOCKED = re.compile(r'LOCK TABLE ONLY "public"\."(\w+)"')
_ENDS = re.compile(r"BEGIN|START TRANSACTION|COMMIT|ROLLBACK(?! TO)|END")


def _statements(log: Path, offset: int) -> Iterator[tuple[str, bool, list[str]]]:
    """Statements that name tables, whether their transaction holds all of them, and which they are."""
    held: dict[str, set[str]] = {}
    with log.open("rb") as opened:
        opened.seek(offset)
        text = opened.read().decode(errors="replace")
    for pid, application, statement in _RECORD.findall(text):
        if not application or application == "psql":  # a test's own session
            continue
        bare = _LITERAL.sub("''", statement)
        locks = held.setdefault(pid, set())
        if _ENDS.match(bare):
            locks.clear()
        locks.update(_LOCKED.findall(bare))
        names = _NAMED.findall(bare)
        if names:
            yield statement, set(names) <= locks, names


@pytest.mark.long
def test_no_statement_on_the_publisher_names_a_table_that_its_transaction_does_not_hold(
    joined: Cli, tables: tuple[Database, Database]
) -> None:
    pubdb, subdb = tables
    pubdb.execute(f"ALTER DATABASE {pubdb.name} SET log_statement = 'all'")
    log = pubdb.server.log
    offset = log.stat().st_size

    def ok(*words: str) -> None:
        ended = joined(*words)
        assert ended.returncode == 0, ended.stderr

    subdb.execute("INSERT INTO a VALUES (5, 'in the way')")
    assert joined.create("named", "--no-wait").returncode == 0
    until(lambda: joined.sql("SELECT 1 FROM pgsub_conflict"))
    subdb.execute("DELETE FROM a")
    ok("wait", "named", "--for", "caught-up", "--timeout", "2m")
    subdb.execute("UPDATE a SET t = 'other' WHERE id = 7; DELETE FROM a WHERE id = 8")
    ok("verify", "named", "--repair", "--yes")
    subdb.execute("UPDATE a SET t = 'other' WHERE id = 7; DELETE FROM a WHERE id = 8")
    ok("refresh", "named", "--resync", "public.a", "--adopt", "--yes")
    ok("wait", "named", "--for", "caught-up", "--timeout", "2m")
    found = list(_statements(log, offset))
    assert [statement for statement, held, _ in found if not held] == []
    for kind in ("SELECT EXISTS (SELECT FROM", "COPY (SELECT * FROM (SELECT", 'COPY "public"."a"'):
        assert any(statement.startswith(kind) for statement, _, _ in found), kind


def test_nothing_of_a_table_that_took_a_name_is_run_by_the_check_whether_it_has_rows(
    pubdb: Database, subdb: Database
) -> None:
    for database in (pubdb, subdb):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1)")
    sub = Subscription(0, "s", pubdb.conninfo, subdb.conninfo, "s", ("p",))
    with contextlib.closing(publisher.connect(pubdb.conninfo, application_name="test")) as source:
        remote = describe_tables(source, [("public", "t")], None).tables["public", "t"]
        swapped = Swapped(pubdb)
        with pytest.raises(TableReplaced, match="was replaced by another table"):
            adoption.check(source, subdb.connection, sub, [Table(remote, describe(subdb.connection, "public", "t"))])
    assert not swapped.ran
