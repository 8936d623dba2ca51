"""A switchover whose servers are killed in the pause, or cannot be reached; and one whose servers ask for passwords."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fix_program import Cli, until
from fix_servers import Pair
from fix_switchover import moving
from switching_clients import Clients
from thorough import thorough

MakeCli = Callable[[str, str], Cli]
MakePair = Callable[..., Pair]

#: Who is killed, and the step at which: 0 gives the right to write, 1 takes it.
KILLED = [
    (0, "drained"),
    (1, "given"),
    *thorough(
        [(side, step) for side in (0, 1) for step in ("prepared", "fenced", "recorded", "advanced", "given", "taken")]
    ),
]


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
        first.wait(120)
        until(lambda: cli(*words).returncode in (0, 3))  # 3: it has been switched over already
        mover.side = 1
        assert [row["subname"] for row in mover.subscriptions()] == ["moved_back"]
        until(lambda: clients.wrote_on(1, since) or clients.faults)
        assert clients.both_wrote(since, 1) == []
    mover.audit(clients)
    assert cli.stop(running) == 0


def test_an_abort_needs_the_target_only_for_what_was_made_there(make_cli: MakeCli, own_pair: MakePair) -> None:
    pair = own_pair()
    cli = make_cli("", "")
    running = cli.launcher(env={"PGSUB_RETRY_SECONDS": "0.5"})
    mover = moving(cli, (pair.pubdb, pair.subdb))
    mover("--no-verify", kill="drained")
    pair.target.kill9()
    ended = cli("switchover", "moved", "--abort", "--yes")
    assert ended.returncode == 0 and "pgsub switchover moved --abort" in ended.stderr, ended.stderr
    mover.rows(0, "INSERT INTO writes (client, number) VALUES (0, 1) RETURNING id")
    pair.target.start()
    assert mover("--abort")["state"] == "as before"
    assert mover.rows(1, "SELECT count(*) FROM pg_replication_slots") == [(0,)]
    mover.caught_up()
    assert cli.stop(running) == 0


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
