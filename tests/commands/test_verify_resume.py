"""``pgsub verify --resume``: ranges of a large table that were found equal are not read again, until it has changed."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
from fix_program import Cli, valid
from fix_servers import Database

pytestmark = [pytest.mark.unserved_first, pytest.mark.long]

Tables = tuple[Database, Database]
Served = tuple[Cli, str]
Reached = Callable[[str], None]

#: Tables of some blocks are large with this.
_SMALL = {"PGSUB_CHUNK_BYTES": "16384"}
_ROWS = 8000
_READ = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 'a'"
#: Sessions of a comparison: one that is idle has rolled back.
_READERS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    " AND query ~ '^ROLLBACK|SNAPSHOT|hashint4extended'"
)


@pytest.fixture
def large(served: Served, tables: Tables) -> Served:
    """The subscription, whose table a has rows in many ranges."""
    cli, name = served
    tables[0].execute(f"TRUNCATE a; INSERT INTO a SELECT g, repeat('x', 200) FROM generate_series(1, {_ROWS}) g")
    assert cli("wait", name, "--for", "caught-up", "--timeout", "2m").returncode == 0
    for database in tables:
        database.execute("ANALYZE a")
    return served


def _plant(database: Database, statements: str) -> None:
    database.execute(f"SET session_replication_role = replica; {statements}; RESET session_replication_role")


def _killed(cli: Cli, name: str, *options: str, at: int = 5) -> None:
    """End a verify with a kill when it has compared ranges so many times."""
    points = {"PGSUB_FAILPOINTS": f"verify.ranges_compared=kill@{at}"}
    killed = cli("verify", name, "--table", "public.a", *options, env={**_SMALL, **points})
    assert killed.returncode in (-9, 137), killed.stdout + killed.stderr


def _resume(cli: Cli, name: str, *options: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Go on; return the position, and what is said of the table and beside that."""
    ended = cli("verify", name, "--table", "public.a", "--resume", "--json", *options, env=_SMALL)
    assert ended.returncode == code, ended.stdout + ended.stderr
    found = valid("verify", ended.stdout)
    [table] = found["tables"]
    return {**table, "point": found["lsn"]}, ended.stderr


def _read(database: Database) -> int:
    """Rows of the table that sessions of this server have read by now."""
    database.wait(_READERS, value=0)  # they have told what they read when they are gone
    return int(database.value(_READ))


def test_ranges_that_were_found_equal_are_not_read_again_and_a_fault_in_the_rest_is_found(
    large: Served, tables: Tables, reached: Reached
) -> None:
    cli, name = large
    _killed(cli, name)
    reached("verify.ranges_compared")
    _plant(tables[1], f"UPDATE a SET t = 'fault' WHERE id IN (7, {_ROWS - 7})")
    before = _read(tables[0])
    found, said = _resume(cli, name, code=6)
    read = _read(tables[0]) - before  # what follows reads rows of the table itself
    [part] = found["earlier"]
    known = part["rows"]
    assert part["column"] == "id" and part["low"] is None and part["lsn"] != found["point"] == found["lsn"]
    assert (
        _ROWS // 10 < known < _ROWS // 2
        and tables[0].value(f"SELECT count(*) FROM a WHERE id < {part['high']}") == known
    )
    assert [(one["kind"], one["key"]) for one in found["differences"]] == [("different", {"id": str(_ROWS - 7)})]
    assert found["publisher_rows"] == found["target_rows"] == _ROWS
    # rows near the fault are looked at once more to find it
    assert _ROWS - known <= read < _ROWS - known // 2
    assert cli.sql("SELECT * FROM pgsub_verified") == [] and "beginning" not in said
    text = cli("verify", name, "--table", "public.a", "--resume", env=_SMALL)  # that one ended
    assert text.returncode == 6 and "different (id)=(7)" in text.stdout and "was interrupted: everything" in text.stderr


