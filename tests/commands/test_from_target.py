"""``run --from-target``: a state store that is lost, or another host's, is made anew of the ledger."""

from __future__ import annotations

import itertools
import signal
import threading
from contextlib import closing
from unittest.mock import Mock

import pytest
from fix_program import Cli, nothing_created, one_error, until
from fix_switchover import moving

from pgsub.commands.subscription import rebuild
from pgsub.publisher import slots

pytestmark = pytest.mark.long

_SLOTS = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database() ORDER BY 1"
_MOVES = "SELECT coalesce(max(moves), 0) FROM pgsub.definition"
_VERSION = "SELECT max(version) FROM pgsub.ledger_version"
_OPTION = "SELECT options ->> %s FROM pgsub.definition"
#: What a state store shows of a subscription; times of its own writing left out.
_SHOWN = {
    "pg_subscription": "pgsub_options_changed_at, pgsub_moves",
    "pg_subscription_rel": "",
    "pgsub_origin": "",
    "pgsub_prepared_pending": "",
    "pgsub_held_table": "",
    "pgsub_skipped": "",
}
#: Options that are none of the defaults, as words of ``create``.
_OPTIONS = (
    *("--binary", "--streaming", "on", "--synchronous-commit", "local", "--wal-receiver-timeout", "50s"),
    *("--disable-on-error", "--origin", "none", "--run-as-owner", "--messages", "--apply-mode", "transactional"),
    *(
        "--copy-atomic",
        "--max-sync-workers",
        "3",
        "--copy-workers",
        "1",
        "--max-parallel-apply-workers",
        "4",
        "--apply-workers",
        "3",
    ),
    *("--on-conflict", "update_missing=skip", "--slot-name", "other_slot"),
)


def shown(cli: Cli) -> dict[str, list[dict[str, object]]]:
    """What the state store has, apart from history."""
    found = {}
    for table, volatile in _SHOWN.items():
        names = [row[1] for row in cli.sql(f"PRAGMA table_info({table})") if row[1] not in volatile.split(", ")]
        rows = cli.sql(f"SELECT {', '.join(names)} FROM {table} ORDER BY 1, 2")
        found[table] = [dict(zip(names, row, strict=True)) for row in rows]
    return found


def differing(one: dict[str, list[dict[str, object]]], other: dict[str, list[dict[str, object]]]) -> list[object]:
    """What two of them do not have in common."""
    rows = [(table, list(map(dict.items, one[table])), list(map(dict.items, other[table]))) for table in one]
    return [
        (table, sorted(here ^ there, key=str))
        for table, mine, others in rows
        for here, there in itertools.zip_longest(mine, others, fillvalue={}.items())
        if here != there
    ]


def lose(cli: Cli) -> None:
    """Remove the state store; what else is in the folder stays."""
    for file in cli.state.glob("state.db*"):
        file.unlink()


def again(cli: Cli, *options: str) -> tuple[str, ...]:
    """The words of a run that rebuilds subscription s."""
    return ("run", "s", "--from-target", "--connection", cli.connection, "--target", cli.target, *options)


@pytest.fixture
def elsewhere(make_cli, tables) -> Cli:
    """The program with another, empty state folder: another host."""
    return make_cli(tables[0].conninfo, tables[1].conninfo)


