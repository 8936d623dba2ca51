"""``pgsub verify``: with a launcher and without, what it prints, what the record explains, and how it ends."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import patience
import pytest
import typer
from fix_program import Cli, one_error, until, valid
from fix_servers import Database

from pgsub.cli.operate import verify as shown
from pgsub.commands.verify.result import EQUAL, NOT_COMPARED, UNEQUAL, TableVerdict, Verification, document
from pgsub.common.errors import StateForbids, ThreadDied

pytestmark = pytest.mark.unserved_first

Tables = tuple[Database, Database]
Served = tuple[Cli, str]


def _plant(database: Database, statements: str) -> None:
    """Change rows of the target as nobody notices: triggers stay silent."""
    database.execute(f"SET session_replication_role = replica; {statements}; SET session_replication_role = origin")


def _verify(cli: Cli, name: str, *options: str, code: int = 0) -> dict[str, Any]:
    ended = cli("verify", name, "--json", *options)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return valid("verify", ended.stdout)


def _table(document: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [one for one in document["tables"] if one["relname"] == name]
    return dict(found)


def test_equal_tables_end_with_0_and_planted_faults_with_6(served: Served, tables: Tables) -> None:
    cli, name = served
    publisher, target = tables
    publisher.execute("INSERT INTO a SELECT g, 'x' FROM generate_series(101, 300) g")
    found = _verify(cli, name)
    assert found["equal"] and 0 < found["pause"] < 10
    assert _table(found, "a")["publisher_rows"] == _table(found, "a")["target_rows"] > 200
    _plant(target, "DELETE FROM a WHERE id = 101; UPDATE a SET t = 'y' WHERE id = 102; INSERT INTO a VALUES (-5, 'z')")
    found = _verify(cli, name, code=6)
    a = _table(found, "a")
    assert not found["equal"] and a["outcome"] == "different"
    assert (a["missing"], a["extra"], a["different"], a["explained"]) == (1, 1, 1, 0)
    assert {(one["kind"], one["key"]["id"]) for one in a["differences"]} == {
        ("missing", "101"),
        ("different", "102"),
        ("extra", "-5"),
    }
    assert all("publisher" not in one for one in a["differences"])
    assert _table(found, "b")["outcome"] == "equal"
    rows = {one["kind"]: one for one in _table(_verify(cli, name, "--rows", code=6), "a")["differences"]}
    assert rows["different"]["publisher"] == {"id": "102", "t": "x"}
    assert rows["different"]["target"] == {"id": "102", "t": "y"} and rows["missing"]["target"] is None
    only = _verify(cli, name, "--table", "public.b")
    assert [one["relname"] for one in only["tables"]] == ["b"] and only["equal"]


@pytest.mark.long
def test_a_table_with_a_foreign_partition_is_not_compared_and_the_reason_is_said(
    served: Served, tables: Tables
) -> None:
    cli, name = served
    tables[1].execute(
        "CREATE EXTENSION file_fdw; CREATE SERVER far FOREIGN DATA WRAPPER file_fdw; BEGIN;"
        "ALTER TABLE a RENAME TO a1; CREATE TABLE a (LIKE a1) PARTITION BY RANGE (id);"
        "ALTER TABLE a ATTACH PARTITION a1 FOR VALUES FROM (0) TO (1000);"
        "CREATE FOREIGN TABLE a2 PARTITION OF a FOR VALUES FROM (1000) TO (2000) SERVER far OPTIONS (program 'echo 1');"
        "UPDATE pgsub.subscription_rel SET srrelid = 'a'::regclass WHERE relname = 'a'; COMMIT"
    )
    ended = cli("verify", name)
    assert ended.returncode != 0
    assert "a partition of it on the target is a foreign table" in ended.stdout + ended.stderr


@pytest.mark.long
def test_what_is_printed_names_each_row(served: Served, tables: Tables) -> None:
    cli, name = served
    _plant(tables[1], "DELETE FROM a; INSERT INTO a SELECT g, 'z' FROM generate_series(1000, 1029) g")
    ended = cli("verify", name, "--table", "public.a")
    assert ended.returncode == 6, ended.stderr
    assert ended.stdout.count("\npublic.a: missing (id)=(") + ended.stdout.count("\npublic.a: extra (id)=(") == 10
    assert "more rows" in ended.stdout and "the compared tables differ; apply paused for" in ended.stdout
    assert "apply: " not in ended.stderr
    with_rows = cli("verify", name, "--table", "public.a", "--rows")
    assert "publisher (id, t)=(" in with_rows.stdout or "target (id, t)=(" in with_rows.stdout


def test_rows_that_the_record_explains_are_told_apart(served: Served, tables: Tables) -> None:
    cli, name = served
    publisher, target = tables
    assert cli("alter", name, "--on-conflict", "public.a:insert_exists=skip").returncode == 0
    target.execute("INSERT INTO a VALUES (500, 'mine')")
    publisher.execute("INSERT INTO a VALUES (500, 'theirs'); INSERT INTO b VALUES (500, 1.50)")
    found = _verify(cli, name)
    a = _table(found, "a")
    assert a["outcome"] == "equal" and (a["different"], a["explained"]) == (1, 1)
    assert a["differences"][0]["explained"] == "skipped_change"
    said = cli("verify", name)
    assert said.returncode == 0 and "the compared tables are equal but for 1 explained row;" in said.stdout
    outcomes = dict(
        line.split("\t")[:2] for line in said.stdout.splitlines() if line.startswith("public.") and "\t" in line
    )
    assert outcomes == {"public.a": "explained", "public.b": "equal"}
    _plant(target, "UPDATE a SET t = 'fault' WHERE id = (SELECT min(id) FROM a)")
    a = _table(_verify(cli, name, code=6), "a")
    assert (a["different"], a["explained"]) == (2, 1)


@pytest.mark.long
def test_a_row_whose_change_a_conflict_left_out_and_nothing_keeps_differs_and_is_repaired(
    served: Served, tables: Tables
) -> None:
    cli, name = served
    publisher, target = tables
    target.execute("DELETE FROM a WHERE id = 7")
    publisher.execute("UPDATE a SET t = 'newer' WHERE id = 7")
    a = _table(_verify(cli, name, code=6), "a")
    assert (a["outcome"], a["missing"], a["explained"]) == ("different", 1, 0)
    assert (a["differences"][0]["explained"], a["differences"][0]["left_out"]) == (None, True)
    ended = cli("verify", name, "--repair", "--yes")
    assert ended.returncode == 0 and "1 row inserted" in ended.stdout, ended.stdout + ended.stderr
    assert target.value("SELECT t FROM a WHERE id = 7") == "newer"


def _kept(document: dict[str, Any], name: str) -> tuple[str, int, int, set[str]]:
    one = _table(document, name)
    return one["outcome"], one["different"], one["explained"], {row["explained"] for row in one["differences"]}


@pytest.mark.long
def test_rows_that_a_rule_kept_are_told_apart_from_faults_in_partitions_too(served: Served, tables: Tables) -> None:
    cli, name = served
    publisher, target = tables
    publisher.execute("CREATE TABLE r (id int PRIMARY KEY, t text); ALTER PUBLICATION p ADD TABLE r")
    target.execute(
        "CREATE TABLE r (id int PRIMARY KEY, t text) PARTITION BY RANGE (id);"
        "CREATE TABLE r_low PARTITION OF r FOR VALUES FROM (MINVALUE) TO (1000);"
        "CREATE TABLE r_high PARTITION OF r DEFAULT"
    )
    assert cli("refresh", name).returncode == 0
    rules = ("a:insert_exists=keep_local", "r:insert_exists=keep_local", "r:update_origin_differs=skip")
    assert cli("alter", name, *(word for rule in rules for word in ("--on-conflict", f"public.{rule}"))).returncode == 0
    publisher.execute("INSERT INTO r VALUES (1, 'x'), (2, 'x')")
    assert cli("wait", name, "--for", "caught-up", "--timeout", "2m").returncode == 0
    for table in ("a", "r"):
        target.execute(f"INSERT INTO {table} VALUES (500, 'mine'), (5000, 'mine')")
        publisher.execute(f"INSERT INTO {table} VALUES (500, 'theirs'), (5000, 'theirs')")
    target.execute("UPDATE r SET t = 'mine' WHERE id = 1")
    publisher.execute("UPDATE r SET t = 'theirs' WHERE id = 1")
    found = _verify(cli, name)
    assert _kept(found, "a") == ("equal", 2, 2, {"conflict"})
    assert _kept(found, "r") == ("equal", 3, 3, {"conflict", "skipped_change"})
    _plant(target, "UPDATE r SET t = 'fault' WHERE id = 2")
    assert _kept(_verify(cli, name, code=6), "r")[:3] == ("different", 4, 3)


@pytest.mark.long
def test_a_record_of_an_earlier_version_of_a_row_explains_no_difference(served: Served, tables: Tables) -> None:
    cli, name = served
    publisher, target = tables

    def kept() -> bool:
        target.execute("UPDATE a SET t = 'mine' WHERE id = 4")
        publisher.execute("UPDATE a SET t = clock_timestamp()::text WHERE id = 4")
        assert cli("wait", name, "--for", "caught-up", "--timeout", "2m").returncode == 0
        return bool(target.value("SELECT t FROM a WHERE id = 4") == "mine")

    def decide(resolution: str, of_missing: str) -> None:
        kinds = ("insert_exists", "update_origin_differs", "delete_origin_differs")
        rules = [*(f"public.a:{kind}={resolution}" for kind in kinds), f"public.a:update_missing={of_missing}"]
        assert cli("alter", name, *(word for rule in rules for word in ("--on-conflict", rule))).returncode == 0
        until(lambda: kept() == (resolution == "keep_local"))  # the worker has heard of the rules

    decide("keep_local", "skip")
    # one row that a rule kept, one whose change was skipped, and a deleted one that was kept
    target.execute("UPDATE a SET t = 'mine' WHERE id IN (1, 3); DELETE FROM a WHERE id = 2")
    publisher.execute("UPDATE a SET t = 'theirs' WHERE id IN (1, 2); DELETE FROM a WHERE id = 3")
    a = _table(_verify(cli, name), "a")
    assert (a["missing"], a["extra"], a["different"], a["explained"]) == (1, 1, 2, 4)
    # a further change that is left out explains the row in turn
    publisher.execute("UPDATE a SET t = 'theirs again' WHERE id IN (1, 2)")
    assert _table(_verify(cli, name), "a")["explained"] == 4
    # later changes are applied, and both sides are equal
    decide("apply_remote", "apply_remote")
    publisher.execute("UPDATE a SET t = 'latest' WHERE id IN (1, 2, 4); INSERT INTO a VALUES (3, 'latest')")
    a = _table(_verify(cli, name), "a")
    assert (a["missing"], a["extra"], a["different"]) == (0, 0, 0)
    for fault in ("UPDATE a SET t = 'fault' WHERE id <= 4", "DELETE FROM a WHERE id <= 4"):
        _plant(target, fault)
        a = _table(_verify(cli, name, code=6), "a")
        assert (a["missing"] + a["different"], a["explained"]) == (4, 0)
        ended = cli("verify", name, "--repair", "--yes")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert target.value("SELECT count(*) FROM a WHERE id <= 4 AND t = 'latest'") == 4


@pytest.mark.long
@pytest.mark.parametrize("adopt", [(), ("--adopt",)], ids=["copied", "adopted"])
def test_what_was_left_out_before_a_table_was_copied_again_explains_no_difference(
    cli: Cli, tables: Tables, adopt: tuple[str, ...]
) -> None:
    publisher, target = tables
    rules = ("public.a:insert_exists=skip", "public.b:insert_exists=keep_local")
    assert cli.create("s", *(word for rule in rules for word in ("--on-conflict", rule))).returncode == 0
    for database, value in (target, "mine"), (publisher, "theirs"):
        database.execute(f"INSERT INTO a VALUES (500, '{value}'); INSERT INTO b (id, n) VALUES (500, {len(value)})")
    assert cli("run", "s", "--until-caught-up", "--timeout", "60s").returncode == 0
    assert [_table(_verify(cli, "s"), name)["explained"] for name in "ab"] == [1, 1]
    assert cli("refresh", "s", "--resync", "public.a", "--resync", "public.b", *adopt, "--yes").returncode == 0
    target.execute("UPDATE a SET t = 'fault' WHERE id = 500; DELETE FROM b WHERE id = 500")
    document = _verify(cli, "s", code=6)
    found = [_table(document, name) for name in "ab"]
    assert [(one["missing"] + one["different"], one["explained"]) for one in found] == [(1, 0), (1, 0)]


@pytest.mark.long
def test_a_row_that_a_rule_has_just_kept_is_explained_before_the_launcher_has_heard_of_it(
    cli: Cli, tables: Tables, tmp_path: Path, reached: Callable[[str], None]
) -> None:
    heard, printed, go_on = tmp_path / "mirror.before_events", tmp_path / "printed", tmp_path / "go on"
    points = {
        "PGSUB_FAILPOINTS": f"point.barrier_put=pause:{go_on};mirror.before_events=pause:{tmp_path / 'mirror'}",
        "PGSUB_FAILPOINTS_DIR": str(tmp_path),
    }
    heard.write_text("not armed")
    launcher = cli.launcher(env=points)
    assert cli.create("s", "--on-conflict", "insert_exists=keep_local").returncode == 0
    verifying = cli.start("verify", "s", "--json", env=points, printed=printed)
    until(lambda: (tmp_path / "point.barrier_put").exists() or verifying.poll() is not None)
    heard.unlink()
    tables[1].execute("INSERT INTO a VALUES (500, 'mine')")
    tables[0].execute("INSERT INTO a VALUES (500, 'theirs')")
    go_on.touch()
    assert verifying.wait(patience.SECONDS) == 0, verifying.log.read_text()  # type: ignore[union-attr]
    assert tables[1].value("SELECT count(*) FROM pgsub.event") > 0
    assert _kept(valid("verify", printed.read_text()), "a") == ("equal", 1, 1, {"conflict"})
    (tmp_path / "mirror").touch()
    tables[1].wait("SELECT count(*) FROM pgsub.event", value=0)
    assert _kept(_verify(cli, "s"), "a") == ("equal", 1, 1, {"conflict"})
    for name in ("point.barrier_put", "mirror.before_events"):
        reached(name)
    assert cli.stop(launcher) == 0


def test_binary_values_of_skipped_and_held_changes_explain_differences(served: Served, tables: Tables) -> None:
    cli, name = served
    publisher, target = tables
    words = ("--binary", "--on-conflict", "public.a:insert_exists=skip")
    assert cli("alter", name, *words).returncode == 0
    assert cli("alter", name, "--hold", "public.b").returncode == 0
    target.execute("INSERT INTO a VALUES (500, 'mine')")
    publisher.execute("INSERT INTO a VALUES (500, 'theirs'); INSERT INTO b VALUES (500, 1.50)")
    found = _verify(cli, name)
    for table, reason in (("a", "skipped_change"), ("b", "held_change")):
        one = _table(found, table)
        assert (one["outcome"], one["explained"]) == ("equal", one["missing"] + one["different"])
        assert [row["explained"] for row in one["differences"]] == [reason]
    _plant(target, "UPDATE a SET t = 'fault' WHERE id = (SELECT min(id) FROM a)")
    a = _table(_verify(cli, name, code=6), "a")
    assert (a["different"], a["explained"]) == (2, 1)


def test_a_binary_value_of_the_type_that_a_column_had_explains_nothing_and_hides_no_difference(
    served: Served, tables: Tables
) -> None:
    cli, name = served
    publisher, target = tables
    assert cli("alter", name, "--binary").returncode == 0
    assert cli("alter", name, "--hold", "public.b").returncode == 0
    target.execute("ALTER TABLE b ALTER id TYPE bigint")
    publisher.execute("INSERT INTO b VALUES (500, 1.50)")
    b = _table(_verify(cli, name, code=6), "b")
    assert (b["outcome"], b["missing"], b["explained"]) == ("different", 1, 0)


@pytest.mark.long
def test_a_binary_json_value_of_a_column_that_became_jsonb_keeps_no_table_from_being_compared(
    served: Served, tables: Tables
) -> None:
    cli, name = served
    publisher, target = tables
    for database in tables:
        database.execute("ALTER TABLE a ADD doc json")
    assert cli("alter", name, "--binary", "--on-conflict", "public.a:insert_exists=skip").returncode == 0
    target.execute("INSERT INTO a VALUES (500, 'mine', '{}')")
    publisher.execute("INSERT INTO a VALUES (500, 'theirs', '{}')")
    _verify(cli, name)
    for database in tables:
        database.execute("ALTER TABLE a ALTER doc TYPE jsonb")
    _plant(target, "UPDATE a SET t = 'fault' WHERE id = (SELECT min(id) FROM a)")
    a = _table(_verify(cli, name, code=6), "a")
    assert (a["outcome"], a["different"]) == ("different", 2)


@pytest.mark.long
def test_changes_of_a_held_table_explain_its_differences(served: Served, tables: Tables) -> None:
    cli, name = served
    publisher, target = tables
    assert cli("alter", name, "--hold", "public.b").returncode == 0
    publisher.execute("INSERT INTO b VALUES (600, 1.50); UPDATE b SET n = 7 WHERE id = (SELECT min(id) FROM b)")
    b = _table(_verify(cli, name), "b")
    assert b["outcome"] == "equal" and b["missing"] >= 1 and b["explained"] == b["missing"] + b["different"]
    assert {one["explained"] for one in b["differences"]} == {"held_change"}
    _plant(target, "INSERT INTO b VALUES (-9, 1)")
    b = _table(_verify(cli, name, code=6), "b")
    assert b["extra"] == 1 and b["outcome"] == "different"


@pytest.mark.long
def test_what_an_unpublished_operation_leaves_is_told_apart(served: Served, tables: Tables) -> None:
    cli, name = served
    publisher, target = tables
    publisher.execute("INSERT INTO a SELECT g, 'x' FROM generate_series(101, 120) g")
    _verify(cli, name)
    publisher.execute("ALTER PUBLICATION p SET (publish = 'insert, update')")
    publisher.execute("DELETE FROM a WHERE id = 110")
    a = _table(_verify(cli, name), "a")
    assert (a["outcome"], a["extra"], a["explained"]) == ("equal", 1, 1)
    assert a["differences"][0]["explained"] == "unpublished"
    _plant(target, "DELETE FROM a WHERE id = 111")
    a = _table(_verify(cli, name, code=6), "a")
    assert (a["outcome"], a["missing"], a["extra"], a["explained"]) == ("different", 1, 1, 1)
    publisher.execute("ALTER PUBLICATION p SET (publish = 'insert, update, delete, truncate')")


def test_what_an_unpublished_truncate_leaves_is_told_apart_and_stays(served: Served, tables: Tables) -> None:
    cli, name = served
    publisher, target = tables
    publisher.execute("INSERT INTO a SELECT g, 'x' FROM generate_series(101, 120) g")
    _verify(cli, name)
    publisher.execute("ALTER PUBLICATION p SET (publish = 'insert, update, delete')")
    rows = target.rows("SELECT * FROM a")
    publisher.execute("TRUNCATE a")
    a = _table(_verify(cli, name), "a")
    assert (a["outcome"], a["extra"], a["explained"]) == ("equal", len(rows), len(rows))
    assert cli("verify", name, "--repair", "--yes").returncode == 0
    assert target.rows("SELECT * FROM a") == rows
    publisher.execute("ALTER PUBLICATION p SET (publish = 'insert, update, delete, truncate')")


@pytest.mark.long
def test_a_table_that_does_not_fit_any_more_is_an_error_of_its_own(served: Served, tables: Tables) -> None:
    cli, name = served
    tables[0].execute("ALTER TABLE b ADD extra int")
    ended = cli("verify", name, "--json")
    assert ended.returncode == StateForbids.exit_code, ended.stdout
    found = valid("verify", ended.stdout)
    assert found["equal"]
    assert _table(found, "a")["outcome"] == "equal"
    assert "lacks published columns: extra" in _table(found, "b")["reason"]


@pytest.mark.long
def test_a_sample_is_a_part_of_the_keys(served: Served, tables: Tables) -> None:
    cli, name = served
    tables[0].execute("INSERT INTO a SELECT g, 'x' FROM generate_series(101, 2099) g")
    found = _verify(cli, name, "--sample", "10%", "--jobs", "1")
    assert found["sample"] == 10 and 100 < _table(found, "a")["publisher_rows"] < 400
    for wrong in ("10", "0%", "101%", "x%"):
        one_error(cli("verify", name, "--sample", wrong), 2, "is not a share")


def test_an_unknown_table_is_refused(served: Served) -> None:
    cli, name = served
    one_error(cli("verify", name, "--table", "public.none"), 3, 'table "public.none" is not part of')


def test_a_disabled_subscription_is_not_verified(served: Served) -> None:
    cli, name = served
    assert cli("disable", name).returncode == 0
    one_error(cli("verify", name), 3, "is disabled", f"pgsub enable {name}")


@pytest.mark.long
def test_what_stops_apply_is_the_error_and_no_difference(served: Served, tables: Tables) -> None:
    cli, name = served
    tables[1].execute("INSERT INTO a VALUES (700, 'mine')")
    tables[0].execute("INSERT INTO a VALUES (700, 'theirs')")
    one_error(cli("verify", name), StateForbids.exit_code, "insert_exists")
    tables[1].execute("DELETE FROM a WHERE id = 700")
    assert _verify(cli, name)["equal"]


def _unserved(cli: Cli, tables: Tables) -> None:
    """The subscription ``s`` of tables that hold the same rows."""
    tables[1].execute("INSERT INTO a SELECT g, 'row ' || g FROM generate_series(1, 100) g")
    assert cli.create("s", "--no-copy-data", "--no-wait").returncode == 0


@pytest.mark.long
def test_a_launcher_of_its_own_that_ends_unexpectedly_is_told(
    cli: Cli, tables: Tables, reached: Callable[[str], None]
) -> None:
    _unserved(cli, tables)
    failing = {"PGSUB_FAILPOINTS": "thread.verify=die"}
    one_error(cli("verify", "s", env=failing), ThreadDied.exit_code, '"verify" was ended', hint=False)
    reached("thread.verify")


@pytest.mark.long
def test_an_amount_a_second_limits_what_is_read_and_how_much_is_read_is_shown(served: Served, tables: Tables) -> None:
    cli, name = served
    tables[0].execute("INSERT INTO a SELECT g, repeat('x', 1000) FROM generate_series(1000, 4000) g")
    assert cli("wait", name, "--for", "caught-up", "--timeout", "2m").returncode == 0
    _plant(tables[1], "UPDATE a SET t = 'y' WHERE id = 3999")
    begun = time.monotonic()
    ended = cli("verify", name, "--table", "public.a", "--json", "--rate", "500kB")
    assert time.monotonic() - begun > 2  # of three megabytes the last is read long after two seconds
    assert ended.returncode == 6 and _table(valid("verify", ended.stdout), "a")["different"] == 1
    assert "compared 0 of 1 tables" in ended.stderr and "compared 1 of 1 tables" in ended.stderr, ended.stderr
    shown = r"table public\.a: comparing, \d+% \(\d+ kB of \d+ kB\), \d+ kB/s, \d+ s left"
    assert re.search(shown, ended.stderr), ended.stderr
    one_error(cli("verify", name, "--rate", "fast"), 2, '"fast" is not a size')


@pytest.mark.long
def test_an_interrupt_ends_a_comparison_that_has_much_left_to_read(served: Served, tables: Tables) -> None:
    cli, name = served
    tables[0].execute("INSERT INTO a SELECT g, repeat('x', 1000) FROM generate_series(1000, 30000) g")
    assert cli("wait", name, "--for", "caught-up", "--timeout", "2m").returncode == 0
    read = "SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = 'a'"
    before = tables[0].value(read)
    comparing = cli.start("verify", name, "--table", "public.a", "--rate", "1MB", "--jobs", "64")
    running = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query ~ 'hashint4extended'"
    until(lambda: tables[0].value(f"{running} AND pid <> pg_backend_pid()") > 0)
    comparing.send_signal(signal.SIGINT)
    assert comparing.wait(patience.SECONDS) == 130
    tables[0].wait(f"{running} AND pid <> pg_backend_pid()", value=0)  # they have told what they read
    assert 0 < tables[0].value(read) - before < 15_000
    assert "Traceback" not in comparing.log.read_text()
    assert _verify(cli, name, "--table", "public.a", "--resume")["equal"]


@pytest.mark.long
def test_a_comparison_that_is_killed_leaves_nothing_and_is_gone_on_with(
    served: Served, tables: Tables, reached: Callable[[str], None]
) -> None:
    cli, name = served
    before = _verify(cli, name)
    killed = cli("verify", name, env={"PGSUB_FAILPOINTS": "verify.at_point=kill"})
    assert killed.returncode in (-9, 137), killed.stdout + killed.stderr
    reached("verify.at_point")
    killed = cli("verify", name, env={"PGSUB_FAILPOINTS": "verify.table_compared=kill"})
    assert killed.returncode in (-9, 137), killed.stdout + killed.stderr
    reached("verify.table_compared")
    assert tables[1].value("SELECT count(*) FROM pgsub.barrier") == 0
    until(lambda: tables[0].value("SELECT count(*) FROM pg_replication_slots WHERE temporary") == 0)
    tables[0].execute("INSERT INTO a VALUES (900, 'behind what was compared')")
    found = _verify(cli, name, "--resume")
    first, *others = found["tables"]
    assert found["equal"] and first["lsn"] != found["lsn"] and first["publisher_rows"] is None
    assert others and all(one["lsn"] == found["lsn"] and one["publisher_rows"] is not None for one in others)
    assert [one["relname"] for one in found["tables"]] == [one["relname"] for one in before["tables"]]
    again = _verify(cli, name, "--resume")
    assert all(one["lsn"] == again["lsn"] for one in again["tables"])  # that one ended


@pytest.mark.long
def test_what_a_comparison_that_broke_off_did_not_find_equal_is_compared_again(
    served: Served, tables: Tables, reached: Callable[[str], None]
) -> None:
    cli, name = served
    _plant(tables[1], "UPDATE a SET t = 'y' WHERE id = 5")
    killed = cli("verify", name, env={"PGSUB_FAILPOINTS": "verify.table_compared=kill@2"})
    assert killed.returncode in (-9, 137)
    reached("verify.table_compared")
    assert _table(_verify(cli, name, "--resume", code=6), "a")["different"] == 1
    one_error(cli("verify", name, "--resume", "--repair", "--yes"), 2, "--resume and --repair cannot be used together")


@pytest.mark.long
def test_a_sample_that_broke_off_says_nothing_of_all_keys(
    served: Served, tables: Tables, reached: Callable[[str], None]
) -> None:
    cli, name = served
    killed = cli("verify", name, "--sample", "50%", env={"PGSUB_FAILPOINTS": "verify.table_compared=kill"})
    assert killed.returncode in (-9, 137)
    reached("verify.table_compared")
    found = _verify(cli, name, "--resume")
    assert all(one["lsn"] == found["lsn"] for one in found["tables"])


@pytest.mark.long
def test_a_comparison_that_applies_up_to_the_point_itself_and_is_killed_is_run_again(
    cli: Cli, tables: Tables, reached: Callable[[str], None]
) -> None:
    _unserved(cli, tables)
    tables[0].execute("INSERT INTO a VALUES (800, 'written while nothing ran')")
    killed = cli("verify", "s", env={"PGSUB_FAILPOINTS": "verify.at_point=kill"})
    assert killed.returncode in (-9, 137), killed.stdout + killed.stderr
    reached("verify.at_point")
    assert tables[1].value("SELECT count(*) FROM a WHERE id = 800") == 1
    tables[0].execute("INSERT INTO a VALUES (900, 'written while nothing ran')")
    found = _verify(cli, "s", "--resume")
    assert found["equal"] and _table(found, "a")["publisher_rows"] == _table(found, "a")["target_rows"] == 102
    assert cli.status("s")["state"] in ("stopped", "waiting")
    assert tables[1].value("SELECT count(*) FROM pgsub.barrier") == 0


@pytest.mark.parametrize(
    ("outcomes", "named", "equal", "code", "said"),
    [
        ([], False, None, 3, "no table was compared"),
        ([NOT_COMPARED], False, None, 3, "no table was compared"),
        ([NOT_COMPARED], True, None, 3, "no table was compared"),
        ([EQUAL, NOT_COMPARED], False, True, 0, "the compared tables are equal, and 1 of 2 tables was not compared"),
        (
            [EQUAL, NOT_COMPARED, NOT_COMPARED],
            True,
            None,
            3,
            "it is not known whether the tables are equal, because 2 of 3 tables were not compared",
        ),
        ([UNEQUAL, NOT_COMPARED], True, False, 6, "the compared tables differ, and 1 of 2 tables was not compared"),
        ([EQUAL, EQUAL], True, True, 0, "the compared tables are equal"),
    ],
)
def test_what_was_not_compared_is_never_called_equal(
    capsys: pytest.CaptureFixture[str], outcomes: list[str], named: bool, equal: bool | None, code: int, said: str
) -> None:
    tables = [TableVerdict("public", f"t{number}", outcome, 16) for number, outcome in enumerate(outcomes)]
    found = Verification("s", 16, 0.001, None, tables, named=named)
    assert document(found)["equal"] is equal
    shown._print(document(found), rows=False)
    assert capsys.readouterr().out.splitlines()[-1] == f"At 0/10 {said}; apply paused for 1 ms."
    assert _code(found) == code


def _code(found: Verification) -> int:
    try:
        shown._end(found)
    except typer.Exit as ended:
        return ended.exit_code
    return 0


@pytest.mark.long
def test_a_named_table_that_still_synchronizes_is_no_proof(cli: Cli, tables: Tables) -> None:
    _unserved(cli, tables)
    tables[1].execute("UPDATE pgsub.subscription_rel SET srsubstate = 'i' WHERE relname = 'b'")
    found = _verify(cli, "s", "--table", "public.b", code=StateForbids.exit_code)
    assert found["equal"] is None
    assert (_table(found, "b")["outcome"], _table(found, "b")["reason"]) == (
        NOT_COMPARED,
        "it is still being synchronized (state i)",
    )


@pytest.mark.long
def test_of_two_tables_whose_names_look_alike_each_is_compared_and_repaired(
    launcher: Cli, pubdb: Database, subdb: Database
) -> None:
    tables = ('a."b.c"', '"a.b".c')
    for database in (pubdb, subdb):
        database.execute('CREATE SCHEMA a; CREATE SCHEMA "a.b"')
        for table in tables:
            database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, t text)")
    for table in tables:
        pubdb.execute(f"INSERT INTO {table} SELECT g, 'x' FROM generate_series(1, 20) g")
    pubdb.execute(f"CREATE PUBLICATION p FOR TABLE {', '.join(tables)}")
    launcher.connection, launcher.target = pubdb.conninfo, subdb.conninfo
    assert launcher.create("alike").returncode == 0
    for number, table in enumerate(tables):
        _plant(subdb, f"UPDATE {table} SET t = 'planted' WHERE id = {number + 3}")
        found = _verify(launcher, "alike", code=6)
        assert [one["outcome"] for one in found["tables"]].count("different") == number + 1
    ambiguous = launcher("verify", "alike", "--table", "a.b.c")
    assert "is ambiguous" in one_error(ambiguous, 2, 'Quote its parts, as in public."a.b".')
    assert len(_verify(launcher, "alike", "--table", tables[0], code=6)["tables"]) == 1
    assert launcher("verify", "alike", "--repair", "--yes").returncode == 0
    assert _verify(launcher, "alike")["equal"]
