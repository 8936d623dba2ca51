"""two_phase through the program: what create, refresh, alter and drop make of it, and what they refuse."""

from __future__ import annotations

import json

import pytest
from fix_program import Cli, nothing_created, one_error, valid

from pgsub.catalog.locks import subscription_lock
from pgsub.cli.output.reporting import ConsoleReporter
from pgsub.commands.alter import two_phase
from pgsub.commands.alter.alter import alter
from pgsub.commands.alter.options import AlterOptions
from pgsub.common.errors import StateForbids

_SLOT = "SELECT two_phase FROM pg_replication_slots WHERE slot_name = %s"
_LEDGER = "SELECT two_phase::text FROM pgsub.subscription"
_STORED = "SELECT subtwophasestate FROM pg_subscription"
_PREPARED = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() ORDER BY gid"


@pytest.fixture
def stored(cli):
    """Subscription s with two_phase enabled, both tables ``r``; nobody serves it."""
    ended = cli.create("s", "--two-phase", "--no-copy-data", "--no-wait")
    assert (ended.returncode, ended.stderr.count("warning")) == (0, 0), ended.stderr
    return cli


def prepare(subdb, table="b", number=1, row="700, 1"):
    """What apply leaves of a PREPARE; the gid."""
    gid = f"pgsub_{subdb.value('SELECT subid FROM pgsub.subscription')}_{number}_16B3748"
    with subdb.connect() as session:
        session.execute("BEGIN")
        session.execute(f"INSERT INTO {table} VALUES ({row})")
        session.execute("INSERT INTO pgsub.prepared_xact SELECT subid, %s FROM pgsub.subscription", (gid,))
        session.execute(f"PREPARE TRANSACTION '{gid}'")
    return gid


# create


@pytest.mark.long
def test_create_that_leaves_the_work_to_a_launcher_waits_for_it_too(cli, tables):
    pubdb, subdb = tables
    running = cli.launcher()
    ended = cli.create("s", "--two-phase")
    assert ended.returncode == 0, ended.stderr
    assert subdb.value(_LEDGER) == "e" and pubdb.value(_SLOT, "s") is True
    assert cli.sql(_STORED) == [("e",)]
    worker = "SELECT pid FROM pg_stat_replication WHERE application_name = 's'"
    before = pubdb.value(worker)
    pubdb.execute("CREATE PUBLICATION nothing")  # no table: nothing to wait for
    ended = cli(*cli.words("empty", "--two-phase", publication="nothing"))
    assert ended.returncode == 0, ended.stderr
    assert 'two_phase stays pending for subscription "empty": it has no table' in ended.stderr
    assert pubdb.value(worker) == before  # that the state store follows the ledger is no reason to start again
    assert cli.stop(running) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "state", "slot", "said"),
    [
        ("--two-phase", "p", False, "once every table is synchronized"),
        ("--two-phase --no-copy-data", "e", True, "from the start"),
    ],
)
def test_the_first_state_is_the_servers_and_a_dry_run_tells_it(cli, tables, options, state, slot, said):
    words = options.split()
    ended = cli.create("s", *words, "--dry-run", "--json")
    assert ended.returncode == 0, ended.stderr
    assert valid("plan", ended.stdout)["two_phase"] == state
    assert f"two_phase would be enabled {said}" in ended.stderr
    nothing_created(cli, *tables)
    ended = cli.create("s", *words, "--no-wait")
    assert ended.returncode == 0, ended.stderr
    assert tables[1].value(_LEDGER) == state and cli.sql(_STORED) == [(state,)]
    assert tables[0].value(_SLOT, "s") is slot


@pytest.mark.long
@pytest.mark.parametrize(
    "options", ["--no-connect", "--slot-name none --no-create-slot --no-enabled --no-copy-data", "--no-create-slot"]
)
def test_without_a_slot_of_its_own_making_it_is_pending_at_first(cli, tables, options):
    ended = cli.create("s", "--two-phase", "--no-wait", *options.split())
    assert ended.returncode == 0, ended.stderr
    assert tables[1].value(_LEDGER) == "p" and cli.sql(_STORED) == [("p",)]