def test_a_state_store_lost_under_writes_is_rebuilt_and_every_row_arrives_once(cli, tables):
    pubdb, subdb = tables
    for database in tables:
        database.execute("CREATE TABLE log (n int)")  # no key: what is applied twice is there twice
    pubdb.execute("ALTER PUBLICATION p ADD TABLE log")
    running = cli.launcher()
    assert cli.create("s", *_OPTIONS, "--no-wait").returncode == 0
    assert cli("alter", "s", "--no-messages", "--rename-to", "renamed").returncode == 0
    assert cli("alter", "renamed", "--rename-to", "s").returncode == 0
    assert cli("wait", "s", "--for", "synced", "--timeout", "2m").returncode == 0
    subdb.wait(_OPTION.replace("%s", "'messages'"), value="false")
    before = shown(cli)
    stop = threading.Event()

    def write() -> None:
        with pubdb.connect() as session:
            for number in itertools.count():
                session.execute("INSERT INTO log VALUES (%s)", (number,))
                if stop.wait(0.005):
                    return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        until(lambda: subdb.value("SELECT count(*) FROM log") > 100)
        running.kill()
        running.wait()
        lose(cli)
        running = cli.start(*again(cli))
        until(lambda: (cli.state / "state.db").exists() and cli.sql("SELECT 1 FROM pg_stat_subscription WHERE pid > 0"))
        arrived = subdb.value("SELECT count(*) FROM log")
        until(lambda: subdb.value("SELECT count(*) FROM log") > arrived + 100)
    finally:
        stop.set()
        writer.join()
    assert cli("wait", "s", "--for", "caught-up", "--timeout", "2m").returncode == 0
    assert cli.stop(running) == 0, running.log.read_text()
    sent = pubdb.rows("SELECT n FROM log ORDER BY n")
    assert subdb.rows("SELECT n FROM log ORDER BY n") == sent and len(sent) > 200
    after = shown(cli)
    assert after.pop("pgsub_origin") != before.pop("pgsub_origin")
    assert differing(after, before) == []
    assert 'subscription "s" was rebuilt from the ledger: slot "other_slot", 3 tables' in running.log.read_text()
    assert [row[0] for row in cli.sql("SELECT action FROM pgsub_journal")] == ["run"]


@pytest.mark.own_spark
def test_a_rebuild_in_the_middle_of_a_copy_that_is_killed_itself_is_done_again_and_goes_on(cli, tables, reached):
    pubdb, subdb = tables
    running = cli.launcher(env={"PGSUB_FAILPOINTS": "copy.before_commit=sleep:600"})
    assert cli.create("s", "--no-wait").returncode == 0
    subdb.wait("SELECT count(*) FROM pgsub.subscription_rel WHERE srsubstate = 'd'", value=2)
    running.kill()
    running.wait()
    ledger = subdb.rows("SELECT relname, srsubstate::text FROM pgsub.subscription_rel")
    lose(cli)
    for moves, point in enumerate(("rebuild.after_ledger", "rebuild.after_definition"), start=1):
        ended = cli(*again(cli), env={"PGSUB_FAILPOINTS": f"{point}=kill"})
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        reached(point)
        assert subdb.value(_MOVES) == moves
        assert sorted(cli.states().items()) == ([] if point == "rebuild.after_ledger" else sorted(ledger))
    ended = cli(*again(cli, "--until-caught-up"))
    assert ended.returncode == 0, ended.stderr
    assert 'subscription "s" is in the state store already; nothing was rebuilt' in ended.stderr
    assert subdb.value(_MOVES) == 2
    assert cli.states() == {"a": "r", "b": "r"}
    assert subdb.rows("SELECT * FROM a ORDER BY id") == pubdb.rows("SELECT * FROM a ORDER BY id")
    assert cli("drop", "s", "--yes").returncode == 0
    nothing_created(cli, pubdb, subdb)


def test_a_disabled_subscription_comes_back_with_what_is_prepared_held_and_to_be_skipped(cli, tables):
    pubdb, subdb = tables
    assert cli.create("s", "--two-phase", "--no-copy-data", "--no-wait").returncode == 0
    running = cli.launcher()
    pubdb.execute("BEGIN; INSERT INTO a VALUES (501, 'x'); PREPARE TRANSACTION 'undecided'")
    pubdb.execute("INSERT INTO a VALUES (502, 'x')")
    subdb.wait("SELECT count(*) FROM a WHERE id = 502")
    assert cli("alter", "s", "--hold", "public.b").returncode == 0
    pubdb.execute("INSERT INTO b VALUES (1, 1)")
    until(lambda: cli.sql("SELECT 1 FROM pgsub_held_table WHERE kept_changes = 1"))
    limited = ("--conflict", "update_missing", "--table", "public.a", "--limit", "5")
    assert cli("skip-lsn", "s", *limited, "--yes").returncode == 0
    subdb.execute("UPDATE pgsub.control SET skip_lsn = '7F/10', skip_rows = 'whole' WHERE worker = 0")
    until(lambda: cli.sql("SELECT 1 FROM pg_subscription WHERE subskiplsn = '7F/10'"))
    assert cli("disable", "s").returncode == 0
    assert cli("wait", "s", "--for", "disabled", "--timeout", "1m").returncode == 0
    subdb.wait(_OPTION.replace("%s", "'enabled'"), value="false")
    assert cli.stop(running) == 0
    before = shown(cli)
    assert all(before[table] for table in before if table != "pgsub_skipped")
    lose(cli)
    one_error(cli(*again(cli, "--until-caught-up")), 3, 'subscription "s" is disabled')
    assert differing(shown(cli), before) == []
    pubdb.execute("COMMIT PREPARED 'undecided'")
    assert cli("skip-lsn", "s", "none", "--yes").returncode == 0
    assert cli("alter", "s", "--release", "public.b").returncode == 0
    assert cli("enable", "s").returncode == 0
    ended = cli("run", "s", "--until-caught-up")
    assert ended.returncode == 0, ended.stderr
    assert subdb.rows("SELECT id FROM a UNION ALL SELECT id FROM b ORDER BY 1") == [(1,), (501,), (502,)]


