"""The tables of a subscription follow its publications: ``refresh`` through the program, between real servers."""

from __future__ import annotations

import concurrent.futures
import re
import sqlite3

import pytest
from fix_program import ROOT, one_error, until, valid

_SLOTS = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database() ORDER BY 1"
_LEDGER = "SELECT relname, srsubstate::text FROM pgsub.subscription_rel ORDER BY 1"


@pytest.fixture
def stored(cli, tables):
    """A subscription of the tables a and b that nobody serves; b is ``r``, as if it had been synchronized."""
    assert cli.create("s", "--no-wait", "--no-copy-data").returncode == 0
    return cli


def add_table(tables, name="c", rows=50, publication="p"):
    """A new table on both sides, with rows on the publisher, published."""
    for database in tables:
        database.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, t text)")
    tables[0].execute(f"INSERT INTO {name} SELECT g, 'row' FROM generate_series(1, {rows}) g")
    tables[0].execute(f"ALTER PUBLICATION {publication} ADD TABLE {name}")


def oid(database, name):
    return database.value("SELECT %s::regclass::oid::bigint", name)


def test_no_table_is_removed_because_a_standby_has_not_replayed_its_publication(followed, subdb):
    cli = followed.cli
    followed.standby.execute("SELECT pg_wal_replay_pause()")
    followed.primary.execute("ALTER PUBLICATION p ADD TABLE b")
    assert cli("refresh", "s").returncode == 0
    followed.end_primary()
    for words in (("refresh", "s", "--dry-run"), ("refresh", "s"), ("alter", "s", "--set-publication", "p")):
        one_error(cli(*words), 3, "the publisher is a standby that lacks changes of the subscription")
    assert subdb.rows(_LEDGER) == [("a", "r"), ("b", "r")]


# what the server does


@pytest.mark.long
def test_a_disabled_subscription_is_not_refreshed_in_the_servers_words(cli, tables):
    assert cli.create("s", "--no-enabled").returncode == 0
    said = "ALTER SUBSCRIPTION ... REFRESH PUBLICATION is not allowed for disabled subscriptions"
    one_error(cli("refresh", "s"), 3, said, "pgsub enable s")
    one_error(cli("refresh", "x"), 3, 'subscription "x" does not exist', "pgsub status")


def test_new_tables_are_copied_by_the_launcher_and_known_ones_never_again(served, tables):
    cli, name = served
    pubdb, subdb = tables
    subdb.execute("DELETE FROM a WHERE id = 1")  # would come back with a copy
    add_table(tables)
    pubdb.execute("INSERT INTO c VALUES (1000, 'before')")
    ended = cli("refresh", name)
    assert ended.returncode == 0, ended.stderr
    assert f'NOTICE:  subscription "{name}": tables: 1 added\n' in ended.stderr
    assert subdb.value("SELECT count(*) FROM c") == 51
    pubdb.execute("INSERT INTO c VALUES (1001, 'after')")
    subdb.wait("SELECT count(*) FROM c", value=52)
    assert subdb.value("SELECT count(*) FROM a") == 99
    assert [row[0] for row in cli.sql("SELECT action FROM pgsub_journal WHERE subname = ? ORDER BY id", name)] == [
        "create",
        "refresh",
    ]


@pytest.mark.long
def test_a_launcher_takes_up_a_new_table_by_itself_while_writes_go_on(served, tables):
    cli, name = served
    pubdb, subdb = tables
    add_table(tables, rows=2000)
    for number in range(10):
        pubdb.execute("INSERT INTO c VALUES (%s, 'early')", 10_000 + number)
    assert cli("refresh", name, "--no-wait").returncode == 0
    for number in range(200):
        pubdb.execute("INSERT INTO c VALUES (%s, 'late')", 20_000 + number)
        pubdb.execute("UPDATE c SET t = t || '.' WHERE id = 1")
    same = "SELECT count(*), sum(hashtextextended(c::text, 0)) FROM c"
    until(lambda: subdb.rows(same) == pubdb.rows(same))
    until(lambda: cli.states() == {"a": "r", "b": "r", "c": "r"})


def test_without_copy_only_what_is_written_from_now_on_arrives(served, tables):
    cli, name = served
    pubdb, subdb = tables
    add_table(tables)
    ended = cli("refresh", name, "--no-copy-data")
    assert ended.returncode == 0, ended.stderr
    assert subdb.rows(_LEDGER) == [("a", "r"), ("b", "r"), ("c", "r")]
    pubdb.execute("INSERT INTO c VALUES (1000, 'now')")
    subdb.wait("SELECT count(*) FROM c", value=1)