@pytest.mark.long
def test_a_target_that_cannot_prepare_is_warned_of_and_stops_at_the_first_prepare(make_cli, own_pair):
    it = own_pair(publisher={"max_prepared_transactions": 5}, target={"max_prepared_transactions": 0})
    for database in (it.pubdb, it.subdb):
        database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    it.pubdb.execute("CREATE PUBLICATION p FOR TABLE a")
    cli: Cli = make_cli(it.pubdb.conninfo, it.subdb.conninfo)
    said = "prepared transactions are disabled on the target"
    for options in ([], ["--no-connect"]):
        error = one_error(cli.create("s", "--two-phase", "--no-wait", "--strict", *options), 3, said)
        assert error.splitlines()[-1].startswith("ALTER SYSTEM SET max_prepared_transactions = ")
    nothing_created(cli, it.pubdb, it.subdb)
    assert cli.create("s", "--no-wait", "--no-enabled", "--no-copy-data").returncode == 0
    one_error(cli("alter", "s", "--two-phase", "--strict"), 3, said)
    assert it.subdb.value(_LEDGER) == "d"
    ended = cli("alter", "s", "--two-phase")
    assert ended.returncode == 0 and f"pgsub: warning: {said}\n" in ended.stderr
    assert it.subdb.value(_LEDGER) == "p" and cli("drop", "s", "--yes").returncode == 0
    ended = cli.create("s", "--two-phase", "--no-copy-data", "--no-wait")
    assert ended.returncode == 0 and f"pgsub: warning: {said}\n" in ended.stderr
    it.pubdb.execute("BEGIN; INSERT INTO a VALUES (1); PREPARE TRANSACTION 'first'")
    error = one_error(cli("run", "--until-caught-up"), 6, "prepared transactions are disabled")
    assert error.splitlines()[-1] == "ALTER SYSTEM SET max_prepared_transactions = 20;"
    assert cli.sql("SELECT apply_error_count FROM pg_stat_subscription_stats") == [(1,)]
    it.target.append_conf({"max_prepared_transactions": 2})
    it.target.restart()
    assert cli("run", "--until-caught-up").returncode == 0
    assert it.subdb.value("SELECT count(*) FROM pg_prepared_xacts") == 1
    it.pubdb.execute("COMMIT PREPARED 'first'")
    assert cli("run", "--until-caught-up").returncode == 0
    assert it.subdb.rows("SELECT id FROM a") == [(1,)]


@pytest.mark.long
@pytest.mark.publishers("15")
def test_a_publisher_that_is_too_old_is_refused_and_any_other_is_taken(cli, tables):
    ended = cli.create("s", "--two-phase", "--no-copy-data", "--no-wait")
    if tables[0].connection.info.server_version < 150000:
        one_error(ended, 3, "two_phase is not available with this publisher")
        nothing_created(cli, *tables)
    else:
        assert ended.returncode == 0, ended.stderr
        assert tables[0].value(_SLOT, "s") is True


@pytest.mark.long
@pytest.mark.publishers("17")
@pytest.mark.since(17)
@pytest.mark.parametrize("before", [(), ("--failover",), ("--two-phase",)], ids=["none", "failover", "two_phase"])
def test_what_a_failover_of_17_may_lose_is_said_before_anything_is_made(cli, tables, before):
    pubdb, subdb = tables
    old, said = pubdb.connection.info.server_version < 180000, "a failover of the publisher may lose transactions"
    both = ("--two-phase", "--failover")
    if before:
        ended = cli.create("s", *before, "--no-copy-data", "--no-wait")
        assert (ended.returncode, said in ended.stderr) == (0, False), ended.stderr
        assert cli("disable", "s").returncode == 0
        words = ("alter", "s", *(set(both) - set(before)))
    else:
        words = cli.words("s", *both, "--no-copy-data", "--no-wait")
    there = f"{_SLOT.replace('two_phase', 'two_phase, failover')}"
    was = pubdb.rows(there, "s")
    if old:
        ended = cli(*words, "--strict")
        assert ended.returncode == 3 and said in ended.stderr, ended.stderr
        assert pubdb.rows(there, "s") == was
    ended = cli(*words)
    assert (ended.returncode, said in ended.stderr) == (0, old), ended.stderr
    assert pubdb.value(_SLOT.replace("two_phase", "failover"), "s") is True
    assert subdb.value(_LEDGER) in "ep"
    assert said not in cli("alter", "s", "--binary").stderr  # nothing that comes together