def test_a_live_launcher_keeps_its_subscription_and_one_that_was_moved_is_served_nowhere_else(cli, tables, elsewhere):
    pubdb, subdb = tables
    assert cli.create("s", "--no-wait").returncode == 0
    running = cli.launcher()
    assert cli("wait", "s", "--for", "synced", "--timeout", "2m").returncode == 0
    said = one_error(elsewhere(*again(elsewhere)), 9, 'subscription "s" is served by another pgsub run')
    assert "holds the advisory lock" in said
    assert elsewhere.sql("SELECT count(*) FROM pg_subscription") == [(0,)] and subdb.value(_MOVES) == 0
    assert running.poll() is None and cli.stop(running) == 0

    ended = elsewhere(*again(elsewhere, "--until-caught-up"))
    assert ended.returncode == 0, ended.stderr
    assert elsewhere("alter", "s", "--binary").returncode == 0
    pubdb.execute("INSERT INTO b VALUES (1, 1)")
    moved = 'subscription "s" was moved to another state store'
    for words in (("run", "s", "--until-caught-up"), ("refresh", "s"), ("skip-lsn", "s", "7F/10", "--yes")):
        assert str(elsewhere.state) in one_error(cli(*words), 3, moved)
    assert subdb.value("SELECT count(*) FROM b") == 0
    assert str(elsewhere.state) in one_error(cli("drop", "s", "--keep-target", "--yes"), 3, moved)
    assert pubdb.rows(_SLOTS) == [("s",)]
    ended = cli("drop", "s", "--yes")
    assert ended.returncode == 0 and "only its definition here is dropped" in ended.stderr, ended.stderr
    assert pubdb.rows(_SLOTS) == [("s",)]
    assert elsewhere("run", "--until-caught-up").returncode == 0
    assert subdb.value("SELECT count(*) FROM b") == 1
    # and back, into a folder that a launcher serves already
    running = cli.launcher()
    ended = cli(*again(cli))
    assert ended.returncode == 0 and "the pgsub run that serves this state folder does the work" in ended.stderr
    assert cli("wait", "s", "--for", "caught-up", "--timeout", "2m").returncode == 0
    assert cli.status()["subbinary"] is True
    assert cli("drop", "s", "--yes").returncode == 0
    assert cli.stop(running) == 0
    nothing_created(cli, pubdb, subdb)


