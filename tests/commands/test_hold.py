"""alter --hold and --release through the program: a table that stops apply is held, and the rest goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fix_program import Cli, one_error, until
from fix_stuck import MakeStuck

if TYPE_CHECKING:
    from fix_servers import Database


@pytest.mark.long
def test_the_table_that_stops_a_running_subscription_is_held_mended_and_released(
    cli: Cli, tables: tuple[Database, Database]
) -> None:
    pubdb, subdb = tables
    assert cli.create("s", "--no-copy-data", "--no-wait").returncode == 0
    subdb.execute("INSERT INTO b VALUES (1, 0)")
    log = cli.launcher(env={"PGSUB_RETRY_SECONDS": "0.5"}).log  # type: ignore[attr-defined]
    pubdb.execute("INSERT INTO b VALUES (1, 1)")
    first = until(lambda: cli.status()["last_error"])
    held = cli("alter", "s", "--hold", "public.b")
    assert held.returncode == 0 and "are no longer applied as a whole" in held.stderr
    assert held.stderr.splitlines()[-1] == "pgsub alter s --release public.b"
    pubdb.execute("INSERT INTO a VALUES (500, 'goes on')")
    subdb.wait("SELECT t FROM a WHERE id = 500", value="goes on")
    shown = until(lambda: next((one for one in cli.status()["held"] if one["kept_changes"]), None))
    assert (shown["schemaname"], shown["relname"], shown["releasing"], shown["kept_changes"]) == (
        "public",
        "b",
        False,
        1,
    )
    assert shown["kept_bytes"] > 0
    until(lambda: cli("status", "s", "--check").returncode == 0)
    recovered = 'LOG:  logical replication apply worker for subscription "s" has recovered from an error\n'
    lines = ('LOG:  table "public.b" of subscription "s" is held: its changes are kept\n', recovered)
    until(lambda: all(log.read_text().count(line) == 1 for line in lines))
    text = cli("status", "s").stdout
    assert "public.b" in text and "pgsub alter s --release public.b" in text
    assert cli("alter", "s", "--release", "public.b").returncode == 0
    # the stream is past it, and yet it stands until the row is mended
    shown = until(lambda: cli.sql("SELECT finish_lsn FROM pgsub_error WHERE attempts >= 3"))
    assert shown == [(first["finish_lsn"],)]
    waited = cli("wait", "s", "--for", "caught-up", "--timeout", "200ms")
    assert waited.returncode in (6, 8), waited.stderr
    subdb.execute("DELETE FROM b")
    subdb.wait("SELECT n::int FROM b WHERE id = 1", value=1)
    until(lambda: not cli.status()["held"])
    until(lambda: log.read_text().count(recovered) == 2)
    said = log.read_text()
    assert 'LOG:  table "public.b" of subscription "s" is released: its kept changes are applied\n' in said
    assert said.rindex(recovered) > said.rindex("ERROR:  ")


@pytest.mark.long
def test_what_is_kept_goes_with_no_command_unsaid(stuck: MakeStuck) -> None:
    it = stuck()
    one_error(it.run("alter", "s", "--release", "public.b"), 3, "is not held", "pgsub_held_table")
    it.ok("alter", "s", "--hold", "public.b", "--hold", "public.a")
    one_error(it.run("alter", "s", "--release", "public.b", "--hold", "public.b"), 2, "at once")
    one_error(it.run("alter", "s", "--hold", "public.b", "--binary"), 2, "together with other changes")
    one_error(it.run("alter", "s", "--hold", "public.none"), 3, "is not part of the subscription", '"public.b"')
    assert it.apply("INSERT INTO b VALUES (1, 1)", "INSERT INTO a VALUES (101, 'x')") is None
    assert "nothing is applied until" in it.ok("alter", "s", "--release", "public.a").stderr
    assert it.apply() is None
    assert it.subdb.rows("SELECT id FROM a UNION ALL SELECT id FROM b") == [(101,)]
    assert [entry["tables"] for entry in it.journal("hold")] == [["public.b", "public.a"]]
    it.pubdb.execute("ALTER PUBLICATION p DROP TABLE b")
    it.ok("enable", "s")
    said = one_error(it.run("refresh", "s", "--no-wait"), 3, "while changes of it are kept", "1 of its changes")
    it.subdb.execute(said.splitlines()[-1])
    it.ok("refresh", "s", "--no-wait")
    assert it.subdb.value("SELECT count(*) FROM pgsub.held_table") == 0


def test_a_kept_transaction_is_skipped_and_a_dropped_subscription_tells_what_goes_with_it(stuck: MakeStuck) -> None:
    it = stuck()
    it.subdb.execute("INSERT INTO b VALUES (1, 0)")
    error = it.apply("INSERT INTO b VALUES (1, 1), (2, 2)", "INSERT INTO a VALUES (101, 'x')", "DELETE FROM b")
    assert error is not None
    it.ok("alter", "s", "--hold", "public.b")
    assert it.apply() is None
    it.ok("alter", "s", "--release", "public.b")
    again = it.apply()
    assert again is not None and again.finish_lsn == error.finish_lsn
    one_error(it.run("skip-lsn", "s", "--preview"), 3, "only kept changes of it are left")
    it.ok("skip-lsn", "s", "--rows", "conflicting", "--yes")
    assert it.apply("INSERT INTO a VALUES (102, 'y')") is None
    assert it.subdb.rows("SELECT id FROM b") == []
    assert it.subdb.value("SELECT count(*) FROM pgsub.skipped_change") == 1
    it.ok("alter", "s", "--hold", "public.b")
    assert it.apply("INSERT INTO b VALUES (3, 3)") is None
    assert 'held table "public.b" has 1 change never applied' in it.ok("drop", "s", "--yes").stderr
    assert it.subdb.value("SELECT count(*) FROM pgsub.held_change") == 0
