"""The options of CREATE SUBSCRIPTION that leave work for later: refusals as the server's, and the way to the end."""

from __future__ import annotations

import psycopg
import pytest
from fix_program import nothing_created, one_error, until

_SLOTS = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database() ORDER BY 1"
_WORDS = {"true": "--{}", "false": "--no-{}"}


def _command_line(options):
    """``connect = false, slot_name = none`` as words of ``pgsub create``."""
    words = []
    for option in filter(None, options.split(", ")):
        name, value = option.split(" = ")
        name = name.replace("_", "-")
        words += [_WORDS[value].format(name)] if value in _WORDS else [f"--{name}", value.strip("'")]
    return words


def _server_says(database, options, publications="p"):
    """The error of CREATE SUBSCRIPTION with these options."""
    statement = f"CREATE SUBSCRIPTION s CONNECTION 'dbname=nowhere port=1' PUBLICATION {publications} WITH ({options})"
    with pytest.raises(psycopg.Error) as raised:
        database.execute(statement)
    return raised.value.diag.message_primary


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        "connect = false, enabled = true",
        "connect = false, create_slot = true",
        "connect = false, copy_data = true",
        "connect = false, enabled = true, create_slot = true, copy_data = true",
        "connect = false, slot_name = none, enabled = true",
        "connect = false, slot_name = none, create_slot = true",
        "slot_name = none",
        "slot_name = none, enabled = true",
        "slot_name = none, enabled = false",
        "slot_name = none, enabled = true, create_slot = false",
        "slot_name = none, create_slot = false",
        "slot_name = none, enabled = false, create_slot = true",
        "slot_name = none, create_slot = true",
        "slot_name = ''",
        "slot_name = 'Upper'",
        "slot_name = 'a-b'",
        f"slot_name = '{'x' * 64}'",
        "connect = false, slot_name = 'Upper'",
    ],
)
def test_wrong_combinations_are_refused_in_the_words_of_the_server_itself(cli, tables, options):
    said = _server_says(tables[1], options)
    ended = cli.create("s", *_command_line(options))
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[0] == f"pgsub: error: {said}"
    nothing_created(cli, *tables)


@pytest.mark.long
def test_a_publication_named_twice_is_refused_in_the_words_of_the_server_itself(cli, tables):
    said = _server_says(tables[1], "connect = false", "p, p")
    assert cli.create("s", "--publication", "p").stderr.splitlines()[0] == f"pgsub: error: {said}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "slot", "enabled", "states"),
    [
        ("", True, True, "i"),
        ("connect = true, create_slot = true, enabled = true, copy_data = true", True, True, "i"),
        ("copy_data = false", True, True, "r"),
        ("enabled = false", True, False, "i"),
        ("enabled = false, copy_data = false", True, False, "r"),
        ("create_slot = false, enabled = false", False, False, "i"),
        ("slot_name = none, enabled = false, create_slot = false", False, False, "i"),
        ("slot_name = none, enabled = false, create_slot = false, copy_data = false", False, False, "r"),
        ("connect = false", False, False, ""),
        ("connect = false, enabled = false, create_slot = false, copy_data = false", False, False, ""),
        ("connect = false, slot_name = none", False, False, ""),
        ("slot_name = 'other'", True, True, "i"),
    ],
)
def test_what_is_created_is_what_the_server_would_create(cli, tables, options, slot, enabled, states):
    pubdb, subdb = tables
    ended = cli.create("s", "--no-wait", *_command_line(options))
    assert ended.returncode == 0, ended.stderr
    name = None if "none" in options else "other" if "other" in options else "s"
    assert pubdb.rows(_SLOTS) == ([(name,)] if slot else [])
    assert cli.sql("SELECT subslotname, subenabled FROM pg_subscription") == [(name, enabled)]
    assert subdb.rows("SELECT srsubstate::text FROM pgsub.subscription_rel") == [(s,) for s in states * 2]
    assert set(cli.states().values()) == set(states)


