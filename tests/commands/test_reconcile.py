"""``pgsub reconcile``: a subscription whose slot is lost goes on from another one; only rows that differ are sent."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TypeAlias

import patience
import pytest
from fix_program import Cli, one_error, until, valid
from fix_served import writing
from fix_servers import Database
from fix_standby import Followed
from fix_stuck import MakeStuck

from pgsub.commands.reconcile import diagnosis
from pgsub.publisher import connect as publisher
from pgsub.publisher import slots

Tables: TypeAlias = tuple[Database, Database]

_SLOTS = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database() ORDER BY 1"
_ORIGINAL = "SELECT id, xmin::text, ctid::text FROM a ORDER BY 1"
_CONFIRMED = "SELECT restart_lsn, confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = %s"
_NEW_SLOT = "SELECT new_slot FROM pgsub.subscription WHERE subname = %s"


def same(tables: Tables, *names: str) -> None:
    """Both servers have the same rows."""
    for name in names:
        query = f"SELECT x::text FROM {name} AS x ORDER BY 1"
        assert tables[0].rows(query) == tables[1].rows(query), name


def lose(source: Database, slot: str) -> None:
    """Drop the slot of a running subscription."""
    source.wait("SELECT active FROM pg_replication_slots WHERE slot_name = %s", slot)
    query = "SELECT pg_terminate_backend(active_pid), pg_drop_replication_slot(slot_name) FROM pg_replication_slots"

    def gone() -> bool:
        try:
            source.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
            source.execute(f"{query} WHERE slot_name = %s AND NOT active", slot)
        except Exception:  # a worker was faster
            return False
        return source.rows(_SLOTS) == []

    until(gone)


def caught_up(cli: Cli, name: str) -> None:
    """Wait until the subscription is healthy and has everything."""
    ended = cli("wait", name, "--for", "caught-up", "--timeout", "2m")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.long
def test_under_a_launcher_only_rows_that_changed_while_there_was_no_slot_are_written(
    served: tuple[Cli, str], tables: Tables
) -> None:
    cli, name = served
    slot = cli.status(name)["subslotname"]
    lose(tables[0], slot)
    before = {row[0]: row for row in tables[1].rows(_ORIGINAL)}
    tables[0].execute("UPDATE a SET t = 'missed' WHERE id = 1; DELETE FROM a WHERE id = 2; INSERT INTO b VALUES (9, 9)")
    until(lambda: (one := cli.status(name)["last_error"]) and one["class"] == "SlotLost")
    runbook = cli("status", name, "--runbook").stdout
    assert f"pgsub reconcile {name}\n" in runbook and f"pgsub reconcile {name} --dry-run" in runbook
    one_error(cli("reconcile", name), 2, "replacing rows needs --yes", f"pgsub reconcile {name} --dry-run")
    planned = valid("reconcile", cli("reconcile", name, "--dry-run", "--json").stdout)
    assert planned["reason"] == f'replication slot "{slot}" does not exist' and planned["to"] is None
    assert [one["relname"] for one in planned["compared"]] == ["a", "b"]
    assert tables[0].rows(_SLOTS) == [] and tables[1].value(_NEW_SLOT, name) is None
    ended = cli("reconcile", name, "--yes", "--json")
    assert ended.returncode == 0, ended.stderr
    kept = tables[1].rows(
        "SELECT body->>'operation', body->'old'->>'t', body->'new'->>'t', replayed_at IS NOT NULL"
        " FROM pgsub.skipped_change WHERE relname = 'a' ORDER BY 1"
    )
    assert kept == [("DELETE", "row 2", None, True), ("UPDATE", "row 1", "missed", True)]
    listed = cli("conflicts", "list", name).stdout
    assert "delete_origin_differs" in listed and "update_origin_differs" in listed and "repaired" in listed
    done = valid("reconcile", ended.stdout)
    assert done["to"] is not None and done["slot_name"] == slot and not done["dry_run"]
    assert 'table "public.a" was adopted: 0 rows missing, 1 extra, 1 different' in ended.stderr
    tables[0].execute("INSERT INTO a VALUES (1000, 'replicated')")
    tables[1].wait("SELECT count(*) FROM a WHERE id = 1000", value=1)
    caught_up(cli, name)
    same(tables, "a", "b")
    kept = {row[0]: row for row in tables[1].rows(_ORIGINAL) if row[0] not in (1, 1000)}
    assert kept == {key: row for key, row in before.items() if key not in (1, 2)}
    assert cli.status(name)["last_error"] is None and tables[0].rows(_SLOTS) == [(slot,)]
    one_error(cli("reconcile", name, "--yes"), 3, f'replication slot "{slot}" has all', f"pgsub verify {name}")


@pytest.mark.long
def test_everything_arrives_once_while_the_publisher_is_written_all_the_time(
    served: tuple[Cli, str], tables: Tables
) -> None:
    cli, name = served
    for database in tables:
        database.execute("CREATE TABLE heap (v bigint)")
    tables[0].execute("ALTER TABLE heap REPLICA IDENTITY FULL; ALTER PUBLICATION p ADD TABLE heap")
    assert cli("refresh", name).returncode == 0
    slot = cli.status(name)["subslotname"]
    changes = ("UPDATE a SET t = 'newer {}' WHERE id = 1 + {} % 90", "INSERT INTO a VALUES (1000 + {}, 'new')",
               "INSERT INTO heap VALUES ({})", "DELETE FROM a WHERE id = 1000 + {} - 5")  # fmt: skip
    with writing(tables[0], *changes) as done:
        for words in ((), ("--no-wait",)):
            tables[1].wait("SELECT count(*) > 10 FROM heap", value=True)
            lose(tables[0], slot)
            begun = done[0]
            until(lambda begun=begun: done[0] > begun + 20)
            ended = cli("reconcile", name, "--yes", *words)
            assert ended.returncode == 0, ended.stderr
            assert cli("wait", name, "--for", "synced", "--timeout", "2m").returncode == 0
    caught_up(cli, name)
    same(tables, "a", "b", "heap")
    ended = cli("verify", name)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.long
def test_without_a_launcher_the_command_does_the_work_and_a_disabled_subscription_waits(
    cli: Cli, tables: Tables
) -> None:
    assert cli.create("s").returncode == 0
    tables[0].execute("SELECT pg_drop_replication_slot('s')")
    tables[0].execute("INSERT INTO b VALUES (7, 7)")
    one_error(cli("run", "s", "--until-caught-up", "--timeout", "2m"), 7, "pgsub reconcile s")
    ended = cli("reconcile", "s", "--yes")
    assert ended.returncode == 0, ended.stderr
    same(tables, "a", "b")
    tables[0].execute("SELECT pg_drop_replication_slot('s'); INSERT INTO b VALUES (8, 8)")
    assert cli("disable", "s").returncode == 0
    ended = cli("reconcile", "s", "--yes")
    assert ended.returncode == 0 and "is disabled: its tables are compared once it is enabled" in ended.stderr
    assert tables[1].value("SELECT count(*) FROM b WHERE id = 8") == 0
    assert cli("enable", "s").returncode == 0
    assert cli("run", "s", "--until-caught-up", "--timeout", "2m").returncode == 0
    same(tables, "a", "b")
    assert cli("drop", "s", "--yes").returncode == 0
    assert tables[0].rows(_SLOTS) == []


@pytest.mark.long
def test_a_slot_of_somebody_else_is_not_dropped(cli: Cli, tables: Tables) -> None:
    assert cli.create("s").returncode == 0
    tables[0].execute("SELECT pg_drop_replication_slot('s')")
    tables[0].execute("SELECT pg_create_logical_replication_slot('s', 'test_decoding')")
    # a restored ledger does not name the slot of a copy that came later
    unnamed = f"pgsub_{tables[1].value('SELECT subid FROM pgsub.subscription')}_sync_2_3"
    tables[0].execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", unnamed)
    one_error(cli("reconcile", "s", "--yes"), 3, 'replication slot "s" is not one of this subscription', "--slot-name")
    assert tables[1].value(_NEW_SLOT, "s") is None
    ended = cli("reconcile", "s", "--slot-name", "other", "--yes")
    assert ended.returncode == 0, ended.stderr
    tables[0].execute(next(line for line in ended.stderr.splitlines() if line.endswith(f"_slot('{unnamed}');")))
    assert tables[0].rows(_SLOTS) == [("other",), ("s",)] and cli.status("s")["subslotname"] == "other"
    tables[0].execute("INSERT INTO b VALUES (7, 7)")
    assert cli("run", "s", "--until-caught-up", "--timeout", "2m").returncode == 0
    same(tables, "a", "b")
    assert cli("drop", "s", "--yes").returncode == 0
    assert tables[0].rows(_SLOTS) == [("s",)]
    tables[0].execute("SELECT pg_drop_replication_slot('s')")


@pytest.mark.long
def test_a_slot_that_another_subscription_left_idle_is_not_taken_for_its_name(cli: Cli, tables: Tables) -> None:
    assert cli.create("s").returncode == 0
    tables[0].execute("SELECT pg_drop_replication_slot('s')")
    tables[0].execute("SELECT pg_create_logical_replication_slot('reports', 'pgoutput')")
    tables[0].execute("INSERT INTO b VALUES (7, 7)")
    slot = tables[0].value(_CONFIRMED, "reports")
    for how in ("--dry-run", "--yes"):
        said = one_error(
            cli("reconcile", "s", "--slot-name", "reports", how), 3, 'replication slot "reports" already exists'
        )
        assert "pgsub reconcile s --slot-name NAME" in said.splitlines()
    assert tables[0].value(_CONFIRMED, "reports") == slot and tables[0].rows(_SLOTS) == [("reports",)]
    assert tables[1].value(_NEW_SLOT, "s") is None and cli.status("s")["subslotname"] == "s"
    assert cli.sql("SELECT count(*) FROM pgsub_journal WHERE action = 'reconcile'") == [(0,)]
    assert cli("reconcile", "s", "--slot-name", "other", "--yes").returncode == 0
    same(tables, "a", "b")
    assert cli("drop", "s", "--yes").returncode == 0
    tables[0].execute(said.splitlines()[-1])
    assert tables[0].rows(_SLOTS) == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["s", "reports"])
@pytest.mark.parametrize("step", ["begun", "dropped"])
def test_a_slot_that_somebody_makes_in_the_meantime_is_left_to_him(
    cli: Cli, tables: Tables, tmp_path: Path, step: str, name: str
) -> None:
    assert cli.create("s").returncode == 0
    tables[0].execute("SELECT pg_drop_replication_slot('s')")
    go, reached = tmp_path / "go", tmp_path / "reached"
    reached.mkdir()
    points = {"PGSUB_FAILPOINTS": f"reconcile.{step}=pause:{go}", "PGSUB_FAILPOINTS_DIR": str(reached)}
    command = cli.start("reconcile", "s", "--slot-name", name, "--yes", env=points)
    until((reached / f"reconcile.{step}").exists)
    tables[0].execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", name)
    tables[0].execute("INSERT INTO b VALUES (7, 7)")
    slot = tables[0].value(_CONFIRMED, name)
    go.touch()
    assert command.wait(patience.SECONDS) == 3
    assert f'replication slot "{name}" already exists' in command.log.read_text()
    assert tables[0].value(_CONFIRMED, name) == slot and cli.status("s")["subslotname"] == "s"
    assert cli("reconcile", "s", "--slot-name", "other", "--yes").returncode == 0
    same(tables, "a", "b")
    if name == "reports":
        assert cli("drop", "s", "--yes").returncode == 0
    assert tables[0].value(_CONFIRMED, name) == slot


@pytest.mark.long
def test_a_slot_that_was_not_created_in_time_is_nobodys_and_left_to_who_makes_it_then(cli: Cli, tables: Tables) -> None:
    assert cli.create("s").returncode == 0
    tables[0].execute("SELECT pg_drop_replication_slot('s')")
    with closing(tables[0].connect()) as writer:
        writer.execute("BEGIN; INSERT INTO b VALUES (7, 7)")
        ended = cli("reconcile", "s", "--slot-name", "reports", "--yes", "--timeout", "3s")
        assert ended.returncode == 8, ended.stderr
        writer.execute("COMMIT")
    assert tables[0].rows(_SLOTS) == [] and cli.status("s")["subslotname"] == "s"
    assert tables[1].value(_NEW_SLOT, "s") is None
    tables[0].execute("SELECT pg_create_logical_replication_slot('reports', 'pgoutput')")
    one_error(cli("reconcile", "s", "--slot-name", "reports", "--yes"), 3, 'slot "reports" already exists')
    assert cli("reconcile", "s", "--yes").returncode == 0
    same(tables, "a", "b")
    assert cli("drop", "s", "--yes").returncode == 0
    assert tables[0].rows(_SLOTS) == [("reports",)]


@pytest.mark.long
@pytest.mark.parametrize("step", ["begun", "dropped", "created", "moved"])
def test_a_command_killed_with_a_new_name_is_gone_on_with_by_the_same_one(cli: Cli, tables: Tables, step: str) -> None:
    assert cli.create("s").returncode == 0
    tables[0].execute("SELECT pg_drop_replication_slot('s'); INSERT INTO b VALUES (7, 7)")
    words = ("reconcile", "s", "--slot-name", "other", "--yes")
    assert cli(*words, env={"PGSUB_FAILPOINTS": f"reconcile.{step}=kill"}).returncode < 0
    assert tables[0].rows(_SLOTS) == ([("other",)] if step in ("created", "moved") else [])
    ended = cli(*words)
    assert ended.returncode == 0, ended.stderr
    same(tables, "a", "b")
    assert tables[0].rows(_SLOTS) == [("other",)] and tables[1].value(_NEW_SLOT, "s") is None
    assert cli("drop", "s", "--yes").returncode == 0
    assert tables[0].rows(_SLOTS) == []


@pytest.mark.long
def test_another_publisher_is_not_what_tables_are_compared_with(cli: Cli, tables: Tables) -> None:
    assert cli.create("s").returncode == 0
    system = tables[1].value("SELECT system_identifier FROM pgsub.subscription")
    tables[1].execute("UPDATE pgsub.subscription SET system_identifier = '1'")
    one_error(cli("reconcile", "s", "--force", "--yes"), 7, "the publisher is a different database system")
    assert tables[1].value(_NEW_SLOT, "s") is None
    tables[1].execute("UPDATE pgsub.subscription SET system_identifier = %s", system)
    assert cli("drop", "s", "--yes").returncode == 0


@pytest.mark.long
def test_a_subscription_is_dropped_in_the_middle_of_it_and_no_slot_stays(cli: Cli, tables: Tables) -> None:
    for step in ("begun", "created"):
        assert cli.create("s", "--no-copy-data").returncode == 0
        tables[0].execute("SELECT pg_drop_replication_slot('s')")
        points = {"PGSUB_FAILPOINTS": f"reconcile.{step}=kill"}
        assert cli("reconcile", "s", "--slot-name", "other", "--yes", env=points).returncode < 0
        assert tables[1].value(_NEW_SLOT, "s") == "other"
        assert cli("drop", "s", "--yes").returncode == 0
        assert tables[0].rows(_SLOTS) == []


@pytest.mark.long
def test_what_is_prepared_on_the_target_is_rolled_back_and_what_the_publisher_committed_comes(
    cli: Cli, tables: Tables
) -> None:
    assert cli.create("s", "--two-phase").returncode == 0
    tables[0].execute("BEGIN; INSERT INTO b VALUES (7, 7); PREPARE TRANSACTION 'of the application'")
    assert cli("run", "s", "--until-caught-up", "--timeout", "2m").returncode == 0
    prepared = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
    gid = tables[1].value(prepared)
    assert gid.startswith("pgsub_")
    tables[0].execute("SELECT pg_drop_replication_slot('s')")
    tables[0].execute("COMMIT PREPARED 'of the application'")
    ended = cli("reconcile", "s", "--yes", "--json")
    assert ended.returncode == 0 and valid("reconcile", ended.stdout)["rolled_back"] == [gid]
    assert "1 prepared transaction on the target will be rolled back" in ended.stderr
    same(tables, "a", "b")
    assert tables[1].rows(prepared) == [] and cli.status("s")["subtwophasestate"] == "e"
    assert cli("drop", "s", "--yes").returncode == 0


@pytest.mark.long
def test_a_slot_that_was_made_again_by_another_hand_is_replaced_unless_it_is_in_use(cli: Cli, tables: Tables) -> None:
    assert cli.create("s").returncode == 0
    tables[0].execute("SELECT pg_drop_replication_slot('s'); INSERT INTO b VALUES (7, 7)")
    tables[0].execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    with closing(tables[0].connect(replication="database", application_name="another")) as other:
        other.pgconn.send_query(b"START_REPLICATION SLOT s LOGICAL 0/0 (proto_version '1', publication_names 'p')")
        tables[0].wait("SELECT active FROM pg_replication_slots WHERE slot_name = 's'", value=True)
        one_error(cli("reconcile", "s", "--yes"), 3, 'replication slot "s" is in use', 'of "another" streams from it')
        ended = cli("reconcile", "s", "--slot-name", "other", "--yes")
        assert ended.returncode == 0, ended.stderr
        assert 'replication slot "s" was left on the publisher' in ended.stderr
    assert tables[0].rows(_SLOTS) == [("other",), ("s",)]
    again = ("reconcile", "s", "--slot-name", "s", "--force", "--yes")
    tables[0].execute(one_error(cli(*again), 3, 'replication slot "s" already exists').splitlines()[-1])
    ended = cli(*again)
    assert ended.returncode == 0, ended.stderr
    same(tables, "a", "b")
    assert cli("drop", "s", "--yes").returncode == 0
    assert tables[0].rows(_SLOTS) == []


@pytest.mark.long
def test_what_waited_for_the_lost_stream_is_named_and_given_up(cli: Cli, tables: Tables) -> None:
    assert cli.create("s").returncode == 0
    assert cli("alter", "s", "--hold", "public.b").returncode == 0
    tables[0].execute("INSERT INTO b VALUES (7, 7)")
    assert cli("run", "s", "--until-caught-up", "--timeout", "2m").returncode == 0
    tables[0].execute("SELECT pg_drop_replication_slot('s'); INSERT INTO b VALUES (8, 8)")
    tables[1].execute("UPDATE pgsub.control SET skip_lsn = 'F/F', skip_rows = 'whole' WHERE worker = 0")
    planned = valid("reconcile", cli("reconcile", "s", "--dry-run", "--json").stdout)
    assert planned["held_changes_removed"] == [{"table": "public.b", "changes": 1}]
    assert planned["skips_cleared"] == ["F/F"]
    ended = cli("reconcile", "s", "--yes")
    assert ended.returncode == 0, ended.stderr
    assert "1 transaction that should be skipped will no longer be sent" in ended.stderr
    assert 'table "public.b" is held: copying it again releases it' in ended.stderr
    same(tables, "a", "b")
    assert cli.status("s")["subskiplsn"] == "0/0"
    assert tables[1].value("SELECT count(*) FROM pgsub.held_table") == 0
    assert cli("drop", "s", "--yes").returncode == 0


@pytest.mark.long
def test_nothing_is_changed_where_a_table_cannot_be_compared_or_a_publication_is_missing(
    cli: Cli, tables: Tables
) -> None:
    assert cli.create("s").returncode == 0
    tables[0].execute("SELECT pg_drop_replication_slot('s')")
    tables[0].execute("TRUNCATE a")
    one_error(
        cli("reconcile", "s", "--yes"), 3, 'table "public.a" cannot be adopted: the publisher publishes no row of it'
    )
    tables[0].execute("ALTER PUBLICATION p RENAME TO q")
    one_error(cli("reconcile", "s", "--yes"), 3, 'publication "p" does not exist')
    assert tables[0].rows(_SLOTS) == [] and tables[1].value(_NEW_SLOT, "s") is None
    tables[0].execute("ALTER PUBLICATION q RENAME TO p; INSERT INTO a VALUES (1, 'row 1')")
    ended = cli("reconcile", "s", "--yes")
    assert ended.returncode == 0, ended.stderr
    same(tables, "a", "b")
    assert cli("drop", "s", "--yes").returncode == 0


@pytest.mark.long
def test_the_target_is_not_made_equal_to_a_standby_that_lags_behind_it(followed: Followed, subdb: Database) -> None:
    cli = followed.cli
    followed.standby.execute("SELECT pg_wal_replay_pause()")
    followed.primary.execute("INSERT INTO a SELECT generate_series(1, 9)")
    assert cli("run", "s", "--until-caught-up", "--timeout", "2m").returncode == 0
    followed.end_primary()
    one_error(
        cli("reconcile", "s", "--dry-run"), 3, "the publisher is a standby that lacks changes of the subscription"
    )
    assert subdb.value("SELECT count(*) FROM a") == 9


@pytest.mark.long
def test_a_command_that_ends_while_the_primary_restarts_leaves_the_subscription_as_it_was(
    followed: Followed, subdb: Database
) -> None:
    cli, primary = followed.cli, followed.primary
    followed.end_primary()
    ended = cli("reconcile", "s", "--yes", "--timeout", "3s")
    assert ended.returncode == 8, ended.stderr
    assert followed.standby.rows(_SLOTS) == [] and subdb.value(_NEW_SLOT, "s") is None
    primary.server.start()
    primary.execute("INSERT INTO a VALUES (1)")
    ended = cli("run", "s", "--until-caught-up", "--timeout", "2m")
    assert ended.returncode == 0, ended.stderr
    assert subdb.rows("SELECT id FROM a") == [(1,)]


def test_a_launcher_that_applies_meanwhile_is_no_lost_slot(stuck: MakeStuck, monkeypatch: pytest.MonkeyPatch) -> None:
    it = stuck()
    assert it.apply("INSERT INTO b VALUES (1, 1)") is None
    state = slots.slot_state

    def applied_meanwhile(source: publisher.Connection, name: str) -> slots.SlotState | None:
        monkeypatch.setattr(slots, "slot_state", state)
        it.pubdb.execute("INSERT INTO a SELECT max(id) + 1, 'x' FROM a")
        assert it.apply() is None
        return state(source, name)

    monkeypatch.setattr(diagnosis.slots, "slot_state", applied_meanwhile)
    one_error(it.run("reconcile", "s", "--dry-run"), 3, "has all that subscription")