@pytest.mark.long
def test_a_table_that_is_published_no_more_goes_with_its_slot_and_keeps_its_rows(served, tables):
    cli, name = served
    pubdb, subdb = tables
    add_table(tables)
    subdb.execute("INSERT INTO c VALUES (1, 'in the way')")
    assert cli("refresh", name, "--no-wait").returncode == 0
    until(lambda: cli.sql("SELECT 1 FROM pgsub_error WHERE worker LIKE 'table%'"))
    subdb.wait("SELECT count(*) FROM pgsub.subscription_rel WHERE sync_slot IS NOT NULL", value=1)
    pubdb.execute("ALTER PUBLICATION p DROP TABLE c, b")
    ended = cli("refresh", name)
    assert ended.returncode == 0, ended.stderr
    assert f'NOTICE:  subscription "{name}": tables: 2 removed\n' in ended.stderr
    assert subdb.rows(_LEDGER) == [("a", "r")]
    assert pubdb.rows(_SLOTS) == [(name,)]
    until(lambda: cli.states() == {"a": "r"})
    until(lambda: not cli.sql("SELECT 1 FROM pgsub_error"))
    assert subdb.value("SELECT count(*) FROM c") == 1
    assert subdb.value("SELECT count(*) FROM pgsub.copy_chunk") == 0
    assert subdb.value("SELECT count(*) FROM pgsub.progress WHERE worker <> 0") == 0
    pubdb.execute("INSERT INTO b VALUES (1, 1)")
    pubdb.execute("INSERT INTO a VALUES (1000, 'still here')")
    subdb.wait("SELECT count(*) FROM a WHERE id = 1000", value=1)
    assert subdb.value("SELECT count(*) FROM b") == 0


@pytest.mark.long
def test_a_table_that_comes_back_is_copied_as_a_new_one(served, tables):
    cli, name = served
    pubdb, subdb = tables
    pubdb.execute("ALTER PUBLICATION p DROP TABLE a")
    assert cli("refresh", name).returncode == 0
    pubdb.execute("UPDATE a SET t = 'changed meanwhile'")
    subdb.execute("TRUNCATE a")
    pubdb.execute("ALTER PUBLICATION p ADD TABLE a")
    assert cli("refresh", name).returncode == 0
    assert subdb.rows("SELECT DISTINCT t FROM a") == [("changed meanwhile",)]


@pytest.mark.long
def test_a_table_that_comes_back_with_its_rows_is_compared_by_the_command_of_hint_and_runbook(stored, tables):
    """--adopt alone leaves tables as they are that are subscribed."""
    cli, (pubdb, subdb) = stored, tables
    assert cli("refresh", "s", "--resync", "public.a", "--yes").returncode == 0
    pubdb.execute("ALTER PUBLICATION p DROP TABLE a")
    assert cli("refresh", "s").returncode == 0
    pubdb.execute("ALTER PUBLICATION p ADD TABLE a; DELETE FROM a WHERE id = 1")
    refused = cli("refresh", "s")
    assert refused.returncode != 0
    command = "pgsub refresh s --resync public.a --adopt"
    assert command in refused.stderr.splitlines()
    steps = valid("status", cli("status", "s", "--runbook", "--json").stdout)["runbook"]
    assert command in [line for step in steps for line in step["commands"]]
    assert cli(*command.split()[1:], "--yes").returncode == 0
    assert subdb.rows("SELECT * FROM a ORDER BY id") == pubdb.rows("SELECT * FROM a ORDER BY id")


@pytest.mark.long
def test_a_target_table_that_was_dropped_and_created_again_is_a_new_table(served, tables):
    cli, name = served
    subdb = tables[1]
    subdb.execute("DROP TABLE a; CREATE TABLE a (id int PRIMARY KEY, t text)")
    ended = cli("refresh", name)
    assert ended.returncode == 0, ended.stderr
    assert "tables: 1 added, 1 removed\n" in ended.stderr
    assert subdb.value("SELECT count(*) FROM a") == 100


