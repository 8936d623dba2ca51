"""ALTER SUBSCRIPTION through the program: what changes, what is refused, and what a running launcher makes of it."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time

import patience
import pytest
from fix_program import nothing_created, one_error, until
from fix_servers import embedded_version
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

_SLOTS = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database() ORDER BY 1"
_LEDGER = "SELECT relname, srsubstate::text FROM pgsub.subscription_rel ORDER BY 1"
#: Open transactions of launchers; one that is active may have sent all it wants to and not have read the answer.
_OPEN = """
SELECT count(*) FROM pg_stat_activity
 WHERE datname = current_database() AND application_name LIKE 'pgsub % launcher %' AND state <> 'idle'
"""
_SUBSCRIPTION = "SELECT subname, slot_name FROM pgsub.subscription"


@pytest.fixture
def stored(cli):
    """A subscription of the tables a and b, both ``r``, that nobody serves."""
    assert cli.create("s", "--no-wait", "--no-copy-data").returncode == 0
    return cli


def publication(tables, name="q", table="c", rows=50):
    """A publication of a new table that is on both sides, with rows on the publisher."""
    for database in tables:
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, t text)")
    tables[0].execute(f"INSERT INTO {table} SELECT g, 'row' FROM generate_series(1, {rows}) g")
    tables[0].execute(f"CREATE PUBLICATION {name} FOR TABLE {table}")


def stand_still(launcher, cli, subdb):
    """Stop a launcher between two transactions: what it locks would stay locked."""
    while True:
        os.kill(launcher, signal.SIGSTOP)
        with contextlib.closing(sqlite3.connect(cli.state / "state.db", timeout=0, isolation_level=None)) as store:
            with contextlib.suppress(sqlite3.OperationalError):
                store.execute("BEGIN IMMEDIATE")
                if not subdb.value(_OPEN):
                    return
        os.kill(launcher, signal.SIGCONT)
        time.sleep(0.01)


def definition(cli, *columns, name="s"):
    """Columns of pg_subscription in the state store."""
    return cli.sql(f"SELECT {', '.join(columns)} FROM pg_subscription WHERE subname = ?", name)[0]


# publications


@pytest.mark.long
def test_an_added_publication_is_refreshed_at_once_and_a_dropped_one_too(served, tables):
    cli, name = served
    pubdb, subdb = tables
    publication(tables)
    ended = cli("alter", name, "--add-publication", "q")
    assert ended.returncode == 0, ended.stderr
    assert "tables: 1 added\n" in ended.stderr
    assert subdb.value("SELECT count(*) FROM c") == 50
    assert definition(cli, "subpublications", name=name) == ('["p", "q"]',)
    pubdb.execute("INSERT INTO c VALUES (1000, 'streamed')")
    subdb.wait("SELECT count(*) FROM c", value=51)
    ended = cli("alter", name, "--drop-publication", "p")
    assert ended.returncode == 0, ended.stderr
    assert "tables: 2 removed\n" in ended.stderr
    assert subdb.rows(_LEDGER) == [("c", "r")]
    pubdb.execute("INSERT INTO a VALUES (1000, 'not ours'); INSERT INTO c VALUES (1001, 'ours')")
    subdb.wait("SELECT count(*) FROM c", value=52)
    assert subdb.value("SELECT count(*) FROM a") == 100


@pytest.mark.long
def test_new_tables_are_copied_by_the_new_publications_while_a_launcher_serves_the_old(served, tables):
    cli, name = served
    pubdb, subdb = tables
    publication(tables)
    pubdb.execute("ALTER PUBLICATION q SET TABLE c WHERE (id <= 10)")
    for _ in range(3):
        ended = cli("alter", name, "--add-publication", "q")
        assert ended.returncode == 0, ended.stderr
        assert subdb.value("SELECT count(*) FROM c") == 10  # the filter is the new publication's
        ended = cli("alter", name, "--drop-publication", "q")
        assert ended.returncode == 0, ended.stderr
        subdb.execute("TRUNCATE c")


@pytest.mark.long
@pytest.mark.publishers("15")
def test_a_publication_may_be_newer_than_changes_that_are_still_to_be_applied(served, tables):
    cli, name = served
    pubdb, subdb = tables
    with subdb.connect() as other:  # keeps apply from its work
        other.execute("BEGIN; LOCK TABLE b IN EXCLUSIVE MODE")
        pubdb.execute("INSERT INTO b VALUES (1, 1)")
        subdb.wait("SELECT count(*) > 0 FROM pg_locks WHERE relation = 'b'::regclass AND NOT granted")
        for number in range(2, 20):
            pubdb.execute("INSERT INTO b VALUES (%s, 1)", number)
        publication(tables)
        written = pubdb.value("SELECT pg_current_wal_insert_lsn()")
        altering = cli.start("alter", name, "--add-publication", "q")
        # before 18 it waits for apply before it asks the workers to stop: they are not where q exists
        subdb.wait("SELECT wanted_lsn >= %s OR stop FROM pgsub.control WHERE worker = 0", written)
        waits = pubdb.connection.info.server_version < 180000
        assert subdb.rows("SELECT stop FROM pgsub.control WHERE worker = 0") == [(not waits,)]
        assert definition(cli, "subpublications", name=name) == (('["p"]',) if waits else ('["p", "q"]',))
    assert altering.wait(patience.SECONDS) == 0, altering.log.read_text()
    assert "warning" not in altering.log.read_text()
    pubdb.execute("INSERT INTO c VALUES (1000, 'streamed')")
    subdb.wait("SELECT count(*) FROM c", value=51)
    subdb.wait("SELECT count(*) FROM b", value=19)
    assert cli.sql("SELECT message FROM pgsub_error") == []


@pytest.mark.long
def test_without_refresh_only_the_list_changes_and_no_server_is_needed(stored, tables):
    publication(tables)
    tables[1].execute("ALTER TABLE c RENAME TO elsewhere")
    for words, left in (
        (["--add-publication", "q", "--add-publication", "x"], '["p", "q", "x"]'),
        (["--drop-publication", "p"], '["q", "x"]'),
        (["--set-publication", "p"], '["p"]'),
    ):
        ended = stored("alter", "s", *words, "--no-refresh", env={"PGCONNECT_TIMEOUT": "1"})
        assert (ended.returncode, ended.stderr) == (0, "")
        assert definition(stored, "subpublications") == (left,)
    assert tables[1].rows(_LEDGER) == [("a", "r"), ("b", "r")]
    tables[1].execute("ALTER SCHEMA pgsub RENAME TO away")
    assert stored("alter", "s", "--add-publication", "x", "--no-refresh").returncode == 0
    tables[1].execute("ALTER SCHEMA away RENAME TO pgsub")


@pytest.mark.long
def test_what_the_server_refuses_of_publications_is_refused_in_its_words(stored, tables):
    for words, code, said in (
        (["--add-publication", "p"], 3, 'publication "p" is already in subscription "s"'),
        (["--drop-publication", "x"], 3, 'publication "x" is not in subscription "s"'),
        (["--drop-publication", "p"], 3, "cannot drop all the publications from a subscription"),
    ):
        one_error(stored("alter", "s", *words), code, said, hint=False)
    said = 'publication name "x" used more than once'
    one_error(stored("alter", "s", "--set-publication", "x", "--set-publication", "x"), 2, said)
    assert stored("disable", "s").returncode == 0
    said = "ALTER SUBSCRIPTION with refresh is not allowed for disabled subscriptions"
    one_error(stored("alter", "s", "--add-publication", "q"), 3, said, "--no-refresh")
    assert definition(stored, "subpublications") == ('["p"]',)


@pytest.mark.long
def test_a_refresh_that_cannot_be_done_leaves_the_publications_as_they_were(stored, tables):
    _pubdb, subdb = tables
    publication(tables)
    subdb.execute("DROP TABLE c")
    one_error(stored("alter", "s", "--add-publication", "q"), 3, 'relation "public.c" does not exist on the target')
    subdb.execute("CREATE TABLE c (id int PRIMARY KEY, t text)")
    with subdb.connect() as apply:
        apply.execute("BEGIN")
        apply.execute("SELECT FROM pgsub.progress FOR UPDATE")
        words = ("alter", "s", "--add-publication", "q", "--timeout", "3s")
        one_error(stored(*words), 8, "timeout while waiting for the subscription's workers")
    assert definition(stored, "subpublications") == ('["p"]',)
    assert subdb.rows(_LEDGER) == [("a", "r"), ("b", "r")]
    ended = stored("alter", "s", "--add-publication", "q", "--no-wait", "--no-copy-data")
    assert ended.returncode == 0, ended.stderr
    assert subdb.rows(_LEDGER) == [("a", "r"), ("b", "r"), ("c", "r")]
    assert stored.states() == {"a": "r", "b": "r", "c": "r"}


@pytest.mark.long
def test_a_missing_publication_that_is_named_is_the_servers_warning(stored, tables):
    def warned(*words, missing):
        ended = stored("alter", "s", *words, "--no-wait")
        assert ended.returncode == 0
        found = [line for line in ended.stderr.splitlines() if "on the publisher" in line]
        assert found == [f"pgsub: warning: {line} on the publisher" for line in missing]

    warned("--add-publication", "nope", missing=['publication "nope" does not exist'])
    warned("--add-publication", "one", "--add-publication", "two", missing=['publications "one", "two" do not exist'])
    publication(tables)
    warned("--add-publication", "q", missing=[])
    warned("--drop-publication", "one", missing=[])
    words = ("--set-publication", "q", "--set-publication", "two", "--set-publication", "three")
    warned(*words, missing=['publications "two", "three" do not exist'])
    warned("--set-publication", "never", "--no-refresh", missing=[])
    one_error(stored("alter", "s", "--add-publication", "none", "--strict"), 3, 'publication "none" does not exist')
    assert definition(stored, "subpublications") == ('["never"]',)


# options


@pytest.mark.long
def test_every_option_changes_and_is_stored(stored):
    words = (
        "--binary --streaming off --synchronous-commit local --disable-on-error --no-password-required --run-as-owner"
        " --origin none --apply-mode transactional --copy-atomic --max-sync-workers 7 --copy-workers 5 --messages"
    )
    assert stored("alter", "s", *words.split()).stderr == ""
    columns = (
        "subbinary",
        "substream",
        "subsynccommit",
        "subdisableonerr",
        "subpasswordrequired",
        "subrunasowner",
        "suborigin",
        "pgsub_apply_mode",
        "pgsub_copy_atomic",
        "pgsub_max_sync_workers",
        "pgsub_copy_workers",
        "pgsub_messages",
    )
    assert definition(stored, *columns) == (1, "f", "local", 1, 0, 1, "none", "transactional", 1, 7, 5, 1)
    assert stored("alter", "s", "--no-binary", "--streaming", "PARALLEL", "--origin", "any").returncode == 0
    assert definition(stored, "subbinary", "substream", "suborigin", "pgsub_copy_workers") == (0, "p", "any", 5)
    assert [row[0] for row in stored.sql("SELECT action FROM pgsub_journal")] == ["create", "alter", "alter"]


@pytest.mark.long
def test_a_running_launcher_starts_its_worker_again_with_the_new_options(served, tables):
    cli, name = served
    pubdb, subdb = tables
    worker = "SELECT pid FROM pg_stat_replication WHERE application_name = %s AND state = 'streaming'"
    before = pubdb.value(worker, name)
    assert before
    assert cli("alter", name, "--binary", "--streaming", "off").returncode == 0
    until(lambda: pubdb.value(worker, name) not in (None, before))
    pubdb.execute("INSERT INTO b VALUES (1, 12.5)")
    subdb.wait("SELECT n FROM b WHERE id = 1", value=pubdb.value("SELECT 12.5::numeric"))
    again = pubdb.value(worker, name)
    assert cli("alter", name, "--disable-on-error").returncode == 0  # the server restarts nothing for this one
    pubdb.execute("INSERT INTO b VALUES (2, 1)")
    subdb.wait("SELECT count(*) FROM b", value=2)
    assert pubdb.value(worker, name) == again


def _origins(count):
    """The setting, where it is not that of slots too."""
    return {"max_active_replication_origins": count} if int(embedded_version()) >= 18 else {}


@pytest.mark.long
def test_more_sessions_that_apply_than_the_target_has_room_for_are_a_warning(make_cli, own_pair):
    pair = own_pair(target={"max_connections": 8, **_origins(5)})
    for database in (pair.pubdb, pair.subdb):
        database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    pair.pubdb.execute("CREATE PUBLICATION p FOR TABLE a")
    cli = make_cli(pair.pubdb.conninfo, pair.subdb.conninfo)
    assert cli.create("s", "--no-wait", "--no-copy-data").returncode == 0

    def altered(*words):
        ended = cli("alter", "s", *words)
        return ended, definition(cli, "pgsub_apply_workers")[0]

    ended, stored = altered("--apply-workers", "4")
    assert (ended.returncode, ended.stderr, stored) == (0, "", 4)
    ended, stored = altered("--apply-workers", "16", "--strict")
    assert (ended.returncode, stored) == (3, 4)
    for words in (("--apply-workers", "16"), ("--apply-workers", "15", "--slot-name", "s2")):
        assert altered("--apply-workers", "4")[1] == 4
        ended, stored = altered(*words)
        assert (ended.returncode, str(stored)) == (0, words[1])
        found = " ".join(ended.stderr.split())
        assert "sessions are free for this role on the target" in found
        assert f"The subscription may take {stored + 1} of them at once" in found
        assert "Use a smaller --apply-workers, or raise the limit (max_connections is 8" in found
        assert ("only 5 replication origins are free on the target" in found) is bool(_origins(5))
    ended, stored = altered("--apply-workers", "auto", "--strict")  # that takes what is free and no more
    assert (ended.returncode, ended.stderr, stored) == (0, "", "auto")
    ended, stored = altered("--apply-workers", "17")
    assert (ended.returncode, stored) == (2, "auto")
    assert "neither 'auto' nor a number from 1 to 16" in " ".join(ended.stderr.split())
    assert altered("--apply-workers", "16")[1] == 16
    ended, stored = altered("--apply-workers", "12")  # fewer take nothing
    assert (ended.returncode, ended.stderr, stored) == (0, "", 12)
    pair.target.stop()
    ended, stored = altered("--apply-workers", "13")
    assert (ended.returncode, stored) == (0, 13)
    assert "could not check whether the target has room for more sessions" in ended.stderr
    pair.target.start()


@pytest.mark.long
def test_sessions_that_the_subscription_has_already_are_room_for_those_that_apply(make_cli, own_pair):
    pair = own_pair(target={"max_connections": 5, **_origins(4)})
    for database in (pair.pubdb, pair.subdb):
        database.execute("CREATE TABLE a (id int PRIMARY KEY)")
        database.connection.close()
    with pair.pubdb.connect() as session:
        session.execute("CREATE PUBLICATION p FOR TABLE a")
    cli = make_cli(pair.pubdb.conninfo, pair.subdb.conninfo)
    assert cli.create("s", "--no-wait", "--no-copy-data").returncode == 0
    running = cli.launcher()
    assert cli("wait", "s", "--for", "synced", "--timeout", "100s").returncode == 0
    ended = cli("alter", "s", "--apply-workers", "4")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert cli.stop(running) == 0


@pytest.mark.long
def test_what_changes_nothing_waits_for_no_worker_of_a_running_launcher(served, tables):
    """As a command that is repeated after it was killed."""
    cli, name = served
    for words in (("--set-publication", "p"), ("--connection", tables[0].conninfo), ("--target", tables[1].conninfo)):
        ended = cli("alter", name, *words)
        assert ended.returncode == 0, ended.stderr
        assert "warning" not in ended.stderr


@pytest.mark.long
def test_failover_needs_a_disabled_subscription_and_changes_the_slot(stored, tables):
    failover = "SELECT failover FROM pg_replication_slots WHERE slot_name = 's'"
    said = 'cannot set option "failover" for enabled subscription'
    one_error(stored("alter", "s", "--failover"), 3, said, "pgsub disable s")
    assert stored("disable", "s").returncode == 0
    assert stored("alter", "s", "--failover").stderr == ""
    assert tables[0].value(failover) is True
    assert definition(stored, "subfailover") == (1,)
    assert stored("alter", "s", "--no-failover").returncode == 0
    assert tables[0].value(failover) is False
    assert stored("alter", "s", "--slot-name", "none").returncode == 0
    said = 'cannot set option "failover" for a subscription that does not have a slot name'
    one_error(stored("alter", "s", "--failover"), 3, said, hint=False)


# name and slot


@pytest.mark.long
def test_a_renamed_subscription_goes_on_under_its_new_name_with_its_old_slot(served, tables):
    cli, name = served
    pubdb, subdb = tables
    new = f"{name} ü"
    assert cli("alter", name, "--rename-to", new).stderr == ""
    one_error(cli("status", name), 3, f'subscription "{name}" does not exist')
    assert subdb.rows(_SUBSCRIPTION) == [(new, name)]
    pubdb.wait("SELECT count(*) FROM pg_stat_replication WHERE application_name = %s", name, value=0)
    pubdb.execute("INSERT INTO b VALUES (1, 1)")
    subdb.wait("SELECT count(*) FROM b", value=1)
    assert pubdb.rows(_SLOTS) == [(name,)]
    assert cli("wait", new, "--for", "caught-up", "--timeout", "1m").returncode == 0


@pytest.mark.long
def test_a_launcher_that_serves_one_subscription_by_name_follows_a_rename(stored, tables):
    running = stored.start("run", "s")
    until(lambda: stored.sql("SELECT 1 FROM pgsub_server"))
    assert stored("alter", "s", "--rename-to", "t").returncode == 0
    tables[0].execute("INSERT INTO b VALUES (1, 1)")
    tables[1].wait("SELECT count(*) FROM b", value=1)
    assert stored.stop(running) == 0


@pytest.mark.long
def test_a_name_that_is_taken_or_no_name_is_refused(stored, tables):
    assert stored.create("t", "--no-wait").returncode == 0
    one_error(stored("alter", "s", "--rename-to", "t"), 3, 'subscription "t" already exists', hint=False)
    one_error(stored("alter", "s", "--rename-to", "x" * 64), 2, "invalid subscription name")
    assert tables[1].rows(f"{_SUBSCRIPTION} ORDER BY 1") == [("s", "s"), ("t", "t")]


@pytest.mark.long
def test_the_old_name_can_be_given_to_another_subscription(stored, tables):
    tables[1].execute("UPDATE pgsub.control SET epoch = 1")  # as if its worker had run
    assert stored("alter", "s", "--rename-to", "t").returncode == 0
    ended = stored.create("s", "--slot-name", "other", "--no-wait")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.long
@pytest.mark.parametrize("point", ["alter.after_ledger", "alter.after_definition"])
def test_a_rename_that_was_killed_half_way_is_done_by_the_next_one(stored, tables, point):
    tables[1].execute("UPDATE pgsub.control SET epoch = 1")
    assert stored("alter", "s", "--rename-to", "t", env={"PGSUB_FAILPOINTS": f"{point}=kill"}).returncode == -9
    (name,) = stored.sql("SELECT subname FROM pg_subscription")[0]
    assert name == ("s" if point == "alter.after_ledger" else "t")
    assert stored("alter", name, "--rename-to", "u").returncode == 0
    assert tables[1].rows(_SUBSCRIPTION) == [("u", "s")]
    for other in ("s", "t"):
        assert stored.create(other, "--slot-name", f"x{other}", "--no-wait").returncode == 0


@pytest.mark.long
def test_the_slot_name_is_the_servers_matter_and_the_ledger_follows(stored, tables):
    said = "cannot set slot_name = NONE for enabled subscription"
    one_error(stored("alter", "s", "--slot-name", "none"), 3, said, "pgsub disable s")
    one_error(stored("alter", "s", "--slot-name", "S"), 2, 'replication slot name "S" contains invalid character')
    assert stored("disable", "s").returncode == 0
    ended = stored("alter", "s", "--slot-name", "NONE")
    assert ended.returncode == 0 and 'NOTICE:  replication slot "s" stays on the publisher' in ended.stderr
    assert ended.stderr.endswith("SELECT pg_drop_replication_slot('s');\n")
    assert tables[1].rows(_SUBSCRIPTION) == [("s", None)]
    one_error(stored("enable", "s"), 3, "cannot enable subscription that does not have a slot name", hint=False)
    assert stored("alter", "s", "--slot-name", "s").returncode == 0
    assert tables[1].rows(_SUBSCRIPTION) == [("s", "s")]
    assert stored("enable", "s").returncode == 0


@pytest.mark.long
def test_a_subscription_without_its_slot_name_is_dropped_without_the_publisher(stored, tables):
    pubdb, subdb = tables
    assert stored("disable", "s").returncode == 0
    assert stored("alter", "s", "--slot-name", "none").returncode == 0
    assert "slot" not in stored("drop", "s", "--yes").stderr
    assert pubdb.rows(_SLOTS) == [("s",)]
    pubdb.execute("SELECT pg_drop_replication_slot('s')")
    nothing_created(stored, pubdb, subdb)


# connections


@pytest.mark.long
def test_a_new_connection_must_lead_to_the_same_publisher(stored, tables, own_pair):
    before = definition(stored, "subconninfo")
    said = one_error(
        stored("alter", "s", "--connection", own_pair().pubdb.conninfo),
        7,
        "the publisher is a different database system",
    )
    assert "passfile" not in said
    elsewhere = make_conninfo(tables[0].conninfo, dbname="postgres")
    one_error(stored("alter", "s", "--connection", elsewhere), 7, "the publisher's database is a different one")
    nobody = make_conninfo(tables[0].conninfo, port=1)
    one_error(stored("alter", "s", "--connection", nobody), 4, "could not connect to the publisher")
    assert definition(stored, "subconninfo") == before
    assert list(stored.state.glob("passfiles/*")) == []


@pytest.mark.long
def test_a_new_connection_takes_effect_in_a_running_launcher_and_its_password_in_a_file(served, tables):
    cli, name = served
    pubdb, subdb = tables
    role = f"repl_{pubdb.name}"
    pubdb.execute(f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'S3NT1NEL'; GRANT SELECT ON a, b TO {role}")
    try:
        connection = make_conninfo(pubdb.conninfo, user=role, password="S3NT1NEL")
        ended = cli("alter", name, "--connection", "-", stdin=f"{connection}\n")
        assert (ended.returncode, ended.stderr) == (0, "")
        shown = "SELECT count(*) FROM pg_stat_replication WHERE application_name = %s AND usename = %s"
        pubdb.wait(shown, name, role, value=1)
        (stored,) = definition(cli, "subconninfo", name=name)
        assert "S3NT1NEL" not in stored and "passfile" in stored
        first = list(cli.state.glob("passfiles/*.publisher"))
        assert len(first) == 1 and first[0].stat().st_mode & 0o777 == 0o600 and "S3NT1NEL" in first[0].read_text()
        pubdb.execute("INSERT INTO b VALUES (1, 1)")
        subdb.wait("SELECT count(*) FROM b", value=1)
        assert cli("alter", name, "--connection", pubdb.conninfo).returncode == 0
        assert list(cli.state.glob("passfiles/*.publisher")) == []
        pubdb.wait(shown, name, "postgres", value=1)
        assert all("S3NT1NEL" not in detail for (detail,) in cli.sql("SELECT detail FROM pgsub_journal"))
    finally:
        pubdb.wait("SELECT count(*) FROM pg_stat_activity WHERE usename = %s", role, value=0)
        pubdb.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.long
def test_a_new_connection_without_the_slot_is_a_warning(stored, tables):
    tables[0].execute("SELECT pg_drop_replication_slot('s')")
    ended = stored("alter", "s", "--connection", make_conninfo(tables[0].conninfo, application_name="other"))
    assert ended.returncode == 0
    assert 'pgsub: warning: replication slot "s" does not exist on the publisher\n' in ended.stderr
    assert conninfo_to_dict(definition(stored, "subconninfo")[0])["application_name"] == "other"


@pytest.mark.long
def test_a_new_target_must_be_the_same_database_and_its_role_is_checked(stored, tables):
    subdb = tables[1]
    elsewhere = make_conninfo(subdb.conninfo, dbname="postgres")
    one_error(stored("alter", "s", "--target", elsewhere), 3, 'the target of subscription "s" is a different database')
    with subdb.server.connect() as other:
        assert other.execute("SELECT to_regnamespace('pgsub')").fetchone() == (None,)
    role = f"other_{subdb.name}"
    subdb.execute(f"CREATE ROLE {role} LOGIN")
    try:
        words = ("alter", "s", "--target", make_conninfo(subdb.conninfo, user=role))
        one_error(stored(*words), 11, "permission denied", f'GRANT USAGE ON SCHEMA pgsub TO "{role}";')
        subdb.execute(f"GRANT USAGE ON SCHEMA pgsub TO {role}")
        subdb.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA pgsub TO {role}")
        ended = stored(*words)
        assert ended.returncode == 0, ended.stderr
        assert "cannot set session_replication_role on the target" in ended.stderr
        assert definition(stored, "pgsub_owner_name") == (role,)
        assert "session_replication_role" in definition(stored, "pgsub_unavailable")[0]
        assert stored("alter", "s", "--target", subdb.conninfo).returncode == 0
    finally:
        subdb.connection.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(role)))


@pytest.mark.long
def test_the_old_target_is_let_go_of_when_the_command_returns(served, tables, proxy):
    cli, name = served
    pubdb, subdb = tables
    old, new = proxy(subdb.conninfo), proxy(subdb.conninfo)  # two ways that lead to one database
    assert cli("alter", name, "--target", old.conninfo).returncode == 0
    pubdb.execute("INSERT INTO b VALUES (0, 1)")
    subdb.wait("SELECT count(*) FROM b", value=1)  # by a worker that came since
    launcher = int((cli.state / "launcher.lock").read_text().split()[1])
    stand_still(launcher, cli, subdb)  # it notices nothing, and its worker goes on
    try:
        altering = cli.start("alter", name, "--target", new.conninfo)
        port = conninfo_to_dict(new.conninfo)["port"]
        until(lambda: f"port={port}" in definition(cli, "pgsub_target", name=name)[0])
        pubdb.execute("INSERT INTO b VALUES (1, 1)")
        subdb.wait("SELECT count(*) FROM b", value=2)
        assert altering.poll() is None
    finally:
        os.kill(launcher, signal.SIGCONT)
    assert altering.wait(patience.SECONDS) == 0
    old.stall()
    pubdb.execute("INSERT INTO b VALUES (2, 1)")
    subdb.wait("SELECT count(*) FROM b", value=3)
    assert cli("alter", name, "--target", subdb.conninfo).returncode == 0


def test_a_copy_of_the_target_without_the_ledger_row_is_refused(stored, tables):
    subdb = tables[1]
    subdb.execute("SET session_replication_role = replica; DELETE FROM pgsub.subscription")
    said = "the target's ledger does not know this subscription"
    one_error(stored("alter", "s", "--target", subdb.conninfo), 3, said)


def test_nothing_of_an_alteration_stays_when_a_part_of_it_is_refused(stored, tables):
    before = stored.sql("SELECT * FROM pg_subscription")
    words = ["--rename-to", "t", "--binary", "--connection", make_conninfo(tables[0].conninfo, port=1)]
    one_error(stored("alter", "s", *words), 4, "could not connect to the publisher")
    assert stored.sql("SELECT * FROM pg_subscription") == before
    assert tables[1].rows(_SUBSCRIPTION) == [("s", "s")]
