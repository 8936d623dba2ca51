"""One launcher serves the state folder, while other commands create, disable, enable, drop and look."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import patience
import pytest
from fix_program import Cli, nothing_created, one_error, until

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    """A program whose ``run`` stays, first without any subscription; SIGTERM ends it with 0."""
    base = tmp_path_factory.mktemp("serving")
    cli = Cli(base / "state", base, "", "")
    cli.environment["PGSERVICEFILE"] = str(base / "pg_service.conf")
    cli.running = cli.launcher()
    yield cli
    assert cli.running.poll() is None, cli.running.log.read_text()
    assert cli.stop(cli.running) == 0
    cli.close()


@pytest.fixture
def served(serving, tables):
    """The program with its launcher between the test's databases, and the name of a subscription dropped at the end."""
    serving.connection, serving.target = (database.conninfo for database in tables)
    name = f"s{next(_numbers)}"
    yield serving, name
    assert serving("drop", name, "--if-exists", "--yes").returncode == 0
    slots = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
    assert tables[0].rows(slots) == []


@pytest.fixture
def synchronized(served, tables):
    """As ``served``, with the subscription created and synchronized."""
    cli, name = served
    assert cli.create(name, "--no-wait").returncode == 0
    assert cli("wait", name, "--for", "synced", "--timeout", "2m").returncode == 0
    return served


@pytest.mark.long
def test_a_run_without_subscriptions_stays_and_serves_what_is_created_later(served, tables):
    cli, name = served
    assert cli.running.poll() is None
    ended = cli.create(name, "--no-wait")
    assert ended.returncode == 0
    assert "not served" not in ended.stderr
    ended = cli("wait", name, "--for", "caught-up", "--timeout", "2m")
    assert ended.returncode == 0, ended.stderr
    assert tables[1].rows("SELECT count(*), min(t), max(t) FROM a") == [(100, "row 1", "row 99")]
    log = cli.running.log.read_text()
    assert f'LOG:  logical replication apply worker for subscription "{name}" has started\n' in log
    assert f'table synchronization worker for subscription "{name}", table "a" has finished\n' in log


@pytest.mark.long
def test_create_leaves_the_work_to_the_launcher_and_watches(synchronized, tables):
    cli, name = synchronized
    jvm = (cli.state / "run" / "jvm.pid").read_text()
    assert cli("drop", name, "--yes").returncode == 0
    tables[1].execute("TRUNCATE a, b")
    ended = cli.create(name)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.splitlines()[-1] == "synchronized 2 of 2 tables"
    assert tables[1].value("SELECT count(*) FROM a") == 100
    assert (cli.state / "run" / "jvm.pid").read_text() == jvm
    seen = cli.status(name)
    assert seen["state"] == "running"
    assert cli.sql("SELECT pid FROM pgsub_server WHERE subid = ?", seen["oid"]) == [(cli.running.pid,)]


@pytest.mark.long
def test_a_create_that_watches_ends_with_its_timeout_or_with_the_error_of_the_table(served, tables):
    cli, name = served
    tables[1].execute("INSERT INTO a VALUES (1, 'local')")
    one_error(cli.create(name, "--timeout", "60s"), 6, "duplicate key value violates unique constraint", hint=False)
    assert cli.states()["b"] in "idfsr"
    assert cli.sql("SELECT subname FROM pg_subscription") == [(name,)]


@pytest.mark.long
def test_messages_come_into_the_log_of_the_launcher_once_they_are_asked_for(synchronized, tables):
    cli, name = synchronized
    pubdb, subdb = tables
    emit = "BEGIN; INSERT INTO b VALUES ({0}, {0}); SELECT pg_logical_emit_message(true, 'audit', '{1}'); COMMIT"
    pubdb.execute(emit.format(1, "not asked for"))
    subdb.wait("SELECT count(*) FROM b", value=1)
    assert cli.status(name)["pgsub_messages"] is False
    assert cli("alter", name, "--messages").stderr == ""
    until(lambda: cli.running.log.read_text().count(f'apply worker for subscription "{name}" has started') == 2)
    pubdb.execute(emit.format(2, "asked for"))
    subdb.wait("SELECT count(*) FROM b", value=2)
    subdb.wait("SELECT count(*) FROM pgsub.event", value=0)
    log = cli.running.log.read_text()
    assert log.count('LOG:  logical decoding message "audit": asked for\n') == 1
    assert log.count("logical decoding message") == 1
    assert f'"{name}" will restart because of a parameter change\n' in log
    assert cli.status(name)["pgsub_messages"] is True


