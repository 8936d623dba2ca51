"""``pgsub verify --repair``: what differs becomes what the publisher has, whatever is written and killed meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import patience
import pytest
from fix_program import Cli, one_error, until, valid
from fix_served import writing
from fix_servers import Database

from pgsub.commands.reporter import CallbackReporter, Reporter
from pgsub.commands.verify import repair
from pgsub.commands.verify.result import NOT_COMPARED, Verification
from pgsub.commands.verify.verify import VerifyOptions

pytestmark = pytest.mark.unserved_first

Tables = tuple[Database, Database]
Served = tuple[Cli, str]

_FAULTS = (
    "DELETE FROM a WHERE id IN (1, 2); UPDATE a SET t = 'fault' WHERE id IN (3, 4);"
    "INSERT INTO a VALUES (-5, 'extra'); DELETE FROM b WHERE id = (SELECT min(id) FROM b)"
)

_MORE = (
    "UPDATE a SET t = 'fault' WHERE id < 20; DELETE FROM a WHERE id BETWEEN 30 AND 40;"
    "INSERT INTO a SELECT g, 'extra' FROM generate_series(-9, -1) g ON CONFLICT DO NOTHING"
)


def _plant(database: Database, statements: str) -> None:
    """Change rows of the target as nobody notices: triggers stay silent."""
    database.execute(f"SET session_replication_role = replica; {statements}; SET session_replication_role = origin")


def _repair(cli: Cli, name: str, *options: str, code: int = 0) -> dict[str, Any]:
    ended = cli("verify", name, "--repair", "--json", *options)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return valid("verify", ended.stdout)


def _same(tables: Tables, *names: str) -> None:
    for name in names:
        query = f"SELECT x::text FROM {name} AS x ORDER BY 1"
        assert tables[0].rows(query) == tables[1].rows(query), name


#: Change the very rows that differ, and others.
_CHANGES = (
    "UPDATE a SET t = 'newer {}' WHERE id = 1 + {} % 6",
    "INSERT INTO a VALUES (1000 + {}, 'new')",
    "DELETE FROM a WHERE id = 1000 + {} - 3",
)


@pytest.mark.long
def test_what_differs_becomes_what_the_publisher_has_and_what_was_there_is_recorded(
    served: Served, tables: Tables
) -> None:
    cli, name = served
    tables[0].execute("INSERT INTO b VALUES (1, 1.50), (2, 2.00)")
    _plant_when_there(cli, name, tables)
    looked = _repair(cli, name, "--dry-run", code=6)
    assert looked["repair"] == {"dry_run": True, "tables": [], "refused": []} and not looked["equal"]
    found = _repair(cli, name, "--yes")
    done = {one.pop("table"): one for one in found["repair"]["tables"]}
    assert found["equal"] and done["public.a"] == {"inserted": 2, "updated": 2, "deleted": 1}
    assert done["public.b"]["inserted"] == 1
    _same(tables, "a", "b")
    kept = tables[1].rows(
        "SELECT body ->> 'operation', body -> 'old' ->> 't', replayed_at IS NOT NULL FROM pgsub.skipped_change"
        " WHERE body ->> 'reason' = 'repaired' ORDER BY 1, 2"
    )
    assert kept == [("DELETE", "extra", True), ("UPDATE", "fault", True), ("UPDATE", "fault", True)]
    assert cli("wait", name, "--for", "caught-up", "--timeout", "2m").returncode == 0
    shown = valid("conflicts", cli("conflicts", "list", name, "--json").stdout)["conflicts"]
    assert sorted((one["conflict_type"], one["action"]) for one in shown) == [
        ("delete_origin_differs", "repaired"),
        ("update_origin_differs", "repaired"),
        ("update_origin_differs", "repaired"),
    ]
    # what is kept explains nothing
    _plant(tables[1], "UPDATE a SET t = 'again' WHERE id = 3")
    assert cli("verify", name).returncode == 6
    tables[0].execute("UPDATE a SET t = 'goes on' WHERE id = 1")
    assert _repair(cli, name, "--from", "publisher", "--yes")["equal"]
    _same(tables, "a", "b")


def _plant_when_there(cli: Cli, name: str, tables: Tables) -> None:
    assert cli("wait", name, "--for", "caught-up", "--timeout", "2m").returncode == 0
    _plant(tables[1], _FAULTS)


@pytest.mark.long
def test_nothing_newer_is_overwritten_while_the_publisher_writes_to_the_rows_that_differ(
    served: Served, tables: Tables
) -> None:
    cli, name = served
    with writing(tables[0], *_CHANGES) as done:
        for _ in range(3):
            _plant(tables[1], _MORE)
            assert _repair(cli, name, "--yes", "--table", "public.a")["equal"]
    assert done[0] > 50
    found = _repair(cli, name, "--yes", "--table", "public.a")
    assert found["equal"] and found["repair"]["tables"] == []
    _same(tables, "a")


def test_a_table_that_could_not_be_compared_at_first_is_repaired_in_a_later_round(
    served: Served, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli, name = served
    tables[0].execute("INSERT INTO b VALUES (1, 1.50), (2, 2.00), (3, 3.00)")
    assert cli("wait", name, "--for", "caught-up", "--timeout", "2m").returncode == 0
    _plant(tables[1], "UPDATE a SET t = 'fault' WHERE id = 3; DELETE FROM b")
    compare = repair.verify

    def cut(options: VerifyOptions, *, reporter: Reporter) -> Verification:
        """Compare as if the connection had been lost before table b."""
        monkeypatch.setattr(repair, "verify", compare)
        found = compare(options, reporter=reporter)
        for table in found.tables:
            if table.relname == "b":
                table.outcome, table.result = NOT_COMPARED, None
        return found

    monkeypatch.setattr(repair, "verify", cut)
    asked: list[Verification] = []
    done = repair.repair(VerifyOptions(name, cli.state), reporter=CallbackReporter(), confirm=asked.append)
    assert done.after.equal and done.rows["public", "b"].inserted == 3
    assert [sum(table.differing for table in found.tables) for found in asked] == [1, 3]
    _same(tables, "a", "b")


def test_a_table_that_was_equal_at_first_is_not_repaired(served: Served, tables: Tables) -> None:
    cli, name = served
    _plant(tables[1], "UPDATE a SET t = 'fault' WHERE id = 3")

    def written(found: Verification) -> None:
        tables[1].execute("INSERT INTO b VALUES (7777, 7.00)")

    done = repair.repair(VerifyOptions(name, cli.state), reporter=CallbackReporter(), confirm=written)
    assert done.rows["public", "a"].updated == 1 and ("public", "b") not in done.rows
    assert done.after.equal is False  # as any comparison says
    assert tables[1].value("SELECT count(*) FROM b WHERE id = 7777") == 1


_UNDOES = """
CREATE FUNCTION {0}_undoes() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
 IF pg_trigger_depth() = 1 THEN UPDATE public.{1}; END IF; RETURN NULL; END $$;