def test_a_given_slot_must_fit(cli, tables):
    pubdb = tables[0]
    pubdb.execute("SELECT pg_create_logical_replication_slot('mine', 'pgoutput', false, true)")
    given = ("--slot-name", "mine", "--no-create-slot", "--no-wait")
    one_error(cli.create("s", *given), 3, 'replication slot "mine" is two-phase, but the subscription is not')
    said = 'replication slot "mine" is two-phase, but the subscription will not be before every table is synchronized'
    one_error(cli.create("s", *given, "--two-phase"), 3, said)
    ended = cli.create("s", *given, "--two-phase", "--no-copy-data")
    assert ended.returncode == 0, ended.stderr
    assert tables[1].value(_LEDGER) == "p"  # the first worker enables it


# refresh


@pytest.mark.long
def test_a_refresh_that_would_copy_is_refused_in_the_servers_words_and_one_without_copy_is_not(stored, tables):
    pubdb, subdb = tables
    subdb.execute("INSERT INTO a VALUES (1, 'kept')")
    said = "ALTER SUBSCRIPTION ... REFRESH PUBLICATION with copy_data is not allowed when two_phase is enabled"
    for words in ([], ["--dry-run"], ["--no-copy-data", "--resync", "public.a", "--yes"]):
        one_error(stored("refresh", "s", *words), 3, said, "pgsub alter s --no-two-phase")
    said = "ALTER SUBSCRIPTION with refresh and copy_data is not allowed when two_phase is enabled"
    for words in (["--set-publication", "q"], ["--add-publication", "q"]):
        one_error(stored("alter", "s", *words), 3, said)
    assert subdb.value("SELECT count(*) FROM a") == 1
    for database in tables:
        database.execute("CREATE TABLE c (id int PRIMARY KEY)")
    pubdb.execute("CREATE PUBLICATION q FOR TABLE c; ALTER PUBLICATION p DROP TABLE b")
    ended = stored("refresh", "s", "--no-copy-data", "--dry-run", "--json")
    assert json.loads(ended.stdout)["two_phase"] == "e"
    assert stored("refresh", "s", "--no-copy-data", "--no-wait").returncode == 0
    ended = stored("alter", "s", "--add-publication", "q", "--no-copy-data", "--no-wait")
    assert ended.returncode == 0, ended.stderr
    assert stored.states() == {"a": "r", "c": "r"}
    assert subdb.value(_LEDGER) == "e"


# alter


def test_it_is_disabled_and_enabled_again_where_nothing_is_prepared(stored, tables):
    pubdb, subdb = tables
    one_error(stored("alter", "s", "--no-two-phase"), 3, 'cannot set option "two_phase" for enabled subscription')
    assert stored("alter", "s", "--two-phase").stderr == ""  # it is
    assert stored("disable", "s").returncode == 0
    gid = prepare(subdb)
    said = one_error(stored("alter", "s", "--no-two-phase"), 3, 'cannot disable "two_phase" when prepared transactions')
    assert gid in said
    assert pubdb.value(_SLOT, "s") is True and subdb.value(_LEDGER) == "e"
    subdb.execute(f"COMMIT PREPARED '{gid}'")
    said = '"slot_name" and "two_phase" cannot be altered at the same time'
    one_error(stored("alter", "s", "--no-two-phase", "--slot-name", "other"), 3, said)
    assert stored("alter", "s", "--no-two-phase", "--binary").stderr == ""
    assert pubdb.value(_SLOT, "s") is False and subdb.value(_LEDGER) == "d"
    assert stored.sql("SELECT subtwophasestate, subbinary FROM pg_subscription") == [("d", 1)]
    assert stored("alter", "s", "--no-two-phase").returncode == 0  # again
    assert stored("alter", "s", "--two-phase").stderr == ""
    assert pubdb.value(_SLOT, "s") is False and subdb.value(_LEDGER) == "p" and stored.sql(_STORED) == [("p",)]


