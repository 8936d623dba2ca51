"""skip-lsn through the program: what it sets, asks and tells, and a subscription that gets past what stopped it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from fix_program import one_error, valid
from fix_stuck import MakeStuck

_STORED = "SELECT subskiplsn FROM pg_subscription"
#: As pgsub writes it, also where the target is 19 and pads it with zeros.
_PENDING = "SELECT skip_lsn, skip_rows FROM pgsub.control WHERE worker = 0"


def test_three_transactions_that_fail_one_after_the_other_are_skipped_by_the_lsns_that_are_recorded(
    stuck: MakeStuck,
) -> None:
    it = stuck("--two-phase", "--streaming", "on")
    it.subdb.execute("INSERT INTO b VALUES (1, 0), (2, 0), (3, 0)")
    it.pubdb.execute(f"ALTER DATABASE {it.pubdb.name} SET debug_logical_replication_streaming = immediate")
    statements = (
        "BEGIN; INSERT INTO b SELECT g, g FROM generate_series(1, 1) g; INSERT INTO a VALUES (101, 'streamed'); COMMIT",
        "INSERT INTO b VALUES (2, 2)",
        "BEGIN; INSERT INTO b VALUES (3, 3); INSERT INTO a VALUES (103, 'prepared'); PREPARE TRANSACTION 'third'",
    )
    error = it.apply(*statements, "COMMIT PREPARED 'third'", "INSERT INTO a VALUES (104, 'after')")
    lsns = []
    for rows in ("whole", "whole", "conflicting"):
        assert error is not None and error.finish_lsn is not None and error.conflict == "insert_exists"
        lsns.append(error.finish_lsn)
        done = valid("skip-lsn", it.ok("skip-lsn", "s", "--rows", rows, "--yes", "--json").stdout)
        assert (done["subskiplsn"], done["rows_mode"]) == (error.finish_lsn, rows)
        assert it.subdb.rows(_PENDING) == [(error.finish_lsn, rows)] and it.cli.sql(_STORED) == [(error.finish_lsn,)]
        error = it.apply()
    assert error is None and it.subdb.rows(_PENDING) == [(None, None)]
    assert it.subdb.rows("SELECT id, n::int FROM b ORDER BY id") == [(1, 0), (2, 0), (3, 0)]
    assert it.subdb.rows("SELECT id FROM a ORDER BY id") == [(103,), (104,)]
    kept = it.subdb.rows("SELECT relname, finish_lsn FROM pgsub.skipped_change ORDER BY id")
    assert kept == [("b", lsns[0]), ("a", lsns[0]), ("b", lsns[1]), ("b", lsns[2])]
    assert [(entry["lsn"], entry["rows"]) for entry in it.journal("skip-lsn")] == list(
        zip(lsns, ("whole", "whole", "conflicting"), strict=True)
    )


@pytest.mark.long
def test_none_takes_it_back_and_without_a_terminal_it_needs_yes(stuck: MakeStuck) -> None:
    it = stuck()
    one_error(it.run("skip-lsn", "s", "--yes"), 3, "no failing transaction", "pgsub skip-lsn s LSN")
    it.subdb.execute("INSERT INTO b VALUES (1, 0)")
    error = it.apply("INSERT INTO b VALUES (1, 1)", "INSERT INTO b VALUES (2, 2)")
    assert error is not None and error.finish_lsn is not None
    said = one_error(it.cli("skip-lsn", "s"), 2, "needs --yes", "--preview")
    assert said.splitlines()[-1].strip() == "pgsub skip-lsn s --yes"
    said = it.ok("skip-lsn", "s", error.finish_lsn, "--yes").stderr
    assert f'NOTICE:  subscription "s" skips the transaction finished at {error.finish_lsn}\n' in said
    assert "once the subscription is enabled" in said
    undone = valid("skip-lsn", it.ok("skip-lsn", "s", "none", "--json").stdout)
    assert (undone["subskiplsn"], undone["previous"]) == ("0/0", error.finish_lsn)
    assert it.subdb.rows(_PENDING) == [(None, None)] and it.cli.sql(_STORED) == [("0/0",)]
    assert "has nothing to skip" in it.ok("skip-lsn", "s", "none").stderr
    for words in (["0/0"], ["x"], ["--rows", "some"], ["none", "--preview"]):
        one_error(it.run("skip-lsn", "s", *words, "--yes"), 2)
    assert [entry["lsn"] for entry in it.journal("skip-lsn")] == [error.finish_lsn, "none", "none"]


@pytest.mark.long
def test_a_transaction_that_is_not_the_next_one_is_warned_of(stuck: MakeStuck) -> None:
    it = stuck()
    it.subdb.execute("INSERT INTO b VALUES (1, 0), (2, 0)")
    first = it.apply("INSERT INTO b VALUES (1, 1)", "INSERT INTO b VALUES (2, 2)")
    it.ok("skip-lsn", "s", "--yes")
    second = it.apply()
    assert first is not None and second is not None and second.finish_lsn is not None
    third = it.apply("INSERT INTO b VALUES (3, 3)")
    assert third is not None and third.finish_lsn == second.finish_lsn
    wrong = str(it.preview(code=6)["transaction"]["end_lsn"])
    found = it.run("skip-lsn", "s", wrong, "--yes")
    assert found.returncode == 3
    later = it.run("skip-lsn", "s", _lsn_of_the_third(it), "--yes")
    assert later.returncode == 0 and "is not the next one to be applied" in later.stderr, later.stderr


def _lsn_of_the_third(it) -> str:
    """A finish LSN behind the failing one, as the refusal of a wrong LSN names it."""
    said = it.run("skip-lsn", "s", str(it.pubdb.value("SELECT pg_current_wal_flush_lsn() - 1")), "--yes").stderr
    return str(re.findall(r"finishe[sd] at ([0-9A-F]+/[0-9A-F]+)", said)[-1])  # the server may have written WAL since


@pytest.mark.long
def test_several_lsns_are_set_shown_and_cleared_together(stuck: MakeStuck) -> None:
    it = stuck()
    it.subdb.execute("INSERT INTO b VALUES (1, 0), (3, 0)")
    error = it.apply("INSERT INTO b VALUES (1, 1)", "INSERT INTO b VALUES (2, 2)", "INSERT INTO b VALUES (3, 3)")
    assert error is not None and error.finish_lsn is not None
    third = _lsn_of_the_third(it)
    one_error(it.run("skip-lsn", "s", error.finish_lsn, "0/10", "--yes"), 3, "finishes at 0/10", "--preview")
    assert it.subdb.rows(_PENDING) == [(None, None)]
    one_error(it.run("skip-lsn", "s", error.finish_lsn, third, "--preview"), 2, "exactly one transaction")
    one_error(it.run("skip-lsn", "s", "none", third, "--yes"), 2)
    done = valid("skip-lsn", it.ok("skip-lsn", "s", third, error.finish_lsn, "--yes", "--json").stdout)
    assert (done["subskiplsn"], done["lsns"]) == (error.finish_lsn, [error.finish_lsn, third])
    shown = valid("status", it.ok("status", "s", "--json").stdout)["subscriptions"][0]
    assert (shown["subskiplsn"], shown["pgsub_skips"]) == (
        error.finish_lsn,
        [f"{error.finish_lsn} whole", f"{third} whole"],
    )
    assert f"{third} whole" in it.ok("status", "s").stdout
    it.ok("skip-lsn", "s", "none")
    assert it.subdb.rows("SELECT skip_lsn, skip_lsns FROM pgsub.control WHERE worker = 0") == [(None, None)]
    it.ok("skip-lsn", "s", third, error.finish_lsn, "--yes")
    assert it.apply() is None
    assert it.subdb.rows("SELECT id, n::int FROM b ORDER BY id") == [(1, 0), (2, 2), (3, 0)]


@pytest.mark.long
@pytest.mark.parametrize("rows", ["whole", "conflicting"])
def test_a_command_that_is_killed_has_set_the_skip_or_not_and_is_in_the_journal(
    stuck: MakeStuck, rows: str, reached: Callable[[str], None]
) -> None:
    it = stuck()
    it.subdb.execute("INSERT INTO b VALUES (1, 0)")
    error = it.apply("BEGIN; INSERT INTO b VALUES (1, 1); INSERT INTO b VALUES (2, 2); COMMIT")
    assert error is not None and error.finish_lsn is not None
    words = ("skip-lsn", "s", "--rows", rows, "--yes")
    for point, pending in (("before", (None, None)), ("after", (error.finish_lsn, rows))):
        assert it.cli(*words, env={"PGSUB_FAILPOINTS": f"skip.{point}_ledger=kill"}).returncode == -9
        reached(f"skip.{point}_ledger")
        assert it.subdb.rows(_PENDING) == [pending]
        begun = it.journal("skip-lsn")[-1]
        assert (begun["lsn"], begun["rows"], begun["outcome"]) == (error.finish_lsn, rows, "begun")
    it.ok(*words)
    assert it.journal("skip-lsn")[-1]["outcome"] == "done" and it.cli.sql(_STORED) == [(error.finish_lsn,)]
    assert it.apply() is None
    assert it.subdb.rows("SELECT id FROM b ORDER BY id") == [(1,), *([(2,)] if rows == "conflicting" else [])]


@pytest.mark.long
def test_a_rule_with_a_limit_is_set_shown_used_up_and_cleared(stuck: MakeStuck) -> None:
    it = stuck()
    rule = ("--conflict", "insert_exists", "--table", "public.b", "--limit")
    one_error(it.cli("skip-lsn", "s", *rule, "2"), 2, "needs --yes", "public.b --limit 2 --yes")
    one_error(it.run("skip-lsn", "s", *rule, "0", "--yes"), 2, "--limit")
    one_error(it.run("skip-lsn", "s", "0/10", *rule, "2", "--yes"), 2, "without other options")
    one_error(it.run("skip-lsn", "s", "--conflict", "insert_exists", "--limit", "2"), 2, "together")
    wrong = ("--conflict", "update_deleted", "--table", "public.b", "--limit", "1", "--yes")
    one_error(it.run("skip-lsn", "s", *wrong), 2, "not a conflict type", "insert_exists")
    one_error(it.run("skip-lsn", "s", *rule[:3], "public.c", "--limit", "1", "--yes"), 3, "not subscribed", "status")
    done = valid("skip-lsn", it.ok("skip-lsn", "s", *rule, "2", "--yes", "--json").stdout)
    assert done["rules"] == [{"conflict": "insert_exists", "table": "public.b", "limit": 2}]
    assert it.cli.sql("SELECT pgsub_skips FROM pg_subscription") == [('["insert_exists public.b 2"]',)]
    it.ok("skip-lsn", "s", "none")
    assert it.subdb.rows("SELECT skip_rules FROM pgsub.control WHERE worker = 0") == [(None,)]
    assert "has nothing to skip" in it.ok("skip-lsn", "s", "none").stderr
    it.ok("skip-lsn", "s", *rule, "2", "--yes")
    it.subdb.execute("INSERT INTO b VALUES (1, 0), (2, 0), (3, 0)")
    error = it.apply("INSERT INTO b SELECT g, g FROM generate_series(1, 3) g")
    assert error is not None and it.cli.sql("SELECT pgsub_skips FROM pg_subscription")[0][0].count("insert_exists") == 1
    it.subdb.execute("DELETE FROM b WHERE id = 3")
    assert it.apply() is None
    assert it.subdb.rows("SELECT id, n::int FROM b ORDER BY id") == [(1, 0), (2, 0), (3, 3)]
    assert it.subdb.rows("SELECT skip_rules FROM pgsub.control WHERE worker = 0") == [(None,)]
    entries = [one for one in it.journal("skip-lsn") if "conflict" in one]
    assert [(one["conflict"], one["limit"], one["outcome"]) for one in entries] == [("insert_exists", 2, "done")] * 2
