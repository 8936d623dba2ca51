"""A switchover whose servers are killed in the pause, or are gone for good; and one whose servers ask for passwords."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import psycopg
import pytest
from fix_clusters import MakeServer, replayed
from fix_program import Cli, one_error, until
from fix_servers import Database, Pair
from fix_switchover import Mover, moving
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from switching_clients import Clients
from thorough import thorough

pytestmark = pytest.mark.long

MakeCli = Callable[[str, str], Cli]
MakePair = Callable[..., Pair]
#: Servers of their own, and the subscription between them.
Apart = tuple[Pair, Mover]

#: Who is killed, and the step at which: 0 gives the right to write, 1 takes it.
KILLED = [
    (0, "drained"),
    (1, "given"),
    *thorough(
        [(side, step) for side in (0, 1) for step in ("prepared", "fenced", "recorded", "advanced", "given", "taken")]
    ),
]


@pytest.fixture
def apart(make_cli: MakeCli, own_pair: MakePair) -> Iterator[Apart]:
    """Two servers that may be killed, and a subscription between them that a launcher serves."""
    pair, cli = own_pair(), make_cli("", "")
    running = cli.launcher(env={"PGSUB_RETRY_SECONDS": "0.5"})
    yield pair, moving(cli, (pair.pubdb, pair.subdb))
    assert cli.stop(running) == 0


@pytest.mark.parametrize(("side", "step"), KILLED)
def test_a_server_that_is_killed_in_the_pause_loses_no_write(
    make_cli: MakeCli, own_pair: MakePair, tmp_path: Path, side: int, step: str
) -> None:
    pair = own_pair(target={"wal_writer_delay": "10s"})
    cli = make_cli("", "")
    running = cli.launcher(env={"PGSUB_RETRY_SECONDS": "0.5"})
    mover = moving(cli, (pair.pubdb, pair.subdb))
    go, marks = tmp_path / "go", tmp_path / "marks"
    marks.mkdir()
    with Clients(mover.conninfos) as clients:
        since = time.monotonic()
        until(lambda: len(clients.acknowledged) > 50)
        words = ("switchover", "moved", "--yes", "--no-verify", "--timeout", "2m")
        env = {"PGSUB_FAILPOINTS": f"switchover.{step}=pause:{go}", "PGSUB_FAILPOINTS_DIR": str(marks)}
        first = cli.start(*words, env=env)
        until(lambda: (marks / f"switchover.{step}").exists())
        server = (pair.publisher, pair.target)[side]
        server.kill9()
        server.start()
        go.touch()
        code = first.wait(120)
        # the publisher had given the right: the same run takes it, once the target is back
        assert (side, step) != (1, "given") or code == 0, first.log.read_text()  # type: ignore[union-attr]
        until(lambda: cli(*words).returncode in (0, 3))  # 3: it has been switched over already
        mover.side = 1
        assert [row["subname"] for row in mover.subscriptions()] == ["moved_back"]
        until(lambda: clients.wrote_on(1, since) or clients.faults)
        assert clients.both_wrote(since, 1) == []
    mover.audit(clients)
    assert cli.stop(running) == 0


def test_an_abort_needs_the_target_only_for_what_was_made_there(apart: Apart) -> None:
    pair, mover = apart
    mover("--no-verify", kill="drained")
    pair.target.kill9()
    ended = mover.cli("switchover", "moved", "--abort", "--yes")
    assert ended.returncode == 0 and "pgsub switchover moved --abort" in ended.stderr, ended.stderr
    mover.rows(0, "INSERT INTO writes (client, number) VALUES (0, 1) RETURNING id")
    pair.target.start()
    assert mover("--abort")["state"] == "as before"
    assert mover.rows(1, "SELECT count(*) FROM pg_replication_slots") == [(0,)]
    mover.caught_up()


@pytest.mark.parametrize(("number", "trying"), [(signal.SIGINT, False), (signal.SIGINT, True), (signal.SIGTERM, False)])
def test_who_interrupts_it_while_a_server_is_away_reads_what_is_left_and_it_does_not_go_on(
    apart: Apart, tmp_path: Path, number: int, trying: bool
) -> None:
    pair, mover = apart
    first = mover.held("fenced", tmp_path, "--timeout", "2m")
    pair.publisher.kill9()
    if trying:
        (tmp_path / "go").touch()
        until(lambda: "trying again" in first.log.read_text())  # type: ignore[union-attr]
    first.send_signal(number)
    assert first.wait(120) == (130 if number == signal.SIGINT else -number)
    said = first.log.read_text()  # type: ignore[union-attr]
    assert "was not undone" in said and "pgsub switchover moved --abort" in said, said
    pair.publisher.start()
    assert mover("--abort")["state"] == "as before"
    mover.rows(0, _WRITE)


def test_a_subscription_of_a_switchover_is_not_dropped_because_its_target_is_away(apart: Apart) -> None:
    pair, mover = apart
    mover("--no-verify", kill="fenced")
    pair.target.kill9()
    for name in ("moved", "moved_back"):
        for words in (("--yes",), ("--keep-target", "--yes"), ("--keep-target", "--keep-slot", "--yes")):
            if name == "moved" or "--keep-target" in words:
                ended = mover.cli("drop", name, *words)
                one_error(ended, 3, f'"{name}" takes part in a switchover', "pgsub switchover moved --status")
    pair.target.start()
    assert mover("--abort")["state"] == "as before"
    mover.rows(0, _WRITE)


@pytest.mark.parametrize("away", [False, True])
def test_a_state_folder_from_before_a_switchover_that_is_under_way_lets_clients_write_on_the_publisher_again(
    apart: Apart, away: bool
) -> None:
    pair, mover = apart
    mover("--no-verify", kill="fenced")
    with closing(sqlite3.connect(mover.cli.state / "state.db")) as store, store:
        store.execute("DELETE FROM pg_subscription WHERE subname = 'moved_back'")
    told = "pgsub switchover moved --abort"
    found = mover("--status")
    assert (found["giving"], [one["command"] for one in found["choices"]]) == ("fenced", [told])
    if away:
        pair.publisher.kill9()
    ended = mover.cli(*told.split()[1:], "--yes")
    assert ended.returncode == 0 and "pg_drop_replication_slot('moved_back')" in ended.stderr, ended.stderr
    if away:
        assert "the publisher cannot be reached, and may keep clients from writing" in ended.stderr, ended.stderr
        pair.publisher.start()
        assert mover("--abort")["state"] == "as before"
    mover.rows(0, _WRITE)
    mover.caught_up()
    assert mover("--status")["state"] == "none"


def test_a_target_that_dies_in_the_pause_and_stays_away_ends_it(apart: Apart, tmp_path: Path) -> None:
    pair, mover = apart
    first = mover.held("drained", tmp_path, "--timeout", "2m")
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        mover.rows(0, _WRITE)
    pair.target.kill9()
    (tmp_path / "go").touch()
    until(lambda: mover.rows(0, "SELECT phase FROM pgsub.switchover") == [("releasing",)])
    mover.rows(0, _WRITE)
    pair.target.start()
    first.wait(120)
    assert mover("--abort")["state"] == "as before"
    mover.rows(0, _WRITE)


_WRITE = "INSERT INTO writes (client, number) VALUES (0, 1) RETURNING id"
_SLOTS = "SELECT count(*) FROM pg_replication_slots"


def _refused(mover: Mover, *options: str, code: int = 3, says: str, hint: str) -> None:
    ended = mover.cli("switchover", "moved", "--yes", "--no-verify", *options)
    one_error(ended, code, says, hint)


@pytest.mark.parametrize("step", ["taken", *thorough(["promoted", "disabled", "enabled", "done"])])
def test_what_the_target_has_taken_is_brought_to_its_end_though_the_publisher_is_gone_for_good(
    apart: Apart, tmp_path: Path, reached: Callable[[str], None], step: str
) -> None:
    pair, mover = apart
    told = ("--promote-command", f"echo $PGSUB_SWITCHOVER >> {tmp_path}/told")
    mover("--no-verify", *told, kill=step)
    _refused(mover, *told, "--gone", "publisher", says="the publisher is not gone: it answers", hint="--status")
    pair.publisher.kill9()
    found = mover("--status")
    assert (found["state"], found["giving"], found["unreachable"]) == ("under way", None, ["giving"])
    go_on = "pgsub switchover moved" + (" --promote-command COMMAND" if step == "taken" else "")
    assert [one["command"] for one in found["choices"]] == [go_on, f"{go_on} --gone publisher"]
    # clients are told, and write; only the slot on the publisher cannot be dropped
    _refused(mover, *told, code=4, says="could not connect to the publisher", hint="--gone publisher")
    assert (tmp_path / "told").read_text().split() == ["promote"]
    mover.rows(1, _WRITE)
    assert [row["subname"] for row in mover.subscriptions()] == ["moved", "moved_back"]
    mover("--no-verify", "--gone", "publisher", kill="back_dropped")
    reached("switchover.back_dropped")
    ended = mover("--no-verify", "--gone", "publisher")
    assert (ended["state"], ended["giving"], ended["taking"]) == ("done", None, "done")
    assert mover.subscriptions() == [] and mover.rows(1, _SLOTS) == [(0,)]


def test_a_standby_without_the_fence_that_takes_the_place_of_the_publisher_is_fenced_and_told(
    apart: Apart, make_server: MakeServer, tmp_path: Path
) -> None:
    pair, mover = apart
    standby, go = make_server(standby_of=pair.publisher), tmp_path / "go"
    points = f"switchover.prepared=pause:{go};switchover.taken=kill"
    env = {"PGSUB_FAILPOINTS": points, "PGSUB_FAILPOINTS_DIR": str(tmp_path)}
    first = mover.cli.start("switchover", "moved", "--yes", "--no-verify", "--timeout", "2m", env=env)
    until((tmp_path / "switchover.prepared").exists)
    replayed(pair.pubdb, Database(standby, "app", there=True))
    standby.stop()
    go.touch()
    assert first.wait(120) == -9
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        mover.rows(0, _WRITE)
    pair.publisher.kill9()
    standby.port = pair.publisher.port
    standby.append_conf({"port": standby.port})
    standby.start()
    standby.query("SELECT pg_promote()")
    mover.rows(0, _WRITE)
    mover.rows(1, _WRITE)
    _refused(mover, says="the publisher has lost changes since", hint="pgsub verify moved_back --rows")
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        mover.rows(0, _WRITE)
    mover.rows(1, _WRITE)


def test_a_target_that_has_taken_nothing_is_left_as_it_was_though_the_publisher_is_gone_for_good(apart: Apart) -> None:
    pair, mover = apart
    settings = "SELECT setconfig FROM pg_db_role_setting"
    before = mover.rows(1, settings)
    mover("--no-verify", kill="given")
    pair.publisher.kill9()
    assert "it is not known whether clients write there" in mover("--status")["said"]
    _refused(mover, code=4, says="could not connect to the publisher", hint="--abort --gone publisher")
    _refused(mover, "--gone", "publisher", says="has not taken the right", hint="--abort --gone publisher")
    mover("--abort", "--gone", "publisher", kill="declined")
    assert "it is not known whether clients write there" in mover("--status")["said"]
    pair.publisher.start()
    assert "still keeps clients from writing" in mover("--status")["said"]
    pair.publisher.kill9()
    assert mover("--abort", "--gone", "publisher")["state"] == "as before"
    assert mover.rows(1, settings) == before and mover.rows(1, _SLOTS) == [(0,)]
    assert [row["subname"] for row in mover.subscriptions()] == ["moved"]
    assert mover("--abort")["state"] == "as before"
    # it is found again: nobody can write there before the target, which took nothing, has said so
    pair.publisher.start()
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        mover.rows(0, _WRITE)
    found = mover("--status")
    assert (found["giving"], found["taking"]) == ("given", "declined") and "is back" in found["said"]
    assert [one["command"] for one in found["choices"]] == ["pgsub switchover moved --abort"]
    for _ in range(2):
        assert mover("--abort")["state"] == "as before"
    assert mover("--status")["state"] == "none"
    mover.rows(0, _WRITE)
    mover.caught_up()
    assert mover.rows(0, "SELECT phase FROM pgsub.switchover") == [("released",)]
    assert mover.rows(0, "SELECT count(*) FROM pgsub.subscription") == [(0,)]
    assert mover("--no-verify")["state"] == "done"


@pytest.mark.parametrize("gone", ["publisher", "target"])
def test_a_command_that_fences_is_told_to_release_though_a_server_is_gone_for_good(
    apart: Apart, tmp_path: Path, gone: str
) -> None:
    pair, mover = apart
    fencing = ("--fence-command", f"echo $PGSUB_SWITCHOVER $PGSUB_GIVING >> {tmp_path}/told")
    mover("--no-verify", *fencing, kill="given")
    (pair.publisher if gone == "publisher" else pair.target).kill9()
    _refused(mover, "--abort", "--gone", gone, code=2, says="begun with --fence-command", hint="--fence-command")
    assert mover("--abort", "--gone", gone, *fencing)["state"] == "as before"
    told = (tmp_path / "told").read_text().splitlines()
    assert [line.split()[0] for line in told] == ["fence", "release"]
    assert all(f"port={pair.publisher.port}" in line for line in told)


@pytest.mark.parametrize("step", ["given", *thorough(["fenced", "taken"])])
def test_clients_write_on_the_publisher_again_where_the_target_is_gone_for_good(apart: Apart, step: str) -> None:
    pair, mover = apart
    mover("--no-verify", kill=step)
    _refused(mover, "--abort", "--gone", "target", says="the target is not gone: it answers", hint="--status")
    _refused(mover, "--gone", "target", code=2, says="goes with --abort", hint="--abort --gone target")
    pair.target.kill9()
    found = mover("--status")
    assert (found["state"], found["taking"], found["unreachable"]) == ("under way", None, ["taking"])
    commands = [one["command"].removeprefix("pgsub switchover moved") for one in found["choices"]]
    assert commands == [" --abort" if step == "fenced" else "", " --abort --gone target"]
    if step != "fenced":
        assert "may have taken it" in found["said"]
        _refused(mover, "--abort", code=5, says="was given to a server that cannot be reached", hint="--gone target")
    mover("--abort", "--gone", "target", kill="releasing")
    for _ in range(2):
        assert mover("--abort", "--gone", "target")["state"] == "as before"
    mover.rows(0, _WRITE)
    assert [row["subname"] for row in mover.subscriptions()] == ["moved"]
    assert mover.cli("drop", "moved", "--keep-target", "--yes").returncode == 0
    assert mover.rows(0, _SLOTS) == [(0,)]


def test_clients_write_on_the_old_server_where_the_new_one_is_lost_for_good_while_writes_are_moved_back(
    apart: Apart,
) -> None:
    pair, mover = apart
    mover("--no-verify")
    mover.side = 1
    mover.caught_up()
    mover("--no-verify", kill="prepared")
    pair.target.kill9()
    lead = "pgsub switchover moved --abort --gone target"
    one_error(mover.cli(*lead.split()[1:], "--yes"), 3, "a switchover of subscription", "--abort")
    ended = mover.cli("switchover", "moved", "--back", "--abort", "--gone", "publisher", "--yes")
    assert ended.returncode == 0 and lead in ended.stderr and "pgsub drop" not in ended.stderr, ended.stderr
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        mover.rows(0, _WRITE)
    ended = mover.cli(*lead.split()[1:], "--yes")
    assert ended.returncode == 0, ended.stderr
    mover.rows(0, _WRITE)
    assert mover.subscriptions() == []


def test_sequences_are_warned_of_before_clients_write_on_the_publisher_again(apart: Apart) -> None:
    pair, mover = apart
    mover("--no-verify", kill="enabled")
    mover.rows(1, _WRITE)
    until(lambda: mover.rows(0, "SELECT count(*) FROM writes") == [(1,)])
    pair.target.kill9()
    words = ("switchover", "moved", "--abort", "--gone", "target", "--yes")
    killed = mover.cli(*words, env={"PGSUB_FAILPOINTS": "switchover.releasing=kill"})
    assert killed.returncode == -9 and "sequences of the publisher may be behind" in killed.stderr, killed.stderr
    ended = mover.cli(*words)
    assert ended.returncode == 0 and "sequences of the publisher may be behind" in ended.stderr, ended.stderr


def test_clients_write_on_the_publisher_again_where_the_target_is_lost_for_good_after_the_switchover(
    apart: Apart,
) -> None:
    pair, mover = apart
    mover("--no-verify")
    mover.rows(1, _WRITE)
    mover.side = 1
    mover.caught_up()
    mover.side = 0
    _refused(mover, "--abort", "--gone", "target", says="the target is not gone: it answers", hint="--status")
    pair.target.kill9()
    found = mover("--status")
    assert (found["state"], found["giving"], found["unreachable"]) == ("done", "given", ["taking"])
    assert [one["command"] for one in found["choices"]] == ["pgsub switchover moved --abort --gone target"]
    _refused(mover, "--abort", code=5, says="could not connect to the target", hint="--abort --gone target")
    mover("--abort", "--gone", "target", kill="releasing")
    found = mover("--abort", "--gone", "target")
    assert (found["state"], found["giving"], found["taking"]) == ("as before", "released", None)
    assert mover.rows(0, "SELECT number FROM writes") == [(1,)]  # what had come back
    mover.rows(0, "SELECT setval('writes_id_seq', 9)")
    mover.rows(0, _WRITE)
    assert mover.subscriptions() == []


@pytest.mark.parametrize("step", [None, "enabled"])
def test_a_standby_of_the_target_that_lags_does_not_show_that_the_target_has_lost_the_switchover(
    make_cli: MakeCli, own_pair: MakePair, make_server: MakeServer, step: str | None
) -> None:
    pair = own_pair()
    cli = make_cli("", "")
    running = cli.launcher(env={"PGSUB_RETRY_SECONDS": "0.5"})
    standby = make_server(standby_of=pair.target)
    hosts = f"host=127.0.0.1,127.0.0.1 port={pair.target.port},{standby.port}"
    target = make_conninfo(**{**conninfo_to_dict(pair.subdb.conninfo), **conninfo_to_dict(hosts)})
    mover = moving(cli, (pair.pubdb, pair.subdb), (pair.pubdb.conninfo, target))
    replayed(pair.subdb, Database(standby, "app", there=True))
    standby.query("SELECT pg_wal_replay_pause()")
    mover("--no-verify", kill=step)
    pair.target.stop()
    assert mover("--status")["unreachable"] == ["taking"]
    for way in ("--abort", "--no-verify") if step else ("--abort",):
        ended = cli("switchover", "moved", way, "--yes")
        said = "cannot be reached" if step and way == "--abort" else "a standby of the"
        one_error(ended, 5, said)
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            mover.rows(0, _WRITE)
    pair.target.start()
    assert mover("--no-verify")["state"] == "done" if step else mover("--status")["state"] == "done"
    mover.rows(1, _WRITE)
    assert cli.stop(running) == 0


@pytest.mark.parametrize(
    ("step", "again"), [(None, True), ("given", False), *thorough([(None, False), ("given", True)])]
)
def test_clients_write_on_the_publisher_again_where_the_database_of_the_target_was_dropped(
    apart: Apart, step: str | None, again: bool
) -> None:
    pair, mover = apart
    mover("--no-verify", kill=step)
    pair.subdb.close()
    until(lambda: _dropped(pair))
    if again:
        pair.target.query("CREATE DATABASE app")
    told = "pgsub switchover moved --abort --gone target"
    found = mover("--status")
    assert (found["state"], found["giving"]) == ("done" if step is None else "under way", "given")
    assert found["choices"][-1]["command"] == told
    if again:
        code = 7 if step is None else 3
        hint = told if step is None else "pgsub switchover moved --status"
        _refused(mover, code=code, says="different", hint=hint)
        _refused(mover, "--abort", code=7, says="the target's database is a different one", hint=told)
    mover("--abort", "--gone", "target")
    mover.rows(0, _WRITE)
    assert [row["subname"] for row in mover.subscriptions()] == ["moved"] * (step is not None)


def _dropped(pair: Pair) -> bool:
    """Drop the target's database, which the worker of the way back may use meanwhile."""
    with suppress(psycopg.Error), pair.target.connect() as session:
        session.execute("SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots WHERE active")
        session.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        session.execute("DROP DATABASE app WITH (FORCE)")
        return True
    return False


def test_passwords_go_both_ways_and_appear_nowhere(make_cli: MakeCli, own_pair: MakePair) -> None:
    pair = own_pair(password="S3NT: \\ NEL")
    cli = make_cli("", "")
    running = cli.launcher()
    mover = moving(cli, (pair.pubdb, pair.subdb))
    for _ in range(2):
        assert mover("--no-verify")["state"] == "done"
        mover.side = 1 - mover.side
        mover.caught_up()
    files = [path for path in cli.state.rglob("*") if path.is_file() and "S3NT" in path.read_text(errors="replace")]
    assert files and all(path.parent.name == "passfiles" for path in files)
    assert len(files) == 2
    assert cli.stop(running) == 0