@pytest.mark.long
@pytest.mark.publishers("15")
@pytest.mark.since(15)
def test_a_slot_that_cannot_be_altered_keeps_the_subscription_as_it_is(stored, tables):
    pubdb, subdb = tables
    assert stored("disable", "s").returncode == 0
    ended = stored("alter", "s", "--no-two-phase")
    if pubdb.connection.info.server_version >= 180000:
        assert ended.returncode == 0 and pubdb.value(_SLOT, "s") is False
        return
    one_error(ended, 3, 'two_phase of replication slot "s" cannot be disabled by this publisher')
    assert pubdb.value(_SLOT, "s") is True and subdb.value(_LEDGER) == "e" and stored.sql(_STORED) == [("e",)]


@pytest.mark.long
def test_it_is_not_altered_while_a_worker_runs(stored, tables, monkeypatch):
    assert stored("disable", "s").returncode == 0
    monkeypatch.setattr(two_phase, "LET_GO_SECONDS", 0.2)
    lock = subscription_lock(stored.state, tables[1].value("SELECT subid FROM pgsub.subscription"))
    assert lock.acquire()
    for wanted in (True, False):
        with pytest.raises(StateForbids, match='cannot alter "two_phase" when logical replication worker is still'):
            alter(AlterOptions("s", stored.state, two_phase=wanted), reporter=ConsoleReporter())
    lock.release()
    assert tables[1].value(_LEDGER) == "e"


# drop


@pytest.mark.long
@pytest.mark.parametrize("options", [[], ["--keep-slot"]])
def test_drop_rolls_back_what_is_prepared_names_it_and_leaves_that_of_others(stored, tables, options):
    subdb = tables[1]
    gids = [prepare(subdb, number=number, row=f"{number}, 1") for number in (1, 2)]
    other = gids[0].replace("pgsub_", "pgsub_9", 1)
    with subdb.connect() as session:
        session.execute("BEGIN")
        session.execute("INSERT INTO b VALUES (3, 1)")
        session.execute(f"PREPARE TRANSACTION '{other}'")
    stranger, alike = f"stranger_{subdb.name}", gids[0] + "0"
    subdb.execute(f"CREATE ROLE {stranger} LOGIN")
    with subdb.connect(stranger) as session:
        session.execute("BEGIN")
        session.execute(f"PREPARE TRANSACTION '{alike}'")
    ended = stored("drop", "s", "--yes", *options)
    assert ended.returncode == 0, ended.stderr
    assert f'pgsub: warning: prepared transaction "{alike}" on the target is left as it is\n' in ended.stderr
    subdb.execute(f"ROLLBACK PREPARED '{alike}'")
    subdb.execute(f"DROP ROLE {stranger}")
    for gid in gids:
        assert f'NOTICE:  rolled back prepared transaction "{gid}" on the target\n' in ended.stderr
    assert subdb.rows(_PREPARED) == [(other,)]
    assert subdb.value("SELECT count(*) FROM b") == 0
    subdb.execute("INSERT INTO b VALUES (1, 1), (2, 1)")  # nothing holds the keys
    subdb.execute(f"ROLLBACK PREPARED '{other}'")
    if not options:
        nothing_created(stored, *tables)


@pytest.mark.long
def test_what_another_role_prepared_stays_the_work_of_that_role(stored, tables):
    pubdb, subdb = tables
    role = f"other_{subdb.name}"
    subdb.execute(f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA pgsub TO {role};")
    subdb.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA pgsub TO {role}")
    target = subdb.server.conninfo(subdb.name, role)
    try:
        gid = prepare(subdb)
        said = "the new target's role cannot finish the subscription's prepared transactions"
        one_error(stored("alter", "s", "--target", target), 3, said)
        subdb.execute(f"ROLLBACK PREPARED '{gid}'")
        assert stored("alter", "s", "--target", target).returncode == 0
        gid = prepare(subdb)
        said = one_error(stored("drop", "s", "--yes"), 11, "permission denied to finish prepared transactions")
        assert said.splitlines()[-1] == f"ROLLBACK PREPARED '{gid}';"
        assert pubdb.value(_SLOT, "s") is True and stored.sql(_STORED) == [("e",)]
        subdb.execute(f"ROLLBACK PREPARED '{gid}'")
        assert stored("drop", "s", "--yes").returncode == 0
    finally:
        subdb.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