def synchronized(cli, tables, name="s"):
    """The subscription is served to its end: what was there and what comes is on the target."""
    pubdb, subdb = tables
    running = cli.start("run", name)
    until(lambda: cli.sql("SELECT 1 FROM pgsub_server"))
    ended = cli("refresh", name, "--timeout", "60s")
    assert ended.returncode == 0, ended.stderr
    pubdb.execute("INSERT INTO b VALUES (1, 1)")
    subdb.wait("SELECT count(*) FROM b", value=1)
    until(lambda: set(cli.states().values()) == {"r"})
    assert subdb.value("SELECT count(*) FROM a") == 100
    assert cli.stop(running) == 0


@pytest.mark.long
def test_without_a_connection_then_a_slot_by_hand_enable_and_refresh(cli, tables):
    pubdb, subdb = tables
    assert cli.create("s", "--no-connect").returncode == 0
    position = pubdb.value("SELECT lsn FROM pg_create_logical_replication_slot('s', 'pgoutput')")
    one_error(cli("refresh", "s"), 3, "is not allowed for disabled subscriptions")
    assert cli("enable", "s").returncode == 0
    synchronized(cli, tables)
    identity = "SELECT system_identifier, publisher_dbname, consistent_point = %s::pg_lsn FROM pgsub.subscription"
    system = pubdb.value("SELECT system_identifier::text FROM pg_control_system()")
    assert subdb.rows(identity, position) == [(system, pubdb.name, True)]
    assert pubdb.rows(_SLOTS) == [("s",)]
    # from now on it is known whom it follows
    other = tables[0].conninfo.replace(f"dbname={pubdb.name}", "dbname=postgres")
    one_error(cli("alter", "s", "--connection", other), 7, "the publisher's database is a different one")
    assert cli("drop", "s", "--yes").returncode == 0
    nothing_created(cli, *tables)


@pytest.mark.long
def test_without_a_slot_name_then_one_that_was_made_later(cli, tables):
    pubdb = tables[0]
    assert cli.create("s", "--slot-name", "none", "--no-enabled", "--no-create-slot").returncode == 0
    pubdb.execute("INSERT INTO a VALUES (101, 'before the slot')")
    pubdb.execute("SELECT pg_create_logical_replication_slot('late', 'pgoutput')")
    pubdb.execute("DELETE FROM a WHERE id = 101")
    assert cli("alter", "s", "--slot-name", "late").returncode == 0
    assert cli("enable", "s").returncode == 0
    synchronized(cli, tables)


@pytest.mark.long
def test_a_slot_that_is_made_after_create_said_not_to(cli, tables):
    assert cli.create("s", "--no-create-slot", "--no-wait").returncode == 0
    said = one_error(cli("run", "s", "--until-caught-up", "--timeout", "60s"), 7, 'replication slot "s" does not exist')
    assert "HINT" in said
    assert cli.sql("SELECT * FROM pgsub_server") == []  # nobody serves it any more
    assert set(cli.states().values()) == {"i"}  # a copy would end before the slot begins
    tables[0].execute("DELETE FROM a WHERE id = 1; INSERT INTO a VALUES (0, 'between')")
    tables[0].execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    synchronized(cli, tables)
    assert tables[1].rows("SELECT id FROM a WHERE id < 3 ORDER BY 1") == [(0,), (2,)]


@pytest.mark.long
def test_a_slot_that_is_made_after_a_table_was_synchronized_is_refused(cli, tables):
    pubdb, subdb = tables
    assert cli.create("s", "--no-create-slot", "--no-wait").returncode == 0
    before = pubdb.value("SELECT pg_current_wal_lsn()")
    subdb.execute("UPDATE pgsub.subscription_rel SET srsubstate = 's', srsublsn = %s WHERE relname = 'a'", before)
    pubdb.execute("DELETE FROM a WHERE id = 1; INSERT INTO a VALUES (0, 'between')")
    pubdb.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    said = one_error(cli("run", "s", "--until-caught-up", "--timeout", "60s"), 7, "is past the subscription's position")
    assert "pgsub reconcile s" in said
    made = cli("reconcile", "s", "--force", "--yes")
    assert made.returncode == 0, made.stderr
    synchronized(cli, tables)