@pytest.mark.long
def test_disable_ends_the_workers_and_enable_starts_them_again(synchronized, tables):
    cli, name = synchronized
    pubdb, subdb = tables
    active = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
    assert cli("disable", name).returncode == 0
    assert cli("wait", name, "--for", "disabled", "--timeout", "1m").returncode == 0
    pubdb.wait(active, name, value=False)
    assert f'"{name}" will stop because the subscription was disabled\n' in cli.running.log.read_text()
    assert cli.status(name)["workers"] == []
    assert cli("disable", name).stderr == f'NOTICE:  subscription "{name}" is already disabled\n'
    assert cli("status", name, "--check").returncode == 3
    pubdb.execute("INSERT INTO b VALUES (1, 1)")
    ended = cli("enable", name)
    assert (ended.returncode, ended.stderr) == (0, "")
    subdb.wait("SELECT count(*) FROM b", value=1)
    assert cli("enable", name).stderr == f'NOTICE:  subscription "{name}" is already enabled\n'
    assert [row[0] for row in cli.sql("SELECT action FROM pgsub_journal WHERE subname = ? ORDER BY id", name)] == [
        "create",
        "disable",
        "enable",
    ]


@pytest.mark.long
def test_status_shows_the_worker_that_lives_and_every_program_may_read_the_store(synchronized, tables):
    cli, name = synchronized
    pubdb, subdb = tables
    for number in range(1, 6):
        pubdb.execute("INSERT INTO b VALUES (%s, 0)", number)
        until(lambda number=number: subdb.value("SELECT count(*) FROM b") == number)
        assert set(cli.states().values()) == {"r"}
    position = pubdb.value("SELECT pg_current_wal_flush_lsn()")
    assert cli("wait", name, "--for", f"lsn={position}", "--timeout", "1m").returncode == 0

    def settled():
        seen = cli.status(name)
        return seen if seen["slot"] and seen["workers"] and seen["origin"]["remote_lsn"] != "0/0" else None

    def told(row):  # by the worker, a moment after the ledger
        reached = "SELECT %s::pg_lsn >= %s::pg_lsn"
        return all(pubdb.value(reached, row[column], position) for column in ("received_lsn", "latest_end_lsn"))

    until(lambda: told(until(settled)["workers"][0]))
    seen = settled()
    (worker,) = seen["workers"]
    assert (seen["state"], seen["last_error"], worker["worker_type"]) == ("running", None, "apply")
    os.kill(worker["pid"], 0)
    assert worker["last_msg_send_time"] <= worker["last_msg_receipt_time"]
    assert seen["subdbid"] == subdb.value("SELECT oid::bigint FROM pg_database WHERE datname = current_database()")
    assert {row["srrelid"] for row in seen["relations"]} == {
        oid for (oid,) in subdb.rows("SELECT oid::bigint FROM pg_class WHERE relname IN ('a', 'b')")
    }
    assert (seen["slot"]["slot_name"], seen["slot"]["plugin"]) == (name, "pgoutput")
    views = [row[0] for row in cli.sql("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")]
    for view in ("pg_subscription", "pg_subscription_rel", "pg_replication_origin_status", "pg_stat_subscription"):
        assert view in views
        assert cli("status", "--view", view, "--json").returncode == 0
    assert cli("status", name, "--check", "--max-lag", "1h").returncode == 0
    shown = pubdb.rows("SELECT state FROM pg_stat_replication WHERE application_name = %s", name)
    assert shown == [("streaming",)]


def test_drop_takes_a_subscription_from_its_launcher(synchronized, tables):
    cli, name = synchronized
    ended = cli("drop", name, "--yes")
    assert ended.returncode == 0
    assert ended.stderr.startswith(f'NOTICE:  dropped replication slot "{name}" on publisher\n')
    nothing_created(cli, *tables)
    assert tables[1].value("SELECT count(*) FROM a") == 100
    assert cli.running.poll() is None
    log = cli.running.log.read_text()
    assert f'LOG:  serving subscription "{name}"\n' in log
    worker = f'LOG:  logical replication worker for subscription "{name}" will stop because the subscription'
    assert f"{worker} is being dropped\n" in log and f"{worker} was" not in log