CREATE TRIGGER undoes AFTER UPDATE ON {0} FOR EACH ROW EXECUTE FUNCTION {0}_undoes();
ALTER TABLE {0} ENABLE ALWAYS TRIGGER undoes;
"""


def test_a_repair_ends_though_each_of_two_tables_undoes_that_of_the_other(served: Served, tables: Tables) -> None:
    cli, name = served
    tables[0].execute("INSERT INTO b VALUES (1, 1.50)")
    assert cli("wait", name, "--for", "caught-up", "--timeout", "2m").returncode == 0
    _plant(tables[1], "UPDATE a SET t = 'fault' WHERE id = 3; UPDATE b SET n = 7")
    tables[1].execute(_UNDOES.format("a", "b SET n = n + 1") + _UNDOES.format("b", "a SET t = t || '!' WHERE id = 3"))
    found = _repair(cli, name, "--yes", code=6)
    assert found["equal"] is False and found["repair"]["tables"]


@pytest.mark.long
def test_a_repair_that_is_killed_before_it_writes_and_behind_that_is_run_again(
    served: Served, tables: Tables, reached: Callable[[str], None]
) -> None:
    cli, name = served
    _plant(tables[1], "DELETE FROM a WHERE id < 10; UPDATE a SET t = 'fault' WHERE id BETWEEN 20 AND 30")
    for point, missing in (("repair.taken", 9), ("repair.committed", 0)):
        ended = cli("verify", name, "--repair", "--yes", env={"PGSUB_FAILPOINTS": f"{point}=kill"})
        assert ended.returncode in (-9, 137), ended.stdout + ended.stderr
        reached(point)
        assert tables[1].value("SELECT 9 - count(*) FROM a WHERE id < 10") == missing
    found = _repair(cli, name, "--yes")
    assert found["equal"] and found["repair"]["tables"] == []
    _same(tables, "a")
    kept = "SELECT count(*) FROM pgsub.skipped_change WHERE body ->> 'reason' = 'repaired'"
    assert tables[1].value(kept) == 11
    assert tables[1].value("SELECT count(*) FROM pgsub.barrier") == 0


@pytest.mark.long
def test_a_repair_whose_barrier_is_gone_writes_nothing_of_that_point(
    served: Served, tables: Tables, tmp_path: Path, reached: Callable[[str], None]
) -> None:
    cli, name = served
    _plant(tables[1], "UPDATE a SET t = 'fault' WHERE id = 3")
    go = tmp_path / "go"
    marks = tmp_path / "marks"
    marks.mkdir()
    actions = {"PGSUB_FAILPOINTS": f"repair.standing=pause:{go}", "PGSUB_FAILPOINTS_DIR": str(marks)}
    repairing = cli.start("verify", name, "--repair", "--yes", env=actions)
    until(lambda: (marks / "repair.standing").exists())
    tables[1].execute("DELETE FROM pgsub.barrier; UPDATE pgsub.progress SET states_version = states_version + 1")
    tables[0].execute("UPDATE a SET t = 'newer' WHERE id = 3")
    until(lambda: tables[1].value("SELECT t FROM a WHERE id = 3") == "newer")
    go.touch()
    assert repairing.wait(patience.SECONDS) == 0
    _same(tables, "a")
    assert tables[1].value("SELECT count(*) FROM pgsub.skipped_change") == 0
    reached("repair.standing")


_PARTITIONED = "CREATE TABLE r (id int, at timestamptz, j jsonb, n numeric, f float8, PRIMARY KEY (id, at))"
_REORDERED = (
    "CREATE TABLE r (mine text DEFAULT 'mine', f float8, n numeric, at timestamptz,"
    " two int GENERATED ALWAYS AS (id * 2) STORED, j jsonb, id bigint, PRIMARY KEY (id, at)) PARTITION BY HASH (id);"
    "CREATE TABLE r0 PARTITION OF r FOR VALUES WITH (MODULUS 2, REMAINDER 0);"
    "CREATE TABLE r1 PARTITION OF r FOR VALUES WITH (MODULUS 2, REMAINDER 1)"
)


@pytest.mark.long
def test_rows_of_other_columns_types_and_partitions_are_brought_as_apply_brings_them(
    served: Served, tables: Tables
) -> None:
    cli, name = served
    tables[0].execute(f"{_PARTITIONED} PARTITION BY RANGE (id); CREATE TABLE low PARTITION OF r DEFAULT")
    tables[1].execute(_REORDERED)
    row = """g, timestamptz '2026-01-01 00:00+00' + g * interval '1 h', '{"a": 1.0}', 1.50, '-0'"""
    tables[0].execute(f"INSERT INTO r SELECT {row} FROM generate_series(1, 50) g")
    tables[0].execute("ALTER PUBLICATION p ADD TABLE r; ALTER PUBLICATION p SET (publish_via_partition_root)")
    assert cli("refresh", name).returncode == 0
    assert cli("wait", name, "--for", "caught-up", "--timeout", "2m").returncode == 0
    _plant(tables[1], "DELETE FROM r WHERE id < 5; UPDATE r SET n = 2, mine = 'kept' WHERE id = 7;"
                      "INSERT INTO r (id, at) VALUES (-1, 'infinity')")  # fmt: skip
    found = _repair(cli, name, "--yes", "--table", "public.r")
    assert found["repair"]["tables"] == [{"table": "public.r", "inserted": 4, "updated": 1, "deleted": 1}]
    query = "SELECT id, at::text, j::text, n::text, f::text FROM r ORDER BY id"
    assert tables[0].rows(query) == tables[1].rows(query)
    assert tables[1].rows("SELECT mine, two FROM r WHERE id IN (3, 7) ORDER BY id") == [("mine", 6), ("kept", 14)]


#: Keys that the target's type has otherwise than the publisher's, and what the target makes of them.
_REWRITTEN_KEYS = {
    "narrower": ("numeric(10,4)", "numeric(10,2)", "1.006", "1.01"),
    "in_seconds": ("timestamptz", "timestamptz(0)", "2026-01-01 00:00:00.4+00", "2026-01-01 00:00:00+00"),
    "number": ("text", "int", "01", "1"),
    "wider": ("int", "bigint", "1", "1"),
    "blanks": ("varchar(10)", "varchar(3)", "abc  ", "abc"),
    "floats": ("float8", "float4", "0.30000000000000004", "0.3"),
}
#: Keys that only the target's type can have.
_FOREIGN_KEYS = {"number": "7", "wider": "5000000000", "blanks": "x"}


@pytest.mark.long
def test_rows_whose_key_the_target_has_in_another_form_are_found_again_on_the_publisher(
    served: Served, tables: Tables
) -> None:
    cli, name = served
    for kind, (there, here, sent, _) in _REWRITTEN_KEYS.items():
        tables[0].execute(f"CREATE TABLE {kind} (k {there} PRIMARY KEY, v text)")
        tables[0].execute(f"INSERT INTO {kind} VALUES ('{sent}', 'right'); ALTER PUBLICATION p ADD TABLE {kind}")
        tables[1].execute(f"CREATE TABLE {kind} (k {here} PRIMARY KEY, v text)")
    assert cli("refresh", name).returncode == 0
    assert cli("wait", name, "--for", "caught-up", "--timeout", "2m").returncode == 0
    right = {kind: [(True, "right")] for kind in _REWRITTEN_KEYS}
    assert _by_kind(tables[1]) == right
    for kind in _REWRITTEN_KEYS:
        _plant(tables[1], f"UPDATE {kind} SET v = 'wrong'")
    for kind, key in _FOREIGN_KEYS.items():
        _plant(tables[1], f"INSERT INTO {kind} VALUES ('{key}', 'extra')")
    assert _repair(cli, name, "--yes")["equal"]
    assert _by_kind(tables[1]) == right
    for kind in _REWRITTEN_KEYS:
        _plant(tables[1], f"DELETE FROM {kind}")
    assert _repair(cli, name, "--yes")["equal"]
    assert _by_kind(tables[1]) == right


def _by_kind(database: Database) -> dict[str, list[tuple[bool, str]]]:
    """Whether each row has the key that is to be kept, and its value."""
    return {kind: database.rows(f"SELECT k = '{kept}', v FROM {kind}") for kind, (*_, kept) in _REWRITTEN_KEYS.items()}


_EVIL = (
    "CREATE TYPE mood AS ENUM ('good', 'bad'); CREATE FUNCTION called(mood) RETURNS text LANGUAGE plpgsql AS"
    " $$ BEGIN RAISE EXCEPTION 'code of the owner of a type ran'; END $$;"
    "CREATE FUNCTION made(text) RETURNS mood LANGUAGE plpgsql AS"
    " $$ BEGIN RAISE EXCEPTION 'code of the owner of a type ran'; END $$;"
    "CREATE CAST (mood AS text) WITH FUNCTION called(mood); CREATE TABLE m (id int PRIMARY KEY, m mood);"
)


@pytest.mark.long
def test_no_cast_that_the_owner_of_a_type_made_is_called(served: Served, tables: Tables) -> None:
    cli, name = served
    tables[0].execute(
        f"{_EVIL} CREATE CAST (text AS mood) WITH FUNCTION made(text); CREATE TABLE k (k mood PRIMARY KEY)"
    )
    tables[1].execute(f"{_EVIL} CREATE TABLE k (k text PRIMARY KEY)")
    tables[0].execute("INSERT INTO m VALUES (1, 'good'), (2, 'bad'); INSERT INTO k VALUES ('good')")
    tables[0].execute("ALTER PUBLICATION p ADD TABLE m, k")
    assert cli("refresh", name).returncode == 0
    assert cli("wait", name, "--for", "caught-up", "--timeout", "2m").returncode == 0
    _plant(tables[1], "DELETE FROM m WHERE id = 1; UPDATE m SET m = 'good' WHERE id = 2; DELETE FROM k")
    found = _repair(cli, name, "--yes", code=6)
    assert [one["table"] for one in found["repair"]["refused"]] == ["public.k"]
    assert found["repair"]["tables"] == [{"table": "public.m", "inserted": 1, "updated": 1, "deleted": 0}]
    assert tables[1].value("SELECT count(*) FROM m WHERE (id, m) IN ((1, 'good'), (2, 'bad'))") == 2


@pytest.mark.long
def test_explained_rows_are_left_alone(served: Served, tables: Tables) -> None:
    cli, name = served
    assert cli("alter", name, "--on-conflict", "public.a:insert_exists=skip").returncode == 0
    tables[1].execute("INSERT INTO a VALUES (500, 'mine')")
    tables[0].execute("INSERT INTO a VALUES (500, 'theirs')")
    _plant(tables[1], "DELETE FROM a WHERE id = 7")
    found = _repair(cli, name, "--yes")
    assert found["equal"] and found["repair"]["tables"] == [
        {"table": "public.a", "inserted": 1, "updated": 0, "deleted": 0}
    ]
    assert tables[1].value("SELECT t FROM a WHERE id = 500") == "mine"


@pytest.mark.long
def test_a_row_that_cannot_be_written_is_named_and_its_piece_is_left_as_it_was(served: Served, tables: Tables) -> None:
    cli, name = served
    tables[1].execute("CREATE UNIQUE INDEX a_t ON a (t)")
    # each has the other's value
    _plant(tables[1], "DELETE FROM a WHERE id = 9; UPDATE a SET t = 'x' WHERE id = 7;"
                      "UPDATE a SET t = 'row 7' WHERE id = 8; UPDATE a SET t = 'row 8' WHERE id = 7")  # fmt: skip
    ended = cli("verify", name, "--repair", "--yes")
    assert ended.returncode == 3 and "conflict=update_exists" in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr and "a_t" in ended.stderr
    assert tables[1].value("SELECT count(*) FROM a WHERE id = 9") == 0
    assert tables[1].value("SELECT count(*) FROM pgsub.barrier") == 0
    tables[1].execute("DROP INDEX a_t")
    assert _repair(cli, name, "--yes")["equal"]
    _same(tables, "a")


@pytest.mark.long
def test_a_row_that_another_transaction_has_locked_is_waited_for_a_few_seconds_and_apply_goes_on(
    served: Served, tables: Tables
) -> None:
    cli, name = served
    _plant(tables[1], "UPDATE a SET t = 'fault' WHERE id IN (7, 8)")
    with contextlib.closing(tables[1].connect()) as other:
        other.execute("BEGIN")
        other.execute("UPDATE a SET t = 'mine' WHERE id = 8")
        one_error(cli("verify", name, "--repair", "--yes"), 5, "lock timeout", hint=False)
        assert tables[1].value("SELECT t FROM a WHERE id = 7") == "fault"
        tables[0].execute("UPDATE a SET t = 'goes on' WHERE id = 9")
        until(lambda: tables[1].value("SELECT t FROM a WHERE id = 9") == "goes on")
        assert tables[1].value("SELECT count(*) FROM pgsub.barrier") == 0
    assert _repair(cli, name, "--yes")["equal"]
    _same(tables, "a")


@pytest.mark.long
def test_a_held_table_is_not_repaired(served: Served, tables: Tables) -> None:
    cli, name = served
    assert cli("alter", name, "--hold", "public.a").returncode == 0
    _plant(tables[1], "DELETE FROM a WHERE id = 7")
    one_error(cli("verify", name, "--repair", "--yes"), 3, 'changes of table "public.a" are held', "--release public.a")
    assert tables[1].value("SELECT count(*) FROM a WHERE id = 7") == 0


@pytest.mark.long
def test_without_a_terminal_it_needs_yes(served: Served, tables: Tables) -> None:
    cli, name = served
    _plant(tables[1], "DELETE FROM a WHERE id = 7")
    one_error(
        cli("verify", name, "--repair"), 2, "repairing rows needs --yes", f"pgsub verify {name} --repair --dry-run"
    )
    one_error(cli("verify", name, "--yes"), 2, "--yes needs --repair")
    one_error(cli("verify", name, "--from", "publisher"), 2, "--from needs --repair")
    assert cli("verify", name, "--repair", "--from", "target", "--yes").returncode == 2
    assert tables[1].value("SELECT count(*) FROM a WHERE id = 7") == 0


@pytest.mark.long
def test_rows_whose_key_has_another_text_by_the_settings_of_the_target_are_repaired(cli: Cli, tables: Tables) -> None:
    for one in tables:
        one.execute("CREATE TABLE m (at timestamptz, k bytea, v text, PRIMARY KEY (at, k))")
    tables[0].execute("ALTER PUBLICATION p ADD TABLE m")
    tables[0].execute(r"INSERT INTO m SELECT to_timestamp(g), '\x01', 'x' FROM generate_series(1, 9) g")
    tables[1].execute(r"INSERT INTO m SELECT to_timestamp(g), '\x01', 'x' FROM generate_series(2, 10) g")
    tables[1].execute("UPDATE m SET v = 'wrong' WHERE at = to_timestamp(5)")
    for setting in ("timezone = 'Asia/Kathmandu'", "bytea_output = 'escape'"):
        tables[1].execute(f"ALTER DATABASE {tables[1].name} SET {setting}")
    assert cli.create("s", "--no-copy-data", "--no-wait").returncode == 0
    [done] = _repair(cli, "s", "--table", "public.m", "--yes")["repair"]["tables"]
    assert done == {"table": "public.m", "inserted": 1, "updated": 1, "deleted": 1}
    rows = "SELECT extract(epoch FROM at)::int, encode(k, 'hex'), v FROM m ORDER BY 1"
    assert tables[1].rows(rows) == tables[0].rows(rows)


@pytest.mark.long
def test_without_a_launcher_it_applies_and_repairs_itself(cli: Cli, tables: Tables) -> None:
    tables[1].execute("INSERT INTO a SELECT g, 'row ' || g FROM generate_series(1, 100) g WHERE g <> 7")
    assert cli.create("s", "--no-copy-data", "--no-wait").returncode == 0
    tables[0].execute("UPDATE a SET t = 'written while nothing ran' WHERE id = 8")
    assert _repair(cli, "s", "--yes")["equal"]
    _same(tables, "a")


@pytest.mark.long
def test_a_table_without_a_key_is_named_and_not_touched(served: Served, tables: Tables) -> None:
    cli, name = served
    for database in tables:
        database.execute("CREATE TABLE k (v text); ALTER TABLE k REPLICA IDENTITY FULL")
    tables[0].execute("ALTER PUBLICATION p ADD TABLE k")
    assert cli("refresh", name).returncode == 0
    tables[0].execute("INSERT INTO k VALUES ('x')")
    assert cli("wait", name, "--for", "caught-up", "--timeout", "2m").returncode == 0
    _plant(tables[1], "INSERT INTO k VALUES ('extra')")
    found = _repair(cli, name, "--yes", code=6)
    assert [one["table"] for one in found["repair"]["refused"]] == ["public.k"]
    assert tables[1].value("SELECT count(*) FROM k WHERE v = 'extra'") == 1


@pytest.fixture
def other(tables: Tables) -> Iterator[Database]:
    """Another publisher, which has other rows of table a."""
    database = Database(tables[0].server, f"{tables[0].name}_other")
    database.execute("CREATE TABLE a (id int PRIMARY KEY, t text); CREATE PUBLICATION p FOR TABLE a")
    database.execute("INSERT INTO a SELECT g, 'other ' || g FROM generate_series(1001, 1010) g")
    yield database
    database.drop()


def _second(cli: Cli, other: Database, target: Database, *options: str) -> None:
    """Subscribe the target to another publisher's table a, too."""
    ends = ("--connection", other.conninfo, "--target", target.conninfo, "--publication", "p")
    made = cli("create", "second", *ends, *options)
    assert made.returncode == 0, made.stderr