def test_a_subscription_that_is_switched_over_comes_into_no_other_state_store(make_cli, pubdb, subdb):
    cli = make_cli("", "")
    running = cli.launcher()
    mover = moving(cli, (pubdb, subdb))
    mover("--no-verify", "--timeout", "2m", kill="fenced")
    running.kill()
    running.wait()
    elsewhere = make_cli(cli.connection, cli.target)
    words = again(elsewhere, "--until-caught-up")
    words = ("run", "moved", *words[2:])
    said = one_error(
        elsewhere(*words), 3, "takes part in a switchover that is under way", "pgsub switchover moved --status"
    )
    assert elsewhere.sql("SELECT count(*) FROM pg_subscription") == [(0,)] and mover.rows(1, _MOVES) == [(0,)]
    back = ("run", "moved_back", "--from-target", "--connection", cli.target, "--target", cli.connection)
    one_error(elsewhere(*back), 3, "takes part in a switchover", "pgsub run moved --from-target")
    # the state folder where it was begun is lost
    reopening, slot, forget = (line for line in said.splitlines() if line.startswith(("BEGIN", "SELECT")))
    for side, line in ((0, reopening), (1, slot), (1, forget)):
        mover.alone(side, line)
    mover.rows(0, "INSERT INTO writes (client, number) VALUES (0, 1) RETURNING id")
    assert mover.rows(1, "SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'moved_back'") == [(0,)]
    ended = elsewhere(*words)
    assert ended.returncode == 0, ended.stderr
    serving = elsewhere.launcher()
    again_there = ("switchover", "moved", "--yes", "--no-verify", "--timeout", "2m")
    told = one_error(elsewhere(*again_there), 3, "is under way", f"""database "{pubdb.name}" on host""")
    mover.alone(0, next(line for line in told.splitlines() if line.startswith("BEGIN READ WRITE; DELETE")))
    ended = elsewhere(*again_there)
    assert ended.returncode == 0, ended.stderr
    assert elsewhere("drop", "moved_back", "--yes").returncode == 0
    assert elsewhere.stop(serving) == 0


@pytest.mark.parametrize("step", ["taken", "done"])
def test_the_way_back_is_rebuilt_where_the_state_folder_is_lost_after_clients_write_on_the_target(
    make_cli, pubdb, subdb, step
):
    cli = make_cli("", "")
    running = cli.launcher()
    mover = moving(cli, (pubdb, subdb))
    mover("--no-verify", "--timeout", "2m", kill="given")
    elsewhere = make_cli(cli.target, cli.connection)
    words = ("run", "moved_back", *again(elsewhere, "--until-caught-up")[2:])
    one_error(elsewhere(*words), 3, "takes part in a switchover that is under way")
    mover("--no-verify", "--timeout", "2m", kill=step)
    running.kill()
    running.wait()
    elsewhere.connection, elsewhere.target = cli.connection, cli.target
    words = ("run", "moved", *again(elsewhere)[2:])
    said = one_error(elsewhere(*words), 3, "takes part in a switchover that is under way", "pgsub run moved_back")
    elsewhere.connection, elsewhere.target = cli.target, cli.connection
    serving = elsewhere.launcher()
    ended = elsewhere("run", "moved_back", *again(elsewhere)[2:])
    assert ended.returncode == 0, ended.stderr
    assert elsewhere("enable", "moved_back").returncode == 0
    mover.rows(1, "INSERT INTO writes (client, number) VALUES (0, 1) RETURNING id")
    until(lambda: mover.rows(0, "SELECT number FROM writes") == [(1,)])
    for side, start in ((0, "SELECT pg_drop"), (1, "BEGIN READ WRITE")):
        mover.alone(side, next(line for line in said.splitlines() if line.startswith(start)))
    assert mover.rows(0, "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()") == []
    assert elsewhere("switchover", "moved", "--status").returncode == 0
    assert elsewhere("drop", "moved_back", "--yes").returncode == 0
    assert elsewhere.stop(serving) == 0