@pytest.mark.long
def test_a_table_that_bears_another_name_on_both_sides_is_the_same_table(served, tables):
    cli, name = served
    pubdb, subdb = tables
    for database in tables:
        database.execute("ALTER TABLE a RENAME TO x; ALTER TABLE b RENAME TO a; ALTER TABLE x RENAME TO b")
    ended = cli("refresh", name)
    assert ended.returncode == 0, ended.stderr
    assert "tables: 2 renamed\n" in ended.stderr
    assert {row[0]: row[1] for row in subdb.rows("SELECT relname, srrelid::bigint FROM pgsub.subscription_rel")} == {
        "a": oid(subdb, "a"),
        "b": oid(subdb, "b"),
    }
    pubdb.execute("INSERT INTO a VALUES (1, 1)")
    subdb.wait("SELECT count(*) FROM a", value=1)
    assert subdb.value("SELECT count(*) FROM b") == 100


@pytest.mark.long
def test_tables_renamed_on_both_sides_go_on_and_are_shown_by_their_names(served, tables):
    cli, name = served
    pubdb, subdb = tables
    for database in tables:
        database.execute("ALTER TABLE a RENAME TO x")
    pubdb.execute("INSERT INTO x VALUES (1001, 'no refresh came')")
    subdb.wait("SELECT count(*) FROM x", value=101)
    until(lambda: {row["relname"] for row in cli.status(name)["relations"]} == {"x", "b"})
    before = subdb.rows("SELECT srrelid::bigint, srsubstate::text, srsublsn FROM pgsub.subscription_rel ORDER BY 1")
    ended = cli("refresh", name)
    assert ended.returncode == 0 and "tables: 1 renamed\n" in ended.stderr
    assert sorted(row[0] for row in subdb.rows(_LEDGER)) == ["b", "x"]
    assert before == subdb.rows(
        "SELECT srrelid::bigint, srsubstate::text, srsublsn FROM pgsub.subscription_rel ORDER BY 1"
    )


@pytest.mark.long
def test_a_schema_fault_is_shown_with_its_column_and_ends_by_the_ddl_of_its_hint(served, tables):
    cli, name = served
    pubdb, subdb = tables
    pubdb.execute("ALTER TABLE a ADD extra numeric(5,1); INSERT INTO a VALUES (1001, 't', 2.5)")
    error = until(lambda: cli.status(name)["last_error"])
    assert (error["class"], error["relation"], error["column"]) == ("SchemaFault", "public.a", "extra")
    [(hint,)] = cli.sql("SELECT hint FROM pgsub_error")
    subdb.execute(hint.splitlines()[-1])
    subdb.wait("SELECT extra::text FROM a WHERE id = 1001", value="2.5")  # nobody was asked to go on
    until(lambda: cli.status(name)["last_error"] is None)


# what is refused, and what is said


def test_a_missing_target_table_is_named_and_nothing_changes(stored, tables):
    pubdb, subdb = tables
    pubdb.execute(
        "CREATE TABLE c (id int PRIMARY KEY); ALTER PUBLICATION p ADD TABLE c; ALTER PUBLICATION p DROP TABLE b"
    )
    one_error(stored("refresh", "s"), 3, 'relation "public.c" does not exist on the target')
    assert subdb.rows(_LEDGER) == [("a", "r"), ("b", "r")]


@pytest.mark.long
def test_another_publisher_is_refused_before_it_could_remove_every_table(stored, tables, own_pair):
    other = own_pair().pubdb
    with sqlite3.connect(stored.state / "state.db") as store:
        store.execute("UPDATE pg_subscription SET subconninfo = ?", (other.conninfo,))
    store.close()
    one_error(stored("refresh", "s"), 7, "the publisher is a different database system")
    assert tables[1].rows(_LEDGER) == [("a", "r"), ("b", "r")]


@pytest.mark.long
def test_a_dry_run_says_what_would_be_done_and_does_nothing(stored, tables):
    pubdb, subdb = tables
    add_table(tables)
    pubdb.execute("ALTER PUBLICATION p DROP TABLE b")
    ended = stored("refresh", "s", "--dry-run", "--resync", "public.a")
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^public\.c\tone transaction\t1\t", ended.stdout, re.MULTILINE)
    assert 'table "public.b" would be removed from the subscription' in ended.stderr
    assert 'table "public.a" would be emptied and copied again' in ended.stderr
    document = valid("plan", stored("refresh", "s", "--dry-run", "--json", "--resync", "public.a").stdout)
    listed = {key: [one["relname"] for one in document[key]] for key in ("tables", "removed", "renamed", "emptied")}
    assert listed == {"tables": ["c"], "removed": ["b"], "renamed": [], "emptied": ["a"]}
    assert subdb.rows(_LEDGER) == [("a", "r"), ("b", "r")]
    assert stored.states() == {"a": "r", "b": "r"}


