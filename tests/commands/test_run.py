"""``run`` alone: its bounds, its signals, its exit codes, and errors that are forgotten once they are overcome."""

from __future__ import annotations

import contextlib
import signal
import time

import patience
import pytest
from fix_program import one_error, until
from thorough import long, only_thorough, thorough

from pgsub.publisher import connect as publisher
from pgsub.publisher.stream import walsender

_POSITION = "SELECT pg_current_wal_flush_lsn()"


def test_a_bounded_run_ends_with_0_when_everything_until_then_is_applied(cli, tables):
    pubdb, subdb = tables
    assert cli.create("s", "--no-copy-data", "--no-wait").returncode == 0
    pubdb.execute("INSERT INTO b SELECT g, g FROM generate_series(1, 10) g")
    position = pubdb.value(_POSITION)
    pubdb.execute("INSERT INTO b VALUES (11, 11)")
    ended = cli("run", "s", "--until-lsn", position)
    assert ended.returncode == 0, ended.stderr
    assert subdb.value("SELECT count(*) FROM b") == 10
    ended = cli("run", "--until-caught-up")
    assert ended.returncode == 0, ended.stderr
    assert subdb.value("SELECT count(*) FROM b") == 11
    assert cli.status()["state"] == "stopped"
    confirmed = "SELECT confirmed_flush_lsn >= %s::pg_lsn FROM pg_replication_slots WHERE slot_name = 's'"
    assert pubdb.value(confirmed, position)


def test_create_serves_its_tables_until_all_have_caught_up_and_then_says_that_nobody_does(cli, tables):
    pubdb, subdb = tables
    ended = cli.create("s")
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert ended.stderr.splitlines()[-4:] == [
        "synchronized 2 of 2 tables",
        'NOTICE:  subscription "s" is ready, but nothing is running it',
        "HINT:  Start it with:",
        "pgsub run s",
    ]
    assert subdb.rows("SELECT count(*), count(DISTINCT t) FROM a") == [(100, 100)]
    slots = "SELECT string_agg(concat(slot_name, active), ' ') FROM pg_replication_slots WHERE database = %s"
    pubdb.wait(slots, pubdb.name, value="sf")  # its walsender has still to notice


@pytest.mark.long
def test_a_table_that_fails_for_good_ends_create_with_6_after_the_others_and_the_subscription_stays(cli, tables):
    pubdb, subdb = tables
    subdb.execute("INSERT INTO a VALUES (1, 'local')")
    pubdb.execute("INSERT INTO b VALUES (1, 1)")
    ended = cli.create("s", "--timeout", "2m")
    assert ended.returncode == 6, ended.stderr
    assert 'duplicate key value violates unique constraint "a_pkey"' in ended.stderr
    assert cli.states()["b"] == "r"
    assert subdb.value("SELECT count(*) FROM b") == 1
    assert subdb.rows("SELECT id, t FROM a") == [(1, "local")]
    assert cli.status()["last_error"]["relation"] == "public.a"


@pytest.mark.long
@pytest.mark.own_spark  # a run that ends while Spark starts takes its JVM along
def test_a_run_that_does_not_catch_up_in_time_ends_with_8_and_names_what_is_missing(cli, tables):
    pubdb, _ = tables
    assert cli.create("s", "--no-copy-data", "--no-wait").returncode == 0
    pubdb.execute("INSERT INTO b VALUES (1, 1)")  # what only the consumer that has the slot is sent
    with contextlib.closing(publisher.connect(pubdb.conninfo, application_name="other", replication=True)) as consumer:
        options = walsender.start_options(
            consumer.info.server_version, ["p"], binary=False, streaming="off", origin="any"
        )
        walsender.WalSender(consumer).start("s", 0, options)
        said = one_error(
            cli("run", "--until-caught-up", "--timeout", "1s"), 8, "did not reach its goal in time", hint=False
        )
        assert "Not finished: s." in said
    pubdb.wait("SELECT active FROM pg_replication_slots WHERE slot_name = 's'", value=False)
    assert cli("run", "--until-caught-up", "--timeout", "2m").returncode == 0


