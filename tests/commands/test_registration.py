"""How a subscription comes to be, and that what fails or is killed on the way leaves nothing."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
import threading

import patience
import pytest
from fix_program import nothing_created, one_error, until

_SLOTS = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database() ORDER BY 1"


def _ledger(subdb):
    return subdb.rows("SELECT subname, slot_name, slot_intent FROM pgsub.subscription ORDER BY subid")


@pytest.mark.long
def test_what_create_registers_is_the_same_in_ledger_slot_and_state_store(cli, tables):
    pubdb, subdb = tables
    ended = cli.create("s", "--no-wait")
    assert ended.returncode == 0 and ended.stdout == ""
    assert ended.stderr.splitlines() == [
        'NOTICE:  created replication slot "s" on publisher',
        'NOTICE:  subscription "s" is ready, but nothing is running it',
        "HINT:  Start it with:",
        "pgsub run s",
    ]
    assert pubdb.rows(_SLOTS) == [("s",)]
    assert _ledger(subdb) == [("s", "s", False)]
    assert subdb.rows("SELECT relname, srsubstate::text FROM pgsub.subscription_rel ORDER BY 1") == [
        ("a", "i"),
        ("b", "i"),
    ]
    assert cli.states() == {"a": "i", "b": "i"}
    system = pubdb.value("SELECT system_identifier::text FROM pg_control_system()")
    row = "SELECT system_identifier, publisher_dbname, consistent_point IS NOT NULL FROM pgsub.subscription"
    assert subdb.rows(row) == [(system, pubdb.name, True)]
    seen = cli.status()
    assert (seen["subslotname"], seen["subenabled"], seen["state"], seen["workers"]) == ("s", True, "stopped", [])
    assert [row[0] for row in cli.sql("SELECT action FROM pgsub_journal")] == ["create"]


@pytest.mark.long
def test_no_connect_warns_like_the_server_and_touches_no_publisher(cli, tables):
    pubdb, subdb = tables
    cli.connection = "host=127.0.0.1 port=1 dbname=app user=repl"
    ended = cli.create("s", "--no-connect")
    assert ended.returncode == 0
    assert ended.stderr.splitlines() == [
        "pgsub: warning: subscription was created, but is not connected",
        "HINT:  To initiate replication, you must manually create the replication slot, enable the subscription, and"
        " refresh the subscription.",
    ]
    assert pubdb.rows(_SLOTS) == []
    assert _ledger(subdb) == [("s", "s", False)]
    seen = cli.status()
    assert (seen["subslotname"], seen["subenabled"], seen["state"], seen["relations"]) == ("s", False, "disabled", [])


@pytest.mark.long
def test_no_enabled_registers_a_disabled_subscription_with_its_slot(cli, tables):
    ended = cli.create("s", "--no-enabled")
    assert ended.returncode == 0
    assert "not served" not in ended.stderr
    assert cli.status()["state"] == "disabled"
    assert tables[0].rows(_SLOTS) == [("s",)]
    assert cli.states() == {"a": "i", "b": "i"}


@pytest.mark.long
def test_without_copy_data_tables_are_ready_at_once(cli, tables):
    assert cli.create("s", "--no-copy-data", "--no-wait").returncode == 0
    assert cli.states() == {"a": "r", "b": "r"}
    assert tables[1].rows("SELECT srsubstate::text FROM pgsub.subscription_rel") == [("r",), ("r",)]


@pytest.mark.long
def test_a_subscription_without_a_slot_name_asks_the_publisher_for_tables_only(cli, tables):
    ended = cli.create("s", "--slot-name", "none", "--no-enabled", "--no-create-slot")
    assert ended.returncode == 0, ended.stderr
    assert tables[0].rows(_SLOTS) == []
    assert cli.states() == {"a": "i", "b": "i"}
    one_error(cli("enable", "s"), 3, "cannot enable subscription that does not have a slot name", hint=False)
    assert cli("drop", "s", "--yes").returncode == 0
    nothing_created(cli, *tables)


@pytest.mark.long
@pytest.mark.parametrize("point", ["create.after_ledger", "create.after_slot"])
def test_a_create_that_fails_half_way_undoes_everything(cli, tables, point):
    one_error(cli.create("s", env={"PGSUB_FAILPOINTS": f"{point}=error"}), 5, f"failpoint {point}", hint=False)
    nothing_created(cli, *tables)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_create_that_is_interrupted_undoes_everything(cli, tables, tmp_path, number):
    reached = tmp_path / "reached"
    reached.mkdir()
    variables = {"PGSUB_FAILPOINTS": "create.after_slot=sleep:60", "PGSUB_FAILPOINTS_DIR": str(reached)}
    creating = cli.start(*cli.words("s"), env=variables)
    until(lambda: (reached / "create.after_slot").exists())
    assert tables[0].rows(_SLOTS) == [("s",)]
    assert cli.stop(creating, number) == (130 if number == signal.SIGINT else -number)
    nothing_created(cli, *tables)


@pytest.mark.long
def test_a_create_whose_state_store_is_locked_by_another_leaves_no_slot(cli, tables, tmp_path):
    pubdb, subdb = tables
    reached = tmp_path / "goes on"
    point = {"PGSUB_FAILPOINTS": f"create.after_slot=pause:{reached}"}
    creating = cli.start("create", *cli.words("s")[1:], "--no-wait", env=point)
    pubdb.wait("SELECT count(*) FROM pg_replication_slots WHERE slot_name = 's' AND confirmed_flush_lsn IS NOT NULL")
    with contextlib.closing(sqlite3.connect(cli.state / "state.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        reached.touch()
        assert creating.wait(patience.SECONDS) == 10
    nothing_created(cli, pubdb, subdb)


@pytest.mark.long
def test_a_create_that_loses_the_publisher_while_the_slot_comes_to_be_says_what_may_be_left(cli, tables, proxy):
    pubdb, subdb = tables
    line = proxy(pubdb.conninfo)
    cli.connection = line.conninfo
    with contextlib.closing(pubdb.connect()) as writer:
        writer.execute("BEGIN; INSERT INTO b VALUES (1, 1)")  # the creation waits for it
        creating = cli.start("create", *cli.words("s")[1:], "--no-wait")
        pubdb.wait("SELECT count(*) FROM pg_replication_slots WHERE slot_name = 's'")
        line.cut()
        assert creating.wait(patience.SECONDS) == 4
        writer.execute("COMMIT")
    assert 'replication slot "s" may have been left on the publisher' in creating.log.read_text()
    assert cli.create("s", "--no-wait").returncode == 0
    assert cli("drop", "s", "--yes").returncode == 0
    nothing_created(cli, pubdb, subdb)


@pytest.mark.long
@pytest.mark.parametrize("point", ["create.after_ledger", "create.after_slot"])
def test_a_create_that_was_killed_is_undone_by_the_next_one_of_the_name_on_a_host_of_any_name(cli, tables, point):
    pubdb, subdb = tables
    cli.target += " password=unused"
    killed = cli.create("s", "--no-wait", env={"PGSUB_FAILPOINTS": f"{point}=kill"})
    assert killed.returncode == -signal.SIGKILL
    assert _ledger(subdb) == [("s", "s", True)]
    assert pubdb.rows(_SLOTS) == ([("s",)] if point == "create.after_slot" else [])
    # the container is started again, with another host name
    subdb.execute("UPDATE pgsub.subscription SET state_store = 'other' || state_store")
    one_error(cli.create("s", "--no-connect"), 3, 'may have left replication slot "s"')
    assert cli.create("s", "--dry-run").returncode == 0
    assert _ledger(subdb) == [("s", "s", True)]
    ended = cli.create("s", "--no-wait")
    assert ended.returncode == 0, ended.stderr
    assert pubdb.rows(_SLOTS) == [("s",)]
    assert _ledger(subdb) == [("s", "s", False)]
    assert len(cli.sql("SELECT oid FROM pg_subscription")) == 1
    assert len(list(cli.state.glob("passfiles/*"))) == 1
    assert len(list(cli.state.glob("subscription-*.lock"))) == 1


@pytest.mark.long
def test_the_slot_that_was_given_is_never_dropped_by_an_undo(cli, tables):
    pubdb, subdb = tables
    pubdb.execute("SELECT pg_create_logical_replication_slot('mine', 'pgoutput')")
    words = ["--no-wait", "--slot-name", "mine", "--no-create-slot"]
    for action in ("error", "kill"):
        assert cli.create("s", *words, env={"PGSUB_FAILPOINTS": f"create.after_slot={action}"}).returncode != 0
        assert pubdb.rows(_SLOTS) == [("mine",)]
    assert cli.create("s", *words).returncode == 0
    assert pubdb.rows(_SLOTS) == [("mine",)]
    assert _ledger(subdb) == [("s", "mine", False)]


@pytest.mark.long
def test_a_slot_that_somebody_made_in_the_meantime_is_left_to_him(cli, tables, tmp_path):
    pubdb, subdb = tables
    go, reached = tmp_path / "go", tmp_path / "reached"
    reached.mkdir()
    creating = cli.start(
        *cli.words("s"),
        env={"PGSUB_FAILPOINTS": f"create.after_ledger=pause:{go}", "PGSUB_FAILPOINTS_DIR": str(reached)},
    )
    until(lambda: (reached / "create.after_ledger").exists())
    pubdb.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    go.touch()
    assert creating.wait(patience.SECONDS) == 3
    assert 'replication slot "s" already exists' in creating.log.read_text()
    assert pubdb.rows(_SLOTS) == [("s",)]
    assert _ledger(subdb) == []


@pytest.mark.long
def test_a_slot_that_somebody_made_after_a_killed_create_is_left_to_him(cli, tables):
    pubdb, subdb = tables
    assert cli.create("s", "--no-wait", env={"PGSUB_FAILPOINTS": "create.after_ledger=kill"}).returncode < 0
    pubdb.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    for more in ("--dry-run", "--no-wait"):
        one_error(cli.create("s", more), 3, 'replication slot "s" already exists')
        assert pubdb.rows(_SLOTS) == [("s",)]
    pubdb.execute("SELECT pg_drop_replication_slot('s')")
    assert cli.create("s", "--no-wait").returncode == 0
    assert _ledger(subdb) == [("s", "s", False)]


def test_the_slot_of_a_subscription_of_another_state_store_is_not_told_to_be_dropped(cli, tables, make_cli):
    assert cli.create("s", "--no-wait").returncode == 0
    other = make_cli(cli.connection, cli.target)
    said = one_error(
        other.create("s", "--no-wait"), 3, 'slot "s" already exists', 'Subscription "s" of this target', "--state-dir"
    )
    assert "pg_drop_replication_slot" not in said
    assert cli("drop", "s", "--yes").returncode == 0


@pytest.mark.long
def test_an_undo_drops_no_slot_that_was_made_before_its_own_was_asked_for(cli, tables, tmp_path):
    pubdb, subdb = tables
    go, reached = tmp_path / "go", tmp_path / "reached"
    reached.mkdir()
    variables = {"PGSUB_FAILPOINTS": f"create.after_ledger=pause:{go}", "PGSUB_FAILPOINTS_DIR": str(reached)}
    creating = cli.start(*cli.words("s"), env=variables)
    until(lambda: (reached / "create.after_ledger").exists())
    pubdb.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    assert cli.stop(creating, signal.SIGINT) == 130
    assert pubdb.rows(_SLOTS) == [("s",)]
    assert _ledger(subdb) == []


@pytest.mark.long
def test_a_create_does_not_undo_one_of_the_same_name_that_is_at_work(cli, tables, tmp_path):
    go, reached = tmp_path / "go", tmp_path / "reached"
    reached.mkdir()
    first = cli.start(
        *cli.words("s", "--no-wait"),
        env={"PGSUB_FAILPOINTS": f"create.after_slot=pause:{go}", "PGSUB_FAILPOINTS_DIR": str(reached)},
    )
    until(lambda: (reached / "create.after_slot").exists())
    one_error(cli.create("s", "--no-wait"), 9, 'subscription "s", which is being created, is in use by another process')
    go.touch()
    assert first.wait(patience.SECONDS) == 0, first.log.read_text()
    assert tables[0].rows(_SLOTS) == [("s",)]
    assert _ledger(tables[1]) == [("s", "s", False)]


@pytest.mark.long
def test_a_lost_state_store_is_a_diagnosis_and_its_statements_give_the_subscription_up(cli, tables):
    pubdb, subdb = tables
    assert cli.create("s", "--no-wait").returncode == 0
    subdb.execute("UPDATE pgsub.control SET epoch = 1")  # as if its worker had run
    gid = f"pgsub_{subdb.value('SELECT subid FROM pgsub.subscription')}_700_1"
    with subdb.connect() as apply:
        apply.execute("BEGIN; INSERT INTO b VALUES (1, 1)")
        apply.execute("INSERT INTO pgsub.prepared_xact SELECT subid, %s FROM pgsub.subscription", (gid,))
        apply.execute(f"PREPARE TRANSACTION '{gid}'".encode())
    for file in cli.state.glob("state.db*"):
        file.unlink()
    said = one_error(cli.create("s", "--no-wait"), 3, 'has a subscription "s" that this state store has lost')
    assert pubdb.rows(_SLOTS) == [("s",)]
    on_publisher, *on_target = [line for line in said.splitlines() if line.endswith(";")]
    pubdb.execute(on_publisher)
    for statement in on_target:
        subdb.execute(statement)
    assert subdb.value("SELECT count(*) FROM pg_prepared_xacts WHERE gid = %s", gid) == 0
    assert cli.create("s", "--no-wait").returncode == 0


def test_the_timeout_holds_while_the_publisher_waits_for_older_transactions(cli, tables):
    pubdb, subdb = tables
    with pubdb.connect() as writer:
        writer.execute("BEGIN")
        writer.execute("INSERT INTO a VALUES (1000, 'open')")
        said = one_error(cli.create("s", "--timeout", "1s"), 8, 'timeout while creating replication slot "s"')
        assert f"It waits for the transaction of PID {writer.info.backend_pid}. " in said
        assert said.endswith(f"SELECT pg_terminate_backend({writer.info.backend_pid});\n")
    until(lambda: pubdb.rows(_SLOTS) == [])
    nothing_created(cli, pubdb, subdb)


@pytest.mark.long
def test_a_creation_says_whom_it_waits_for_and_goes_on_when_the_older_transaction_ends(cli, tables):
    pubdb, _ = tables
    writer = pubdb.connect()
    writer.execute("BEGIN")
    writer.execute("INSERT INTO a VALUES (1000, 'open')")

    def commit() -> None:
        seen = f"SELECT count(*) > 0 FROM pg_stat_activity WHERE application_name = 's' AND datname = '{pubdb.name}'"
        pubdb.wait(f"{seen} AND state = 'idle' AND query ~ 'pg_blocking_pids'")
        writer.execute("COMMIT")

    thread = threading.Thread(target=commit)
    thread.start()
    ended = cli.create("s", "--no-wait", "--timeout", "60s")
    thread.join()
    assert ended.returncode == 0, ended.stderr
    waits = 'pgsub: warning: creation of replication slot "s" on the publisher waits for the transaction of PID'
    assert ended.stderr.count(f"{waits} {writer.info.backend_pid}\n") == 1, ended.stderr
    assert "idle in transaction: INSERT INTO a VALUES (1000, 'open')\n" in ended.stderr
    writer.close()


@pytest.mark.long
def test_a_target_that_goes_away_in_between_is_code_5_and_the_next_create_mends_it(cli, tables, tmp_path):
    pubdb, subdb = tables
    go, reached = tmp_path / "go", tmp_path / "reached"
    reached.mkdir()
    creating = cli.start(
        *cli.words("s"),
        env={"PGSUB_FAILPOINTS": f"create.after_slot=pause:{go}", "PGSUB_FAILPOINTS_DIR": str(reached)},
    )
    until(lambda: (reached / "create.after_slot").exists())
    subdb.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE 'pgsub %'"
    )
    go.touch()
    assert creating.wait(patience.SECONDS) == 5
    assert "terminating connection due to administrator command" in creating.log.read_text()
    assert pubdb.rows(_SLOTS) == []
    ended = cli.create("s", "--no-wait")
    assert ended.returncode == 0, ended.stderr
    assert _ledger(subdb) == [("s", "s", False)]


def test_nothing_but_the_owner_may_enter_the_state_folder(cli, tables):
    cli.target += " password=unused"
    assert cli.create("s", "--no-wait").returncode == 0
    assert cli.state.stat().st_mode & 0o777 == 0o700
    for path in cli.state.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.long
def test_a_session_of_the_target_is_named_after_its_subscription(cli, tables, tmp_path):
    go, reached = tmp_path / "go", tmp_path / "reached"
    reached.mkdir()
    creating = cli.start(
        *cli.words("s", "--no-wait"),
        env={"PGSUB_FAILPOINTS": f"create.after_slot=pause:{go}", "PGSUB_FAILPOINTS_DIR": str(reached)},
    )
    until(lambda: (reached / "create.after_slot").exists())
    pubdb, subdb = tables
    subid = subdb.value("SELECT subid FROM pgsub.subscription")
    names = (
        "SELECT application_name FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    assert subdb.rows(names) == [(f"pgsub {subid} launcher 0",)]
    assert set(pubdb.rows(names)) == {("s",)}
    go.touch()
    assert creating.wait(patience.SECONDS) == 0


@pytest.mark.long
def test_creating_without_waiting_loads_no_spark(cli, tables):
    code = (
        "import sys; from pgsub.cli.main import run; code = run(sys.argv[1:]);"
        "sys.exit(code or 'pyspark' in sys.modules or 'py4j' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, *cli.words("s", "--no-wait")], env=cli.environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert cli.sql("SELECT subname FROM pg_subscription") == [("s",)]


@pytest.mark.long
def test_a_slot_is_not_dropped_because_the_ledger_tells_of_a_creation(cli, pubdb, subdb):
    assert cli.create("first", "--no-wait").returncode == 0
    other = f"other_{pubdb.name}"
    pubdb.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", other)
    subdb.execute(
        "INSERT INTO pgsub.subscription (subid, subname, state_store, slot_name, slot_intent)"
        " SELECT 77, 's', state_store, %s, true FROM pgsub.subscription WHERE subname = 'first'",
        other,
    )
    said = one_error(cli.create("s", "--no-wait"), 3, "interrupted creation", other)
    assert said.splitlines()[-1] == "DELETE FROM pgsub.subscription WHERE subid = 77;"
    assert pubdb.value("SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", other) == 1
    assert list(cli.state.glob("creating-*")) == []