@pytest.mark.long
def test_a_drop_that_fails_gives_the_subscription_back_to_its_launcher(served, tables, tmp_path):
    cli, name = served
    pubdb, subdb = tables
    service = f"[{name}]\nhost=127.0.0.1\nport={{}}\ndbname={pubdb.name}\nuser=postgres\n"
    Path(cli.environment["PGSERVICEFILE"]).write_text(service.format(pubdb.server.port))
    cli.connection = f"service={name}"
    assert cli.create(name).returncode == 0
    elsewhere = tmp_path / "pg_service.conf"
    elsewhere.write_text(service.format(1))
    one_error(
        cli("drop", name, "--yes", env={"PGSERVICEFILE": str(elsewhere)}), 4, "attempting to drop replication slot"
    )
    assert cli.status(name)["subenabled"] is True
    pubdb.execute("INSERT INTO b VALUES (1, 1)")
    subdb.wait("SELECT count(*) FROM b", value=1)


@pytest.mark.long
def test_to_disable_takes_no_answer_of_a_target_that_is_silent(cli, tables, proxy):
    between = proxy(tables[1].conninfo)
    cli.target = between.conninfo
    launcher = cli.launcher()
    assert cli.create("s", "--no-wait").returncode == 0
    assert cli("wait", "s", "--for", "caught-up", "--timeout", "2m").returncode == 0
    between.stall()
    assert cli("disable", "s").returncode == 0
    ended = cli("wait", "s", "--for", "disabled", "--timeout", "45s")
    assert ended.returncode == 0, ended.stderr
    between.resume()
    assert cli("enable", "s").returncode == 0
    tables[0].execute("INSERT INTO b VALUES (1, 1)")
    tables[1].wait("SELECT count(*) FROM b", value=1)
    between.stall()
    assert cli.stop(launcher) == 0


@pytest.mark.long
def test_a_launcher_serves_on_while_the_target_is_down_and_says_that_it_has_recovered(cli, tables, proxy):
    between = proxy(tables[1].conninfo)
    cli.target = between.conninfo
    assert cli.create("s", "--no-wait").returncode == 0
    launcher = cli.start("run", "s", env={"PGSUB_RETRY_SECONDS": "0.5"})
    assert cli("wait", "s", "--for", "caught-up", "--timeout", "2m").returncode == 0
    between.harm = lambda link, data: "swallow"
    between.cut()
    until(lambda: cli.sql("SELECT 1 FROM pgsub_error WHERE attempts >= 2"))
    tables[0].execute("INSERT INTO b VALUES (1, 1)")
    ended = cli("wait", "s", "--for", "caught-up", "--timeout", "300ms")
    assert (ended.returncode, "Last error: " in ended.stderr) == (8, True), ended.stderr
    assert "No pgsub run serves" not in ended.stderr
    assert 'pgsub_subscription_served{subscription="s"} 1' in cli("metrics").stdout
    shown = cli.status()
    assert (shown["state"], shown["workers"]) == ("error", [])
    recovered = 'LOG:  logical replication apply worker for subscription "s" has recovered from an error\n'
    assert recovered not in launcher.log.read_text()
    between.harm = lambda link, data: "none"
    assert cli("wait", "s", "--for", "caught-up", "--timeout", "2m").returncode == 0
    assert launcher.log.read_text().count(recovered) == 1
    assert cli.stop(launcher) == 0


@pytest.mark.long
def test_who_mends_and_starts_may_wait_at_once(cli, tables):
    tables[1].execute("INSERT INTO a VALUES (1, 'local')")
    assert cli.create("s", "--no-wait").returncode == 0
    launcher = cli.launcher()
    assert cli("wait", "s", "--for", "error", "--timeout", "2m").returncode == 0
    assert cli.stop(launcher) == 0
    tables[1].execute("DELETE FROM a")
    waiting = cli.start("wait", "s", "--for", "synced", "--timeout", "2m")
    launcher = cli.launcher()
    assert waiting.wait(patience.SECONDS) == 0, waiting.log.read_text()
    assert cli.stop(launcher) == 0