def test_a_publisher_a_name_or_a_target_that_is_not_the_ledgers_changes_nothing(cli, tables, elsewhere):
    pubdb, subdb = tables
    connection, to = elsewhere.connection, elsewhere.target
    one_error(elsewhere(*again(elsewhere)), 3, 'has no subscription "s"', "No subscription replicates into it.")
    assert cli.create("s", "--no-wait").returncode == 0
    elsewhere.connection = subdb.conninfo
    one_error(elsewhere(*again(elsewhere)), 7, "the publisher")
    elsewhere.connection = "host=127.0.0.1 port=1 dbname=app user=repl"
    one_error(elsewhere(*again(elsewhere)), 4, "could not connect to the publisher")
    elsewhere.connection, elsewhere.target = connection, pubdb.conninfo
    one_error(elsewhere(*again(elsewhere)), 3, 'has no subscription "s"')
    elsewhere.target = to
    words = again(elsewhere)
    one_error(elsewhere("run", "t", *words[2:]), 3, 'has no subscription "t"', 'are "s"')
    subdb.execute("UPDATE pgsub.subscription SET slot_intent = true")
    one_error(elsewhere(*words), 3, "is being created or dropped")
    subdb.execute("UPDATE pgsub.subscription SET slot_intent = false")
    subdb.execute("INSERT INTO pgsub.subscription (subid, subname, state_store) VALUES (8, 's', 'another')")
    one_error(elsewhere(*words), 3, 'has 2 subscriptions "s"', 'number 8, slot none, state store "another"')
    subdb.execute("DELETE FROM pgsub.subscription WHERE subid = 8")
    one_error(elsewhere("run", *words[2:]), 2, "--from-target needs the name of a subscription")
    one_error(elsewhere("run", "s", "--from-target"), 2, "no connection string for the publisher")
    one_error(elsewhere("run", "s", "--connection", connection), 2, "needs --from-target")
    one_error(elsewhere(*words, "--publication", "p"), 2, 'has the publications of "s"')
    assert elsewhere.sql("SELECT count(*) FROM pg_subscription") == [(0,)] and subdb.value(_MOVES) == 0

    one_error(cli("run", "s", "--from-target", "--connection", subdb.conninfo, "--target", to), 3, "left as it is")
    variables = {"PGSUB_CONNECTION": subdb.conninfo, "PGSUB_TARGET": to}
    assert cli("run", "s", "--until-caught-up", env=variables).returncode == 0
    assert subdb.value(_MOVES) == 0
    assert cli("drop", "s", "--yes").returncode == 0


def test_without_options_in_the_ledger_publications_are_given_by_hand_and_nothing_runs_by_guesses(cli, tables):
    pubdb, subdb = tables
    assert cli.create("s", "--no-wait", "--binary").returncode == 0
    subdb.execute("DELETE FROM pgsub.definition")
    lose(cli)
    one_error(cli(*again(cli)), 3, 'does not have the options of subscription "s"', "--publication PUB")
    ended = cli(*again(cli, "--publication", "p", "--until-caught-up"))
    assert ended.returncode == 3 and 'the options of subscription "s" are the defaults' in ended.stderr, ended.stderr
    assert cli("alter", "s", "--binary").returncode == 0
    assert cli("enable", "s").returncode == 0
    assert cli("run", "s", "--until-caught-up").returncode == 0
    assert subdb.rows("SELECT * FROM a ORDER BY id") == pubdb.rows("SELECT * FROM a ORDER BY id")
    assert cli.status()["subbinary"] is True


def test_the_ledger_of_an_older_pgsub_is_upgraded_by_the_rebuild_though_a_worker_was_left_with_its_locks(
    cli, tables, newer
):
    pubdb, subdb = tables
    assert cli.create("s", "--no-wait").returncode == 0
    old = subdb.value(_VERSION)
    lose(cli)
    [(subid, epoch)] = subdb.rows("SELECT subid, epoch FROM pgsub.control WHERE worker = 0")
    with closing(subdb.connect(application_name=f"pgsub {subid} apply {epoch}")) as left:
        left.autocommit = False
        left.execute("SELECT FROM pgsub.control FOR UPDATE")
        ended = cli(*again(cli, "--until-caught-up"), env=newer)
        assert ended.returncode == 0, ended.stderr
    assert subdb.value(_VERSION) == old + 1
    assert subdb.rows("SELECT * FROM a ORDER BY id") == pubdb.rows("SELECT * FROM a ORDER BY id")
    one_error(cli("drop", "s", "--yes"), 10, "this pgsub knows versions up to")
    lose(cli)
    one_error(cli(*again(cli)), 3, f"the ledger on the target has version {old + 1}, this pgsub knows {old}")


def test_what_alter_changes_while_nothing_serves_the_subscription_is_in_the_ledger_and_comes_back(cli, tables):
    assert cli.create("s", "--no-wait").returncode == 0
    tables[0].execute("CREATE PUBLICATION q FOR TABLE a, b")
    assert cli("alter", "s", "--set-publication", "q", "--no-refresh", "--streaming", "off").returncode == 0
    before = shown(cli)
    lose(cli)
    ended = cli(*again(cli, "--until-caught-up"))
    assert ended.returncode == 0 and 'publications "q"' in ended.stderr, ended.stderr
    assert (cli.status()["subpublications"], cli.status()["substream"]) == (["q"], "f")
    assert before["pg_subscription"] == shown(cli)["pg_subscription"]
    assert cli("drop", "s", "--yes").returncode == 0