@pytest.mark.long
def test_rows_that_another_subscription_brought_are_no_fault_and_not_replaced_but_missing_ones_are_brought(
    other: Database, cli: Cli, tables: Tables
) -> None:
    assert cli.create("s").returncode == 0
    _second(cli, other, tables[1])
    found = valid("verify", cli("verify", "s", "--json").stdout)
    a = next(one for one in found["tables"] if one["relname"] == "a")
    assert found["equal"] and (a["extra"], a["explained"], a["written_by"]) == (10, 10, "second")
    assert {one["explained"] for one in a["differences"]} == {"other_subscription"}
    assert 'public.a is written by subscription "second" as well' in cli("verify", "s").stdout
    _plant(tables[1], "DELETE FROM a WHERE id = 7; UPDATE a SET t = 'whose?' WHERE id = 8")
    found = _repair(cli, "s", "--yes", code=6)
    assert found["repair"]["tables"] == [{"table": "public.a", "inserted": 1, "updated": 0, "deleted": 0}]
    [refused] = found["repair"]["refused"]
    assert refused["table"] == "public.a" and 'subscription "second" writes it' in refused["reason"]
    assert tables[1].value("SELECT count(*) FROM a WHERE id > 1000") == 10
    assert tables[1].value("SELECT t FROM a WHERE id = 8") == "whose?"
    assert cli("drop", "second", "--yes").returncode == 0


