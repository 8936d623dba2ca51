"""conflicts replay through the program: what was left out is applied after all, once, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pexpect
import pytest
from fix_program import one_error, valid
from fix_stuck import MakeStuck, Stuck
from terminal import terminal

from pgsub.apply.conflicts import conflict_text
from pgsub.catalog.store import StateStore
from pgsub.common.errors import ApplyError
from pgsub.launcher import error_rows
from pgsub.launcher.mirror.event_log import Events
from pgsub.protocol.lsn import parse_lsn
from pgsub.target.session import connect as target

_LEFT = "SELECT count(*) FROM pgsub.skipped_change WHERE replayed_at IS NULL"


def stops(it: Stuck, *statements: str) -> ApplyError:
    """Apply these; the error that stops it is recorded as the launcher does, its conflict too."""
    error = it.apply(*statements)
    assert isinstance(error, ApplyError)
    with StateStore.open(it.cli.state) as store:
        error_rows.count(store, store.subscription("s"), error, "apply", "apply_error_count")
    return error


def skipped(it: Stuck, rows: str, *statements: str) -> ApplyError:
    """What these statements bring stops apply, and is skipped."""
    error = stops(it, *statements)
    it.ok("skip-lsn", "s", "--rows", rows, "--yes")
    with StateStore.open(it.cli.state) as store:
        store.clear_error(it.subid, "apply")
    assert it.apply() is None
    mirrored(it)
    return error


def mirrored(it: Stuck) -> list[str]:
    """What the ledger says is brought to the state store, as the launcher does; what the log is told."""
    log: list[str] = []
    with StateStore.open(it.cli.state) as store:
        sub = store.subscription("s")
        with target.connect(sub.target, f"pgsub {sub.subid} launcher 0") as session:
            Events(session, store, sub, lambda level, text: log.append(f"{level}: {text}")).move()
    return log


def conflicts(it: Stuck) -> list[dict[str, Any]]:
    return list(valid("conflicts", it.ok("conflicts", "list", "s", "--json").stdout)["conflicts"])


def replayed(it: Stuck, *words: str) -> dict[str, Any]:
    return dict(valid("conflicts", it.ok("conflicts", "replay", "s", *words, "--yes", "--json").stdout)["replay"])


@pytest.mark.long
def test_the_change_of_a_conflict_is_applied_once(stuck: MakeStuck) -> None:
    it = stuck()
    it.subdb.execute("INSERT INTO b VALUES (1, 0)")
    error = skipped(it, "whole", "BEGIN; INSERT INTO b VALUES (1, 1); INSERT INTO b VALUES (2, 2); COMMIT")
    [conflict] = conflicts(it)
    number = str(conflict["id"])
    assert it.ok("conflicts", "show", "s", number).stdout.endswith(f"\npgsub conflicts replay s {number}\n")
    assert conflict["action"] == "skipped" and conflict["replayed_at"] is None
    one_error(it.cli("conflicts", "replay", "s", number), 2, "needs --yes", "--dry-run")

    dry = it.run("conflicts", "replay", "s", number, "--dry-run", "--json")
    assert dry.returncode == 6
    [row] = valid("conflicts", dry.stdout)["replay"]["rows"]
    assert (row["outcome"], row["existing"][0]["row"]["n"], row["remote"]["n"]) == ("conflict", "0", "1")
    said = one_error(it.run("conflicts", "replay", "s", number, "--yes"), 6, "conflict=insert_exists", "replayed_at")
    finished = conflict_text.lsn(parse_lsn(error.finish_lsn or ""), it.subdb.connection.info.server_version)
    assert "key (id)=(1)" in said.lower() and f"finished at {finished}" in said
    assert it.subdb.rows("SELECT id, n::int FROM b") == [(1, 0)] and it.subdb.value(_LEFT) == 2

    it.subdb.execute("DELETE FROM b")
    assert it.ok("conflicts", "replay", "s", number, "--dry-run").stdout.count("would_apply") == 1
    assert it.subdb.rows("SELECT id FROM b") == []
    done = replayed(it, number)
    assert (done["changes"], done["xid"], done["finish_lsn"]) == (1, error.xid, error.finish_lsn)
    assert it.subdb.rows("SELECT id, n::int FROM b") == [(1, 1)] and it.subdb.value(_LEFT) == 1
    [conflict] = conflicts(it)
    assert conflict["action"] == "replayed" and conflict["replayed_at"] is not None
    one_error(it.run("conflicts", "replay", "s", number, "--yes"), 3, "already replayed at 2", hint=False)
    assert [one["outcome"] for one in it.journal("conflicts replay")] == ["failed", "done"]
    told = mirrored(it)
    assert told[-1].startswith('LOG: subscription "s" replayed 1 skipped change of')
    assert replayed(it, "--lsn", str(error.finish_lsn))["replayed_before"] == 1
    assert it.subdb.rows("SELECT id, n::int FROM b ORDER BY id") == [(1, 1), (2, 2)]


def test_of_binary_values_the_effect_is_found_as_of_texts(stuck: MakeStuck) -> None:
    it = stuck("--binary")
    for database in (it.pubdb, it.subdb):
        database.execute("ALTER TABLE b ADD at timestamptz, ADD during interval, ADD word char(5), ADD raw bytea")
    values = "1.50, '2026-01-02 03:04:05.678+00', '1 day 2 s', 'é', '\\x0001'"
    it.subdb.execute(f"INSERT INTO b VALUES (1); INSERT INTO b VALUES (2, {values})")
    error = skipped(it, "whole", f"BEGIN; INSERT INTO b VALUES (1, {values}), (2, {values}); DELETE FROM b; COMMIT")
    words = ("--lsn", str(error.finish_lsn), "--dry-run", "--json")
    rows = valid("conflicts", it.run("conflicts", "replay", "s", *words).stdout)["replay"]["rows"]
    assert [(row["outcome"], row["key"]["id"]) for row in rows[:2]] == [("conflict", "1"), ("identical", "2")]
    assert rows[0]["remote"]["n"] == "1.50" and rows[0]["remote"]["word"] == "é" and len(rows) == 4
    it.subdb.execute("DELETE FROM b")
    dry = valid("conflicts", it.ok("conflicts", "replay", "s", *words).stdout)["replay"]["rows"]
    assert {row["outcome"] for row in dry} == {"would_apply"}
    replayed(it, *words[:2])
    assert it.subdb.rows("SELECT * FROM b") == []


@pytest.mark.long
def test_a_whole_transaction_is_applied_in_its_order_or_not_at_all(stuck: MakeStuck) -> None:
    it = stuck()
    it.pubdb.execute("INSERT INTO b SELECT g, g FROM generate_series(10, 1300) g")
    it.subdb.execute("INSERT INTO b VALUES (1, 0); CREATE TABLE other (id int)")
    error = skipped(
        it,
        "whole",
        "BEGIN; INSERT INTO b VALUES (1, 1), (2, 2), (3, 3.5); UPDATE b SET id = 4 WHERE id = 1;"
        " DELETE FROM b WHERE id = 2; UPDATE b SET n = 1 WHERE id > 9; TRUNCATE a;"
        " INSERT INTO a VALUES (7, 'é'); COMMIT",
    )
    words = ("--lsn", str(error.finish_lsn))
    it.subdb.execute("DELETE FROM b WHERE id IN (1, 1300)")
    said = one_error(it.run("conflicts", "replay", "s", *words, "--yes"), 6, "conflict=update_missing", "--dry-run")
    assert "(id)=(1300)" in said
    assert it.subdb.value("SELECT count(*) FROM b WHERE n = 1") == 0 and it.subdb.value("SELECT count(*) FROM a") != 1
    it.subdb.execute("INSERT INTO b VALUES (1300, 1300)")
    assert replayed(it, *words)["changes"] == 3 + 2 + 1291 + 2
    for table in ("a", "b"):
        rows = f"SELECT * FROM {table} ORDER BY id"
        assert it.subdb.rows(rows) == it.pubdb.rows(rows)
    [conflict] = conflicts(it)
    assert conflict["action"] == "replayed"


@pytest.mark.long
def test_a_crash_during_a_replay_leaves_the_old_state_or_the_new_one(
    stuck: MakeStuck, reached: Callable[[str], None]
) -> None:
    it = stuck()
    for number, point in enumerate(("journalled", "taken", "before_commit", "committed")):
        it.subdb.execute(f"INSERT INTO b VALUES ({number}, 0)")
        error = skipped(it, "whole", f"INSERT INTO b VALUES ({number}, 1)")
        it.subdb.execute("DELETE FROM b")
        [conflict] = [one for one in conflicts(it) if one["action"] == "skipped"]
        words = ("conflicts", "replay", "s", str(conflict["id"]), "--yes")
        crashed = it.cli(*words, env={"PGSUB_FAILPOINTS": f"replay.{point}=kill"})
        assert crashed.returncode == -9
        reached(f"replay.{point}")
        it.subdb.wait(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s", "pgsub % replay 0", value=0
        )
        done = point == "committed"
        assert it.subdb.value("SELECT count(*) FROM b") == done and it.subdb.value(_LEFT) == 1 - done
        assert it.journal("conflicts replay")[-1]["outcome"] == "begun"
        again = it.run(*words)
        assert again.returncode == (3 if done else 0), again.stderr
        assert it.subdb.rows("SELECT id, n::int FROM b") == [(number, 1)] and it.subdb.value(_LEFT) == 0
        assert {one["action"] for one in conflicts(it)} == {"replayed"}, error
        it.subdb.execute("DELETE FROM b")


@pytest.mark.long
def test_what_cannot_be_replayed_is_told_why(stuck: MakeStuck) -> None:
    it = stuck()
    it.subdb.execute("INSERT INTO b VALUES (1, 0)")
    error = stops(it, "INSERT INTO b VALUES (1, 1)")
    [conflict] = conflicts(it)
    number = str(conflict["id"])
    one_error(it.run("conflicts", "replay", "s", number, "--yes"), 3, "still stops apply", "--runbook")
    one_error(it.run("conflicts", "replay", "s", "--lsn", "0/10", "--yes"), 3, "nothing is kept", "conflicts list")
    one_error(it.run("conflicts", "replay", "s", "99", "--yes"), 3, "no conflict 99", "conflicts list")
    for words in ([], [number, "--lsn", "0/10"], [number, "--table", "public.b"], [number, "--limit", "3"]):
        one_error(it.run("conflicts", "replay", "s", *words, "--yes"), 2)
    one_error(it.run("conflicts", "list", "s", "--yes"), 2, "takes no --yes")
    skipped_now = it.ok("skip-lsn", "s", "--yes")
    assert it.apply() is None, skipped_now
    words = ("conflicts", "replay", "s", "--lsn", str(error.finish_lsn), "--yes")
    it.subdb.execute("UPDATE pgsub.subscription_rel SET srsublsn = NULL, srsubstate = 'd' WHERE relname = 'b'")
    one_error(it.run(*words), 3, "being synchronized", hint=False)
    it.subdb.execute("DELETE FROM pgsub.subscription_rel WHERE relname = 'b'")
    one_error(it.run(*words), 3, "is not subscribed", hint=False)
    assert it.subdb.value(_LEFT) == 1


@pytest.mark.long
def test_on_a_terminal_it_asks(stuck: MakeStuck) -> None:
    it = stuck()
    it.subdb.execute("INSERT INTO b VALUES (1, 0)")
    error = skipped(it, "whole", "INSERT INTO b VALUES (1, 1)")
    it.subdb.execute("DELETE FROM b")
    words = ["-m", "pgsub", "conflicts", "replay", "s", "--lsn", str(error.finish_lsn)]
    for answer, code in (("n", 1), ("y", 0)):
        child = terminal(words, it.cli.environment)
        child.expect_exact("INSERT public.b: 1")
        child.expect_exact("Replay?")
        child.sendline(answer)
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == code
        assert it.subdb.value(_LEFT) == code


def test_rows_that_a_skip_leaves_out_are_conflicts_of_the_record_and_each_can_be_replayed(stuck: MakeStuck) -> None:
    it = stuck()
    it.subdb.execute("INSERT INTO b VALUES (1, 0), (2, 0), (3, 3)")
    error = skipped(
        it,
        "conflicting",
        "BEGIN; INSERT INTO b VALUES (1, 1); INSERT INTO b VALUES (2, 2); INSERT INTO b VALUES (3, 3), (4, 4); COMMIT",
    )
    same, second, first = conflicts(it)
    for one, key in ((first, "(id)=(1)"), (second, "(id)=(2)"), (same, "(id)=(3)")):
        assert (one["conflict_type"], one["action"], one["key"]) == ("insert_exists", "skipped", key)
        assert (one["finish_lsn"], one["remote_xid"]) == (error.finish_lsn, error.xid)
        assert one["local_conflicts"][0]["row"]["n"] == ("3" if one is same else "0")
    assert [one["identical"] for one in (first, second, same)] == [False, False, True]
    assert [one["worker"] for one in (first, second)] == ["apply", None]
    stats = "SELECT confl_insert_exists FROM pg_stat_subscription_stats"
    assert it.cli.sql(stats) == [(3,)]  # the first of them when it stopped apply
    one_error(it.run("conflicts", "replay", "s", str(same["id"]), "--yes"), 3, "nothing is kept of conflict")
    it.subdb.execute("DELETE FROM b WHERE id = 2")
    replayed(it, str(second["id"]))
    assert it.subdb.rows("SELECT id, n::int FROM b ORDER BY id") == [(1, 0), (2, 2), (3, 3), (4, 4)]
    assert [one["action"] for one in conflicts(it)] == ["skipped", "replayed", "skipped"]


def test_what_is_replayed_carries_the_origin_of_the_subscription_and_is_not_sent_back(stuck: MakeStuck) -> None:
    it = stuck()
    it.subdb.execute("INSERT INTO b VALUES (1, 0)")
    error = skipped(it, "whole", "INSERT INTO b VALUES (1, 1)")
    it.subdb.execute("DELETE FROM b; CREATE PUBLICATION back FOR TABLE b")
    it.subdb.value("SELECT pg_create_logical_replication_slot('back', 'pgoutput')")
    try:
        replayed(it, "--lsn", str(error.finish_lsn))
        it.subdb.execute("INSERT INTO b VALUES (2, 2)")
        query = "SELECT count(*) FROM pg_logical_slot_peek_binary_changes('back', NULL, NULL, 'proto_version', '4',"
        query += " 'publication_names', 'back', 'origin', %s) WHERE get_byte(data, 0) = ascii('I')"
        assert [it.subdb.value(query, origin) for origin in ("any", "none")] == [2, 1]
    finally:
        it.subdb.value("SELECT pg_drop_replication_slot('back')")


def test_no_rule_leaves_out_once_more_what_is_replayed(stuck: MakeStuck) -> None:
    it = stuck("--on-conflict", "insert_exists=skip")
    it.subdb.execute("INSERT INTO b VALUES (1, 0)")
    assert it.apply("INSERT INTO b VALUES (1, 1)") is None
    mirrored(it)
    [conflict] = conflicts(it)
    words = ("conflicts", "replay", "s", str(conflict["id"]), "--yes")
    one_error(it.run(*words), 6, "conflict=insert_exists", "replayed_at")
    assert it.subdb.value("SELECT count(*) FROM pgsub.skipped_change") == 1 and it.subdb.value(_LEFT) == 1
    it.subdb.execute("DELETE FROM b")
    it.ok(*words)
    assert it.subdb.rows("SELECT id, n::int FROM b") == [(1, 1)] and it.subdb.value(_LEFT) == 0