def test_what_goes_on_and_is_killed_again_says_from_where_each_part_is(
    large: Served, tables: Tables, reached: Reached
) -> None:
    cli, name = large
    _killed(cli, name)
    tables[0].execute("UPDATE a SET t = 'newer' WHERE id IN (1, 2)")
    _killed(cli, name, "--resume")
    reached("verify.ranges_compared")
    [(ranges,)] = cli.sql("SELECT ranges FROM pgsub_verified")
    assert len(ranges) < 20_000
    ended = cli("verify", name, "--table", "public.a", "--resume", env=_SMALL)
    said = [line for line in ended.stdout.splitlines() if "before verify was interrupted" in line]
    assert ended.returncode == 0 and len(said) == 2
    assert said[0].startswith("public.a: rows with id < ") and said[1].startswith("public.a: rows with id >= ")


_CHANGES = {
    "a column": ("ALTER TABLE a ADD c int", "ALTER TABLE a ADD c int"),
    "a type": ("", "ALTER TABLE a ALTER t TYPE varchar(300)"),
    "the key": ("", "ALTER TABLE a DROP CONSTRAINT a_pkey, ADD PRIMARY KEY (id, t)"),
    "the row filter": ("ALTER PUBLICATION p SET TABLE a WHERE (id > 0), b", ""),
}


def test_what_has_changed_since_is_compared_from_the_beginning(large: Served, tables: Tables, reached: Reached) -> None:
    cli, name = large

    def broke_off(*options: str) -> None:
        _killed(cli, name, *options)
        assert cli.sql("SELECT relname FROM pgsub_verified") == [("a",)]

    def anew(*options: str) -> None:
        found, said = _resume(cli, name, *options)
        assert found["earlier"] == [] and 'table "public.a" is compared from the beginning' in said, said

    broke_off("--sample", "50%")
    anew()
    for here, there in _CHANGES.values():
        broke_off()
        for database, statements in zip(tables, (here, there), strict=True):
            if statements:
                database.execute(statements)
        for database in tables:
            database.execute("ANALYZE a")
        anew()
    reached("verify.ranges_compared")


def test_a_table_that_was_copied_again_is_compared_from_the_beginning(
    large: Served, tables: Tables, reached: Reached
) -> None:
    cli, name = large
    _killed(cli, name)
    reached("verify.ranges_compared")
    assert cli("refresh", name, "--resync", "public.a", "--yes").returncode == 0
    found, said = _resume(cli, name)
    assert found["earlier"] == [] and "compared from the beginning" in said


def test_what_is_known_ends_with_a_verify_that_does_not_go_on_and_with_the_subscription(
    large: Served, tables: Tables, reached: Reached
) -> None:
    cli, name = large
    _killed(cli, name)
    reached("verify.ranges_compared")
    assert cli("verify", name, "--table", "public.b").returncode == 0
    assert cli.sql("SELECT relname FROM pgsub_verified") == [("a",)]
    assert cli("verify", name, "--table", "public.a").returncode == 0
    assert cli.sql("SELECT relname FROM pgsub_verified") == []
    _killed(cli, name)
    assert cli("drop", name, "--yes").returncode == 0
    assert cli.sql("SELECT relname FROM pgsub_verified") == []


_WRITTEN = (
    '{"bounds": ["1"], "equal": [[0, 9, "0/1", 5]]}',
    '{"bounds": 7}',
    '{"bounds": ["1"], "equal": [["x"]]}',
    "{}",
)


def test_what_somebody_has_written_into_the_state_store_is_not_believed(
    large: Served, tables: Tables, reached: Reached
) -> None:
    cli, name = large
    _killed(cli, name)
    reached("verify.ranges_compared")
    [row] = cli.sql("SELECT * FROM pgsub_verified")
    for ranges in _WRITTEN:
        with contextlib.closing(sqlite3.connect(cli.state / "state.db")) as store, store:
            store.execute("REPLACE INTO pgsub_verified VALUES (?, ?, ?, ?, ?, ?)", (*row[:-1], ranges))
        found, said = _resume(cli, name)
        assert found["earlier"] == [] and "compared from the beginning" in said
