"""``drop`` removes everything that ``create`` and the workers made, or says what keeps it from doing so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fix_clusters import replayed
from fix_program import nothing_created, one_error
from fix_servers import Database

from pgsub.catalog.rows import ErrorRow
from pgsub.catalog.store import StateStore
from pgsub.common.errors import SlotLost

_SLOTS = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database() ORDER BY 1"


@pytest.fixture
def services(cli, tables, tmp_path):
    """Both conninfos as services; the function moves one of them to another port."""
    file = tmp_path / "pg_service.conf"
    lines = {side: f"[{side}]\nhost=127.0.0.1\nport={db.server.port}\ndbname={db.name}\nuser=postgres\n"
             for side, db in zip(("there", "here"), tables, strict=True)}  # fmt: skip
    cli.environment["PGSERVICEFILE"] = str(file)
    cli.connection, cli.target = "service=there", "service=here"

    def move(side=None, port=1):
        moved = {**lines, **({side: re.sub(r"port=\d+", f"port={port}", lines[side])} if side else {})}
        file.write_text("\n".join(moved.values()))

    move()
    return move


@pytest.fixture
def created(cli):
    """The subscription s, registered."""
    ended = cli.create("s", "--no-wait")
    assert ended.returncode == 0, ended.stderr
    return cli


def test_drop_leaves_nothing_but_its_row_in_the_journal(created, tables):
    cli = created
    ended = cli("drop", "s", "--yes")
    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr.splitlines() == [
        'NOTICE:  dropped replication slot "s" on publisher',
        "NOTICE:  schema pgsub of the target no longer holds a subscription",
        "HINT:  To remove the schema and all that it holds:",
        "DROP SCHEMA pgsub CASCADE;",
    ]
    nothing_created(cli, *tables)
    for table in ("control", "progress", "subscription_rel", "copy_chunk", "event"):
        assert tables[1].value(f"SELECT count(*) FROM pgsub.{table}") == 0
    assert tables[1].value("SELECT count(*) FROM pg_replication_origin WHERE roname LIKE 'pgsub%%'") == 0
    assert cli.sql("SELECT action, subname FROM pgsub_journal ORDER BY id") == [("create", "s"), ("drop", "s")]
    assert cli.states() == {}


@pytest.mark.long
def test_the_statement_that_removes_the_schema_works_on_a_target_that_is_fenced(created, tables):
    subdb = tables[1]
    subdb.execute(f'ALTER DATABASE "{subdb.name}" SET default_transaction_read_only = on')
    said = created("drop", "s", "--yes").stderr
    statements = said.partition("To remove the schema and all that it holds:\n")[2].splitlines()
    assert len(statements) == 2
    subdb.close()  # the next session has the database's setting
    for statement in statements:
        subdb.execute(statement)
    assert subdb.value("SELECT to_regnamespace('pgsub') IS NULL")


def test_drop_needs_yes_off_a_terminal_and_the_hint_is_the_command(created):
    said = one_error(created("drop", "s"), 2, 'dropping subscription "s" needs --yes')
    assert said.splitlines()[-1] == "pgsub drop s --yes"
    assert created.sql("SELECT subname FROM pg_subscription") == [("s",)]


def test_if_exists_makes_a_missing_subscription_a_notice(cli):
    ended = cli("drop", "s", "--if-exists", "--yes")
    assert (ended.returncode, ended.stderr) == (0, 'NOTICE:  subscription "s" does not exist, skipping\n')


def test_keep_slot_asks_the_publisher_for_nothing(services, created, tables):
    services("there")
    ended = created("drop", "s", "--keep-slot", "--yes")
    assert ended.returncode == 0 and "slot" not in ended.stderr
    assert tables[0].rows(_SLOTS) == [("s",)]
    assert tables[1].rows("SELECT subname FROM pgsub.subscription") == []
    assert created.sql("SELECT subname FROM pg_subscription") == []


def test_an_unreachable_publisher_keeps_the_subscription_and_the_hint_drops_it_without_its_slot(
    services, created, tables
):
    services("there")
    said = one_error(
        created("drop", "s", "--yes"),
        *(4, 'could not connect to publisher when attempting to drop replication slot "s": '),
    )
    assert said.splitlines()[-1] == "pgsub drop s --keep-slot --yes"
    assert created.status()["subenabled"] is True
    assert tables[1].rows("SELECT subname FROM pgsub.subscription") == [("s",)]
    services()
    assert created("drop", "s", "--yes").returncode == 0
    nothing_created(created, *tables)


def test_no_slot_is_dropped_on_another_server_and_the_hint_drops_the_rest(services, created, tables):
    there = tables[0]
    other = Database(there.server, f"{there.name}_other")
    file = Path(created.environment["PGSERVICEFILE"])
    before = file.read_text()
    file.write_text(before.replace(f"dbname={there.name}\n", f"dbname={other.name}\n"))
    for _ in range(2):
        said = one_error(created("drop", "s", "--yes"), 7, "the publisher's database is a different one")
    assert there.rows(_SLOTS) == [("s",)] and created.status()["subenabled"] is True
    ended = created(*said.splitlines()[-1].split()[1:])
    assert ended.returncode == 0, ended.stderr
    assert there.rows(_SLOTS) == [("s",)]
    there.execute("SELECT pg_drop_replication_slot('s')")
    nothing_created(created, *tables)
    other.drop()


@pytest.mark.long
def test_an_unreachable_target_keeps_the_subscription(services, created, tables):
    services("here")
    one_error(created("drop", "s", "--yes"), 5, "could not connect to the target: ", "when the target is back")
    assert created.status()["subenabled"] is True
    assert tables[0].rows(_SLOTS) == [("s",)]


def test_a_drop_that_keeps_slots_names_those_of_tables_that_nothing_knows_any_more(created, tables):
    slot = f"pgsub_{tables[1].value('SELECT subid FROM pgsub.subscription')}_sync_2_3"
    named = "UPDATE pgsub.subscription_rel SET sync_slot = %s, spare_slot = 'others' WHERE relname = 'a'"
    tables[1].execute(named, slot)
    ended = created("drop", "s", "--keep-slot", "--yes")
    assert ended.returncode == 0 and "1 replication slot of tables may stay on the publisher" in ended.stderr
    assert f"SELECT pg_drop_replication_slot('{slot}');" in ended.stderr and "others" not in ended.stderr
    tables[0].execute("SELECT pg_drop_replication_slot('s')")


@pytest.mark.long
def test_where_the_target_is_gone_for_good_the_hint_drops_the_rest_with_the_slots(services, created, tables):
    subid = tables[1].value("SELECT subid FROM pgsub.subscription")
    left = [f"pgsub_{subid}0_sync_16384_7", f"pgsub_{subid}_sync_16384_7", "somebody_elses"]
    for slot in left:
        tables[0].execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
    services("here")
    hint = one_error(created("drop", "s", "--yes"), 5, "could not connect to the target: ").splitlines()[-1]
    ended = created(*hint.split()[1:])
    assert ended.returncode == 0 and "the target was not changed" in ended.stderr
    assert tables[0].rows(_SLOTS) == [(left[0],), (left[2],)]
    assert created.sql("SELECT subname FROM pg_subscription") == []
    tables[0].execute("SELECT pg_drop_replication_slot(%s)", left[0])


@pytest.mark.long
def test_a_slot_that_is_missing_is_the_servers_error_and_the_hint_drops_the_rest(created, tables):
    tables[0].execute("SELECT pg_drop_replication_slot('s')")
    for _ in range(2):  # the first one is not taken for a drop that got as far as this
        said = one_error(created("drop", "s", "--yes"), 7, 'could not drop replication slot "s" on publisher')
    assert created.status()["subenabled"] is True
    ended = created(*said.splitlines()[-1].split()[1:])
    assert ended.returncode == 0, ended.stderr
    nothing_created(created, *tables)


def test_the_lost_slot_of_a_table_does_not_make_up_for_a_missing_main_slot(created, tables):
    tables[0].execute("SELECT pg_drop_replication_slot('s')")
    with StateStore.open(created.state) as store:
        error = ErrorRow.of(SlotLost("replication slot of a table is gone"), "table synchronization 1")
        store.record_error(store.subscription("s").subid, error)
    one_error(created("drop", "s", "--yes"), 7, 'replication slot "s" does not exist')


def test_slots_of_unfinished_tables_are_dropped_too(created, tables):
    pubdb, subdb = tables
    ours = f"pgsub_{subdb.value('SELECT subid FROM pgsub.subscription')}_sync"
    for slot in (f"{ours}_2_3", "somebody_elses", "somebody_named"):
        pubdb.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
    named = "UPDATE pgsub.subscription_rel SET sync_slot = %s, spare_slot = %s, srsubstate = 'd' WHERE relname = %s"
    subdb.execute(named, f"{ours}_2_3", "somebody_named", "a")
    subdb.execute(named, f"{ours}_never_made", None, "b")
    assert created("drop", "s", "--yes").returncode == 0
    assert sorted(pubdb.rows(_SLOTS)) == [("somebody_elses",), ("somebody_named",)]


def test_sessions_of_workers_that_outlived_their_launcher_are_ended(created, tables):
    _, subdb = tables
    subid = subdb.value("SELECT subid FROM pgsub.subscription")
    zombie, foreign = (subdb.connect(application_name=f"pgsub {number} apply 1") for number in (subid, subid + 1))
    zombie.execute("BEGIN")
    zombie.execute("SELECT FROM pgsub.progress FOR UPDATE")
    assert created("drop", "s", "--yes").returncode == 0
    listed = "SELECT pid FROM pg_stat_activity WHERE pid = ANY (%s)"
    assert subdb.rows(listed, [zombie.info.backend_pid, foreign.info.backend_pid]) == [(foreign.info.backend_pid,)]
    zombie.close()
    foreign.close()


@pytest.mark.parametrize("lost", ["DROP SCHEMA pgsub CASCADE", "DELETE FROM pgsub.subscription"])
def test_a_database_that_lost_its_ledger_is_no_obstacle_and_no_slot_is_left(created, tables, lost):
    """As one that was restored from a backup of before the subscription was created."""
    pubdb, subdb = tables
    slot = f"pgsub_{subdb.value('SELECT subid FROM pgsub.subscription')}_sync_g1_7"
    pubdb.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
    subdb.execute(lost)
    ended = created("run", "s", "--until-caught-up")
    assert ended.returncode in (3, 6) and "create it again, with --adopt" in ended.stderr
    assert "create it again, with --adopt" in created("status", "s", "--runbook").stdout
    assert created("drop", "s", "--yes").returncode == 0
    assert pubdb.rows(_SLOTS) == []
    assert created.sql("SELECT subname FROM pg_subscription") == []


def test_a_slot_that_is_only_called_as_the_subscriptions_stays_and_is_told(created, tables):
    """A ledger that was put back to before the copy of a table does not name it."""
    pubdb, subdb = tables
    slot = f"pgsub_{subdb.value('SELECT subid FROM pgsub.subscription')}_sync_g1_7"
    pubdb.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
    ended = created("drop", "s", "--yes")
    assert ended.returncode == 0 and f'replication slot "{slot}" on the publisher is left as it is' in ended.stderr
    assert pubdb.rows(_SLOTS) == [(slot,)]
    pubdb.execute(next(line for line in ended.stderr.splitlines() if line.startswith("SELECT pg_drop_")))
    assert pubdb.rows(_SLOTS) == []


@pytest.mark.parametrize("of", ["another kind", "another database"])
def test_a_slot_that_cannot_be_the_subscriptions_stays_and_the_hint_drops_the_rest(created, tables, of):
    pubdb = tables[0]
    pubdb.execute("SELECT pg_drop_replication_slot('s')")
    other = Database(pubdb.server, f"{pubdb.name}_other")
    if of == "another kind":
        pubdb.execute("SELECT pg_create_physical_replication_slot('s')")
    else:
        other.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    for _ in range(2):
        said = one_error(created("drop", "s", "--yes"), 3, 'replication slot "s" is not one of this subscription')
    ended = created(*said.splitlines()[-1].split()[1:])
    assert ended.returncode == 0, ended.stderr
    pubdb.execute("SELECT pg_drop_replication_slot('s')")  # which stayed
    other.drop()
    nothing_created(created, *tables)


def test_a_slot_that_somebody_made_after_a_killed_drop_is_left_to_him(created, tables):
    pubdb = tables[0]
    assert created("drop", "s", "--yes", env={"PGSUB_FAILPOINTS": "drop.after_slots=kill"}).returncode < 0
    assert pubdb.rows(_SLOTS) == []
    pubdb.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    ended = created("drop", "s", "--yes", env={"PGSUB_FAILPOINTS": "drop.after_slots=kill"})
    assert ended.returncode < 0 and 'replication slot "s" on the publisher is left as it is' in ended.stderr
    assert created("drop", "s", "--yes").returncode == 0
    assert pubdb.rows(_SLOTS) == [("s",)]
    pubdb.execute("SELECT pg_drop_replication_slot('s')")
    nothing_created(created, *tables)


@pytest.mark.long
def test_the_slot_that_a_killed_reconciliation_made_after_a_killed_drop_is_dropped(cli, tables):
    assert cli.create("s").returncode == 0
    for words, point in ((("drop", "s"), "drop.after_slots"), (("reconcile", "s"), "reconcile.created")):
        assert cli(*words, "--yes", env={"PGSUB_FAILPOINTS": f"{point}=kill"}).returncode < 0
    assert tables[0].rows(_SLOTS) == [("s",)]
    assert cli("drop", "s", "--yes").returncode == 0
    nothing_created(cli, *tables)


@pytest.mark.long
def test_a_standby_that_answers_for_its_primary_is_no_reason_to_leave_the_slot_there(make_server, make_cli, subdb):
    primary = Database(make_server(), "app")
    primary.execute("CREATE PUBLICATION p")
    standby = Database(make_server(standby_of=primary.server), "app", there=True)
    replayed(primary, standby)
    ports = f"{primary.server.port},{standby.server.port}"
    cli = make_cli(f"host=127.0.0.1,127.0.0.1 port={ports} user=postgres dbname=app", subdb.conninfo)
    assert cli.create("s", "--no-wait").returncode == 0
    subdb.execute("UPDATE pgsub.subscription SET slot_intent = true")  # as a drop that was killed leaves it
    primary.close()
    primary.server.stop()
    one_error(cli("drop", "s", "--yes"), 4, 'replication slot "s" does not exist', "The slot may be on its primary.")
    primary.server.start()
    ended = cli("drop", "s", "--yes")
    assert ended.returncode == 0 and "dropped replication slot" in ended.stderr
    assert primary.rows(_SLOTS) == []