@pytest.mark.long
def test_what_was_written_between_the_slot_and_the_first_connection_is_not_lost(cli, tables):
    pubdb, subdb = tables
    assert cli.create("s", "--no-connect").returncode == 0
    pubdb.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    pubdb.execute("TRUNCATE a")
    assert cli("enable", "s").returncode == 0
    assert cli("refresh", "s", "--no-copy-data", "--no-wait").returncode == 0
    pubdb.execute("INSERT INTO a VALUES (1, 'first'), (2, 'second')")
    ended = cli("run", "s", "--until-caught-up", "--timeout", "60s")
    assert ended.returncode == 0, ended.stderr
    assert subdb.rows("SELECT id FROM a ORDER BY 1") == [(1,), (2,)]
    # and its position is its own from then on: a slot that was made anew is told from it
    pubdb.execute("SELECT pg_drop_replication_slot('s')")
    pubdb.execute("INSERT INTO a VALUES (3, 'lost')")
    pubdb.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    ended = cli("run", "s", "--until-caught-up", "--timeout", "60s")
    one_error(ended, 7, "is past the subscription's position")


@pytest.mark.long
def test_a_slot_of_another_kind_or_database_is_not_adopted(cli, tables):
    pubdb = tables[0]
    assert cli.create("s", "--no-connect").returncode == 0
    pubdb.execute("SELECT pg_create_physical_replication_slot('s')")
    try:
        assert cli("enable", "s").returncode == 0
        ended = cli("run", "s", "--until-caught-up", "--timeout", "60s")
        one_error(ended, 7, 'replication slot "s" cannot be used', hint=False)
        assert tables[1].value("SELECT reported_lsn = '0/0' FROM pgsub.progress WHERE worker = 0")
    finally:
        pubdb.execute("SELECT pg_drop_replication_slot('s')")


@pytest.mark.parametrize("value", ["5m", "-2", "99999999999", "", "1 s 2", "-1ms"])
def test_what_the_server_takes_for_no_timeout_is_none_here(cli, tables, value):
    ended = cli.create("s", f"--wal-receiver-timeout={value}")
    assert ended.returncode == 2
    assert 'parameter "wal_receiver_timeout"' in ended.stderr.splitlines()[0]
    nothing_created(cli, *tables)


@pytest.mark.long
def test_a_timeout_is_kept_as_it_was_given_and_can_be_altered(cli):
    query = "SELECT subwalrcvtimeout FROM pg_subscription"
    assert cli.create("s", "--no-wait", "--no-copy-data").returncode == 0
    assert cli.sql(query) == [("-1",)]
    assert cli("alter", "s", "--wal-receiver-timeout", "1.5min").returncode == 0
    assert cli.sql(query) == [("1.5min",)]
    assert cli("alter", "s", "--wal-receiver-timeout", "-1").returncode == 0
    assert cli.sql(query) == [("-1",)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--retain-dead-tuples"], "retain_dead_tuples is not supported"),
        (["--max-retention-duration", "500"], "max_retention_duration is not supported"),
        (["--server", "elsewhere"], "a subscription cannot take its connection from a foreign server"),
    ],
)
def test_what_only_the_server_can_do_is_refused_with_the_reason(cli, tables, options, reason):
    ended = cli.create("s", *options)
    assert ended.returncode == 3
    first, detail, hint = ended.stderr.splitlines()
    assert first == f"pgsub: error: {reason}"
    assert detail.startswith("DETAIL:") and hint.startswith("HINT:")
    nothing_created(cli, *tables)
    assert cli.create("s", "--no-wait", "--no-retain-dead-tuples", "--max-retention-duration=0").returncode == 0
    assert cli("alter", "s", *options).stderr.startswith(f"pgsub: error: {reason}")