def test_a_missing_publication_is_a_warning_that_strict_refuses(stored, tables):
    pubdb, subdb = tables
    pubdb.execute("DROP PUBLICATION p")
    one_error(stored("refresh", "s", "--strict"), 3, 'publication "p" does not exist on the publisher')
    assert subdb.rows(_LEDGER) == [("a", "r"), ("b", "r")]
    ended = stored("refresh", "s", "--no-wait")
    assert ended.returncode == 0
    assert 'pgsub: warning: publication "p" does not exist on the publisher\n' in ended.stderr
    assert subdb.rows(_LEDGER) == []


@pytest.mark.long
def test_only_new_tables_are_warned_about_with_origin_none(cli, tables):
    pubdb, subdb = tables
    assert cli.create("s", "--no-wait", "--no-copy-data", "--origin", "none").returncode == 0
    for database in tables:
        database.execute("CREATE TABLE c (id int PRIMARY KEY, t text)")
    pubdb.execute("CREATE SCHEMA pgsub; CREATE TABLE pgsub.subscription_rel (srrelid oid)")
    pubdb.execute("INSERT INTO pgsub.subscription_rel VALUES ('a'::regclass), ('c'::regclass)")
    pubdb.execute("ALTER PUBLICATION p ADD TABLE c")
    one_error(cli("refresh", "s", "--strict"), 3, "requested copy_data with origin = NONE")
    assert subdb.rows(_LEDGER) == [("a", "r"), ("b", "r")]
    ended = cli("refresh", "s", "--no-wait")
    assert ended.returncode == 0, ended.stderr
    assert 'for: "public.c".' in ended.stderr


def test_what_is_registered_without_a_launcher_is_in_the_state_store_at_once(stored, tables):
    add_table(tables)
    ended = stored("refresh", "s", "--no-wait")
    assert ended.stderr.splitlines() == [
        'NOTICE:  subscription "s": tables: 1 added',
        'NOTICE:  subscription "s" is ready, but nothing is running it',
        "HINT:  Start it with:",
        "pgsub run s",
    ]
    assert stored.states() == {"a": "r", "b": "r", "c": "i"}
    ended = stored("refresh", "s", "--no-wait")
    assert (ended.returncode, ended.stderr) == (0, 'NOTICE:  subscription "s": no change of tables\n')


@pytest.mark.long
def test_refresh_synchronizes_in_the_foreground_what_an_earlier_one_left_where_nobody_serves(stored, tables):
    add_table(tables)
    assert stored("refresh", "s", "--no-wait").returncode == 0
    ended = stored("refresh", "s")
    assert ended.returncode == 0, ended.stderr
    assert "no change of tables" in ended.stderr
    assert tables[1].value("SELECT count(*) FROM c") == 50
    assert stored.states() == {"a": "r", "b": "r", "c": "r"}
    assert tables[0].rows(_SLOTS) == [("s",)]


@pytest.mark.long
def test_two_commands_do_not_change_one_subscription_at_once(stored, tables):
    subid = tables[1].value("SELECT subid FROM pgsub.subscription")
    with tables[1].connect() as other:
        other.execute("SELECT pg_advisory_lock(%s, %s)", (0x7067736D, subid))
        one_error(stored("refresh", "s"), 9, 'subscription "s" is being changed by another command')


@pytest.mark.long
def test_refresh_gives_up_when_apply_does_not_let_go_and_changes_nothing(stored, tables):
    add_table(tables)
    with tables[1].connect() as apply:
        apply.execute("BEGIN")
        apply.execute("SELECT FROM pgsub.progress FOR UPDATE")
        one_error(stored("refresh", "s", "--timeout", "3s"), 8, "timeout while waiting for the subscription's workers")
    assert tables[1].rows(_LEDGER) == [("a", "r"), ("b", "r")]


@pytest.mark.long
def test_the_program_of_the_python_page_runs(launcher, tables, capsys):
    services = {"publisher": tables[0], "target": tables[1]}
    code = (ROOT / "docs" / "python.md").read_text().partition("```python\n")[2].partition("```")[0]
    for name, database in services.items():
        code = code.replace(f'"service={name}"', repr(database.conninfo))
    code = code.replace('"/var/lib/pgsub"', repr(str(launcher.state))).replace('("shop",)', '("p",)')
    try:
        assert _in_a_thread(code) is None
        assert "running" in capsys.readouterr().out
    finally:
        assert launcher("drop", "sales", "--yes").returncode == 0


def _in_a_thread(code):
    """Run a program as a scheduler may: not in the main thread. Return what it raised."""
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(exec, code, {}).exception()