@pytest.mark.long
def test_rows_of_a_subscription_that_is_made_while_a_repair_runs_are_not_deleted(
    other: Database, served: Served, tables: Tables, tmp_path: Path
) -> None:
    cli, name = served
    _plant(tables[1], "INSERT INTO a VALUES (1001, 'extra')")
    go = tmp_path / "go"
    marks = tmp_path / "marks"
    marks.mkdir()
    actions = {"PGSUB_FAILPOINTS": f"repair.journalled=pause:{go}", "PGSUB_FAILPOINTS_DIR": str(marks)}
    repairing = cli.start("verify", name, "--repair", "--yes", env=actions)
    until(lambda: (marks / "repair.journalled").exists())
    _second(cli, other, tables[1], "--no-copy-data", "--no-wait")
    go.touch()
    assert repairing.wait(patience.SECONDS) == 3
    assert "has rows of another subscription too" in repairing.log.read_text()  # type: ignore[attr-defined]
    assert tables[1].value("SELECT count(*) FROM a WHERE id = 1001") == 1
    assert tables[1].value("SELECT count(*) FROM pgsub.barrier") == 0


@pytest.mark.long
def test_a_row_on_its_way_to_the_publisher_is_not_taken_for_a_fault(cli: Cli, tables: Tables) -> None:
    a, b = tables
    b.execute("CREATE PUBLICATION p FOR TABLE a")
    assert cli.create("ab", "--origin", "none").returncode == 0
    ends = ("--connection", b.conninfo, "--target", a.conninfo, "--publication", "p")
    made = cli("create", "ba", *ends, "--origin", "none", "--no-copy-data", "--no-wait")
    assert made.returncode == 0, made.stderr
    b.execute("INSERT INTO a VALUES (7777, 'written on b')")
    repair = "pgsub verify ab --table public.a --repair --from publisher"
    words = ("verify", "ab", "--table", "public.a", "--repair")
    one_error(cli(*words, "--yes"), 3, 'the target publishes table "public.a"', repair)
    looked = cli(*words, "--dry-run")
    assert looked.returncode == 6 and 'the target publishes table "public.a"' in looked.stderr, looked.stderr
    assert cli("run", "ba", "--until-caught-up").returncode == 0
    assert a.value("SELECT count(*) FROM a WHERE id = 7777") == 1
    _plant(b, "UPDATE a SET t = 'fault' WHERE id = 7")
    repaired = cli(*words, "--from", "publisher", "--yes")
    assert repaired.returncode == 0, repaired.stderr
    assert 'warning: the target publishes table "public.a"' in repaired.stderr.lower(), repaired.stderr
    _same(tables, "a")
    assert cli("drop", "ba", "--yes").returncode == 0