@pytest.mark.long
@pytest.mark.own_spark
def test_a_worker_whose_slot_another_host_still_has_has_not_recovered_before_it_streams(cli, tables):
    pubdb, _ = tables
    assert cli.create("s", "--no-copy-data", "--no-wait").returncode == 0
    with contextlib.closing(publisher.connect(pubdb.conninfo, application_name="other", replication=True)) as consumer:
        options = walsender.start_options(
            consumer.info.server_version, ["p"], binary=False, streaming="off", origin="any"
        )
        walsender.WalSender(consumer).start("s", 0, options)
        running = cli.start("run", "s", env={"PGSUB_RETRY_SECONDS": "0.5"})
        until(lambda: running.log.read_text().count("is active for PID") >= 3)
        assert "has recovered" not in running.log.read_text()
        assert cli.sql("SELECT attempts >= 3 FROM pgsub_error") == [(1,)]
    assert cli("wait", "s", "--for", "caught-up", "--timeout", "2m").returncode == 0
    until(lambda: "has recovered from an error" in running.log.read_text())
    assert cli.stop(running) == 0
    assert running.log.read_text().count("has recovered") == 1


@pytest.mark.long
def test_a_second_launcher_ends_with_9_and_says_who_is_the_first(cli, tables):
    assert cli.create("s", "--no-copy-data", "--no-wait").returncode == 0
    running = cli.launcher()
    tables[0].wait("SELECT active FROM pg_replication_slots WHERE slot_name = 's'")
    who = f"The lock is held by pid {running.pid} "
    said = one_error(cli("run"), 9, "this state folder is in use by another process", who)
    assert said.splitlines()[-1] == "pgsub status" and "kill" not in said
    one_error(cli("run", "s"), 9, 'subscription "s" is in use by another process', who)
    one_error(cli("run", "--until-caught-up"), 9, 'subscription "s" is in use by another process', who)
    assert cli("drop", "s", "--yes").returncode == 0
    assert cli.stop(running) == 0


@pytest.mark.long
def test_a_create_that_only_watches_ends_with_3_when_the_launcher_is_gone(cli, tables):
    _, subdb = tables
    blocker = subdb.connect()
    blocker.execute("BEGIN")
    blocker.execute("LOCK TABLE a IN SHARE MODE")
    running = cli.launcher()
    creating = cli.start(*cli.words("s"))
    subdb.wait("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation = 'a'::regclass")
    running.kill()
    assert creating.wait(patience.SECONDS) == 3
    said = creating.log.read_text()
    assert 'pgsub: error: the pgsub run that served subscription "s" has ended\n' in said
    assert said.splitlines()[-1] == "pgsub run s"
    assert cli.sql("SELECT subname FROM pg_subscription") == [("s",)]
    blocker.close()


@pytest.mark.long
def test_a_disabled_subscription_is_not_waited_for(cli, tables):
    assert cli.create("s", "--no-enabled").returncode == 0
    said = one_error(cli("run", "s", "--until-caught-up"), 3, 'subscription "s" is disabled')
    assert said.splitlines()[-1].endswith("pgsub enable s")


@pytest.mark.long
def test_a_bounded_run_of_all_does_not_end_with_0_while_an_error_keeps_one_disabled(cli, tables):
    pubdb, subdb = tables
    assert cli.create("s", "--no-copy-data", "--no-wait", "--disable-on-error").returncode == 0
    subdb.execute("INSERT INTO b VALUES (7, 7)")
    pubdb.execute("INSERT INTO b VALUES (7, 8)")
    bounded = ("run", "--until-caught-up", "--timeout", "2m")
    assert cli(*bounded).returncode == 6
    one_error(cli(*bounded), 3, 'subscription "s" is disabled', "pgsub enable s")
    assert cli.create("other", "--no-copy-data", "--no-wait").returncode == 0
    pubdb.execute("INSERT INTO a VALUES (500, 'x')")
    ended = cli(*bounded)
    assert ended.returncode == 3, ended.stderr
    assert ended.stderr.endswith(
        'pgsub: error: subscription "s" is disabled\nHINT:  Enable it first:\npgsub enable s\n'
    )
    assert subdb.value("SELECT count(*) FROM a WHERE id = 500") == 1  # the other one was served
    assert cli("enable", "s").returncode == cli("disable", "s").returncode == 0
    ended = cli(*bounded)
    assert ended.returncode == 0, ended.stderr
    assert 'WARNING:  subscription "s" was not served, because it is disabled' in ended.stderr


