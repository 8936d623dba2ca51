"""origin-advance: what vanishes is told, wrong positions are refused, and a crash leaves the old or the new one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fix_program import Cli, one_error
from fix_stuck import MakeStuck, Stuck, lsn

from pgsub.catalog.locks import subscription_lock
from pgsub.commands.alter import two_phase
from pgsub.protocol.lsn import parse_lsn

_ORIGIN = "SELECT remote_lsn FROM pg_replication_origin_status WHERE external_id = %s"

#: A keepalive may have moved what is reported beyond what was applied.
_FURTHEST = "SELECT greatest(remote_lsn, reported_lsn) FROM pgsub.progress WHERE worker = 0"


def blocked(it: Stuck) -> int:
    """Stuck at the first of two transactions; its finish LSN."""
    it.subdb.execute("INSERT INTO b VALUES (1, 1)")
    idle = "SELECT pg_logical_emit_message(true, '', '')"  # the ledger reports WAL behind its last transaction
    assert it.apply("INSERT INTO a VALUES (1000, 'applied')", idle) is None
    error = it.apply(
        "BEGIN; INSERT INTO b VALUES (1, 2); DELETE FROM a WHERE id < 3; COMMIT", "INSERT INTO b VALUES (3, 3)"
    )
    assert error is not None and error.finish_lsn is not None
    return parse_lsn(error.finish_lsn)


def test_what_finishes_before_the_position_is_left_out_and_the_next_is_applied(stuck: MakeStuck) -> None:
    it = stuck()
    finish, before = blocked(it), it.position()
    found = it.preview(lsn(finish + 1), code=6, command="origin-advance")
    assert (found["transactions"], found["changes"]) == (1, 3)
    assert [(t["relname"], t["insert"], t["delete"]) for t in found["tables"]] == [("a", 0, 2), ("b", 1, 0)]
    assert found["last"]["finish_lsn"] == lsn(finish) and found["inside"] is None and found["bytes"] > 0
    assert it.position() == before
    ended = it.ok("origin-advance", "s", lsn(finish + 1), "--yes")
    assert "is the finish LSN of transaction" in ended.stderr and "plus one" in ended.stderr
    assert it.position() == lsn(finish + 1)
    assert it.subdb.value("SELECT remote_commit_ts IS NULL FROM pgsub.progress WHERE worker = 0")
    assert it.subdb.value(_ORIGIN, f"pgsub_{it.subid}") == lsn(finish + 1)
    assert it.cli.sql("SELECT remote_lsn FROM pgsub_origin") == [(lsn(finish + 1),)]
    assert it.cli.sql("SELECT count(*) FROM pgsub_error") == [(0,)]
    [entry] = it.journal("origin-advance")
    assert (entry["remote_lsn"], entry["to"], entry["changes"]) == (before, lsn(finish + 1), 3)
    assert it.apply() is None
    assert it.subdb.rows("SELECT id, n::int FROM b ORDER BY id") == [(1, 1), (3, 3)]


@pytest.mark.long
def test_a_position_inside_a_transaction_is_explained_and_leaves_it_whole(stuck: MakeStuck) -> None:
    it = stuck()
    finish = blocked(it)
    for inside in (finish, finish - 1):
        found = it.preview(lsn(inside), code=0, command="origin-advance")
        assert found["transactions"] == 0 and found["inside"]["finish_lsn"] == lsn(finish)
    said = it.ok("origin-advance", "s", lsn(finish), "--yes").stderr
    assert "lies inside transaction" in said and f"pgsub origin-advance s {lsn(finish + 1)}" in said
    it.subdb.execute("DELETE FROM b")
    assert it.apply() is None
    assert it.subdb.rows("SELECT id, n::int FROM b ORDER BY id") == [(1, 2), (3, 3)]


@pytest.mark.long
def test_backwards_beyond_the_wal_and_while_it_is_served_are_refused(
    stuck: MakeStuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = stuck()
    finish, before = blocked(it), it.position()
    one_error(
        it.run("origin-advance", "s", lsn(parse_lsn(before) - 8), "--yes"), 3, "cannot be moved backwards", hint=False
    )
    one_error(it.run("origin-advance", "s", "FFFFFFFF/0", "--yes"), 3, "beyond the publisher's WAL", hint=False)
    one_error(it.run("origin-advance", "s", "0/XYZ", "--yes"), 2, "invalid LSN")
    one_error(it.cli("origin-advance", "s", lsn(finish + 1)), 2, "needs --yes")
    assert "at" in it.ok("origin-advance", "s", it.subdb.value(_FURTHEST), "--yes").stderr
    monkeypatch.setattr(two_phase, "LET_GO_SECONDS", 0.1)
    lock = subscription_lock(it.cli.state, it.subid)
    assert lock.acquire()
    one_error(it.run("origin-advance", "s", lsn(finish + 1), "--yes"), 3, "worker is still running")
    lock.release()
    it.ok("enable", "s")
    one_error(it.run("origin-advance", "s", lsn(finish + 1), "--yes"), 3, "enabled subscription", "pgsub disable s")
    it.preview(lsn(finish + 1), code=6, command="origin-advance")
    assert it.position() == before and it.journal("origin-advance") == []


@pytest.mark.long
def test_the_end_of_what_is_prepared_on_the_target_is_not_passed_over(stuck: MakeStuck) -> None:
    it = stuck("--two-phase")
    assert it.apply("BEGIN; INSERT INTO b VALUES (1, 1); PREPARE TRANSACTION 'kept'") is None
    it.pubdb.execute("BEGIN; INSERT INTO b VALUES (2, 2); PREPARE TRANSACTION 'left'")
    found = it.preview(lsn(it.wal()), code=6, command="origin-advance")
    assert (found["transactions"], found["prepared"]) == (1, 1)
    it.pubdb.execute("COMMIT PREPARED 'kept'")
    said = one_error(it.run("origin-advance", "s", lsn(it.wal()), "--yes"), 3, "over the COMMIT PREPARED")
    upto = said.split("advance to ")[1].split()[0]
    it.ok("origin-advance", "s", upto, "--yes")
    it.pubdb.execute("ROLLBACK PREPARED 'left'")
    assert it.apply() is None
    assert it.subdb.rows("SELECT id FROM b") == [(1,)]


@pytest.mark.long
def test_a_table_that_still_synchronizes_is_named_and_freed_from_its_claim(stuck: MakeStuck) -> None:
    it = stuck()
    finish = blocked(it)
    it.subdb.execute(
        "UPDATE pgsub.subscription_rel SET srsubstate = 'f', handover_lsn = %s::pg_lsn WHERE relname = 'a'", lsn(finish)
    )
    ended = it.run("origin-advance", "s", lsn(finish + 1), "--preview")
    assert "get their part of it from their sync workers: public.a" in ended.stdout
    it.ok("origin-advance", "s", lsn(finish + 1), "--yes")
    rows = it.subdb.rows("SELECT srsubstate::text, handover_lsn FROM pgsub.subscription_rel WHERE relname = 'a'")
    assert rows == [("f", None)]


@pytest.mark.long
@pytest.mark.parametrize("point", ["advance.before_ledger", "advance.after_ledger", "advance.after_origin"])
def test_a_crash_leaves_the_old_position_or_the_new_one(
    stuck: MakeStuck, point: str, reached: Callable[[str], None]
) -> None:
    it = stuck()
    finish, before = blocked(it), it.position()
    furthest = it.subdb.value(_FURTHEST)
    cli: Cli = it.cli
    ended = cli("origin-advance", "s", lsn(finish + 1), "--yes", env={"PGSUB_FAILPOINTS": f"{point}=kill"})
    assert ended.returncode == -9
    reached(point)
    assert it.position() == (before if point == "advance.before_ledger" else lsn(finish + 1))
    if point == "advance.before_ledger":
        assert it.apply() is not None
    else:
        [(body,)] = it.subdb.rows("SELECT body FROM pgsub.event WHERE body ->> 'kind' = 'log'")
        assert body["text"] == f"replication origin advanced from {furthest} to {lsn(finish + 1)}"
    [begun] = it.journal("origin-advance")  # before anything moves, so that a crash cannot lose the old position
    assert (begun["remote_lsn"], begun["to"], begun["outcome"]) == (before, lsn(finish + 1), "begun")
    done = it.ok("origin-advance", "s", lsn(finish + 1), "--yes")
    assert ("already" in done.stderr) is (point != "advance.before_ledger")
    assert it.cli.sql("SELECT finish_lsn FROM pgsub_error") == []
    assert it.journal("origin-advance")[-1]["outcome"] == "done"
    assert it.apply() is None
    assert it.subdb.rows("SELECT id FROM b ORDER BY id") == [(1,), (3,)]