def test_a_slot_or_publication_that_is_gone_is_said_and_the_subscription_can_be_dropped(cli, tables):
    pubdb, subdb = tables
    assert cli.create("s", "--no-copy-data", "--no-wait").returncode == 0
    lose(cli)
    pubdb.execute("SELECT pg_drop_replication_slot('s'); DROP PUBLICATION p")
    ended = cli(*again(cli, "--until-caught-up", "--timeout", "1m"))
    assert ended.returncode == 7, ended.stderr
    assert 'WARNING:  replication slot "s" does not exist' in ended.stderr
    assert 'WARNING:  publication "p" does not exist on the publisher' in ended.stderr
    assert cli("drop", "s", "--yes").returncode == 0
    nothing_created(cli, pubdb, subdb)


def test_a_slot_past_the_position_of_a_restored_target_is_said_and_the_subscription_can_be_reconciled(cli, tables):
    assert cli.create("s").returncode == 0
    tables[0].execute("INSERT INTO a VALUES (101, 'x')")
    assert cli("run", "s", "--until-caught-up", "--timeout", "2m").returncode == 0
    restored = "DELETE FROM a WHERE id = 101; UPDATE pgsub.progress SET remote_lsn = '0/1', reported_lsn = '0/1'"
    tables[1].execute(restored)
    lose(cli)
    said = cli(*again(cli, "--until-caught-up", "--timeout", "2m"))
    assert said.returncode == 7 and "is past the subscription's position" in said.stderr, said.stderr
    assert "pgsub reconcile s\n" in said.stderr
    made = cli("reconcile", "s", "--yes")
    assert made.returncode == 0, made.stderr
    assert cli("run", "s", "--until-caught-up", "--timeout", "2m").returncode == 0
    assert tables[1].value("SELECT count(*) FROM a") == 101


def test_without_a_launcher_a_command_brings_its_change_to_the_ledger_or_says_that_it_could_not(cli, tables, proxy):
    _, subdb = tables
    way = proxy(subdb.conninfo)
    cli.target = way.conninfo
    assert cli.create("s", "--no-wait", "--no-copy-data").returncode == 0

    def there(option: str) -> str:
        return str(subdb.value(_OPTION.replace("%s", f"'{option}'")))

    for words, option, value in (
        (("disable", "s"), "enabled", "false"),
        (("disable-on-error", "s", "on"), "disable_on_error", "true"),
        (("enable", "s"), "enabled", "true"),
        (("alter", "s", "--streaming", "off"), "streaming", "off"),
    ):
        ended = cli(*words)
        assert ended.returncode == 0 and "WARNING" not in ended.stderr, ended.stderr
        assert there(option) == value
    way.close()
    for words in ("disable", "s"), ("alter", "s", "--streaming", "on"):
        ended = cli(*words)
        assert ended.returncode == 0 and "the target's ledger has the definition as it was before" in ended.stderr
    assert cli.sql("SELECT subenabled, substream FROM pg_subscription") == [(0, "t")]
    assert (there("enabled"), there("streaming")) == ("true", "off")


def test_a_worker_that_still_applies_while_its_subscription_is_rebuilt_is_no_gap(cli, tables, elsewhere, monkeypatch):
    pubdb, subdb = tables
    assert cli.create("s", "--no-wait", "--no-copy-data").returncode == 0
    state = slots.slot_state

    def applied_meanwhile(source, name):
        pubdb.execute("INSERT INTO b VALUES (1, 1)")
        (lsn,) = pubdb.rows("SELECT pg_current_wal_flush_lsn()::text")[0]
        subdb.execute(f"UPDATE pgsub.progress SET remote_lsn = '{lsn}', reported_lsn = '{lsn}'")
        pubdb.execute(f"SELECT pg_replication_slot_advance('{name}', '{lsn}')")
        return state(source, name)

    monkeypatch.setattr(slots, "slot_state", applied_meanwhile)
    options = rebuild.RebuildOptions(("s",), elsewhere.state, elsewhere.connection, elsewhere.target)
    assert rebuild.rebuild(options, reporter=Mock()) is False
    assert elsewhere.sql("SELECT subname FROM pg_subscription") == [("s",)]