@pytest.mark.long
@pytest.mark.parametrize("words", [("run", "--until-caught-up"), ("run", "s", "--until-lsn", "FFFFFF/0"), ("create",)])
def test_a_subscription_that_is_disabled_meanwhile_has_not_reached_the_bound(cli, tables, words):
    blocker = tables[1].connect()
    blocker.execute("BEGIN; LOCK TABLE a IN SHARE MODE")
    if words == ("create",):
        running = cli.start(*cli.words("s"))
    else:
        assert cli.create("s", "--no-wait").returncode == 0
        running = cli.start(*words)
    tables[1].wait("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation = 'a'::regclass")
    assert cli("disable", "s").returncode == 0
    assert running.wait(patience.SECONDS) == 3
    blocker.close()
    assert 'subscription "s" is disabled' in running.log.read_text()


@pytest.mark.own_spark  # whose worker ends with a launcher that ends at once, before it could ask it to
@pytest.mark.parametrize(
    "numbers",
    [[signal.SIGTERM], *long([[signal.SIGINT, signal.SIGINT]]), *thorough([[signal.SIGTERM, signal.SIGTERM]])],
)
def test_the_first_signal_ends_a_run_with_0_and_the_second_at_once(cli, tables, numbers):
    pubdb, subdb = tables
    assert cli.create("s", "--no-copy-data", "--no-wait").returncode == 0
    pubdb.execute("INSERT INTO b SELECT g, g FROM generate_series(1, 10) g")
    subid = subdb.value("SELECT subid FROM pgsub.subscription")
    blocker = subdb.connect()
    if len(numbers) == 2:
        blocker.execute("BEGIN")
        blocker.execute("LOCK TABLE b IN SHARE MODE")
    running = cli.launcher()
    if len(numbers) == 2:
        subdb.wait("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation = 'b'::regclass")
    else:
        subdb.wait("SELECT count(*) FROM b", value=10)
    running.send_signal(signal.SIGHUP)  # logrotate's and systemctl reload's
    until(lambda: "NOTICE:  received SIGHUP" in running.log.read_text())
    running.send_signal(numbers[0])
    until(lambda: "NOTICE:  stopping; a second signal ends the process at once\n" in running.log.read_text())
    for number in numbers[1:]:
        running.send_signal(number)
    assert running.wait(patience.SECONDS) == (128 + numbers[1] if len(numbers) == 2 else 0)
    blocker.close()
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s"
    subdb.wait(sessions, f"pgsub {subid} %", value=0)
    pubdb.wait("SELECT active FROM pg_replication_slots WHERE slot_name = 's'", value=False)
    assert subdb.value("SELECT count(*) FROM b") in ((0, 10) if len(numbers) == 2 else (10,))


@pytest.mark.long
def test_stored_errors_are_forgotten_when_another_launcher_gets_past_them(cli, tables):
    pubdb, subdb = tables
    assert cli.create("s", "--no-copy-data", "--no-wait").returncode == 0
    subdb.execute("UPDATE pgsub.subscription_rel SET srsubstate = 'i' WHERE relname = 'a'")
    subdb.execute("INSERT INTO a VALUES (1, 'local'); INSERT INTO b VALUES (1, 1)")
    pubdb.execute("INSERT INTO b VALUES (1, 2)")
    running = cli.launcher()
    until(lambda: len(cli.sql("SELECT worker FROM pgsub_error")) == 2)
    seen = cli.status()
    assert (seen["state"], seen["last_error"]["class"]) == ("error", "ApplyError")
    assert cli("status", "--check").returncode == 6
    assert cli.stop(running) == 0
    assert len(cli.sql("SELECT worker FROM pgsub_error")) == 2
    subdb.execute("DELETE FROM a; DELETE FROM b")
    running = cli.launcher()
    until(lambda: cli.sql("SELECT worker FROM pgsub_error") == [])
    until(lambda: cli.states() == {"a": "r", "b": "r"})
    seen = cli.status()
    assert (seen["state"], seen["last_error"]) == ("running", None)
    assert seen["stats"]["apply_error_count"] >= 1 and seen["stats"]["sync_table_error_count"] >= 1
    assert cli.stop(running) == 0
    assert subdb.rows("SELECT id, n FROM b") == [(1, 2)]


@only_thorough
def test_from_the_start_of_a_run_to_the_first_change_on_the_target(cli, tables, capfd):
    pubdb, subdb = tables
    assert cli.create("s", "--no-copy-data", "--no-wait").returncode == 0
    pubdb.execute("INSERT INTO b VALUES (1, 1)")
    begin = time.monotonic()
    running = cli.start("run")
    subdb.wait("SELECT count(*) FROM b", value=1)
    seconds = time.monotonic() - begin
    assert cli.stop(running) == 0
    with capfd.disabled():
        print(f"\nstart of pgsub run to the first applied change: {seconds:.1f} s")
