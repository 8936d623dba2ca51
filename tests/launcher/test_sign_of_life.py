"""What a launcher wrote before it stopped to go on is not shown as the present state."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from embedded import Server, _children
from fix_program import Cli, until
from fix_servers import Database, Pair

from pgsub.catalog.locks import subscription_lock

Scene = Callable[[Pair, int], ExitStack]


@contextmanager
def _stopped(first: int) -> Iterator[None]:
    """Stop a process with all that it started, as a container is paused: the kernel goes on to answer for it."""
    found, todo = [first], [first]
    while todo:
        todo = [child for pid in todo for child in _children(pid)]
        found += todo
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in found:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def _locked(database: Database) -> Iterator[None]:
    """Lock a table of the ledger, as VACUUM FULL does, or a session that was forgotten."""
    with closing(database.connect()) as session:
        session.execute("BEGIN")
        session.execute("LOCK TABLE pgsub.progress IN ACCESS EXCLUSIVE MODE")
        yield


def _process(server: Server) -> int:
    assert server._process is not None
    return server._process.pid


@pytest.mark.long
@pytest.mark.parametrize("scene", ["lock", "target", "launcher"])
def test_while_nothing_goes_on_the_status_is_not_green(
    own_pair: Callable[..., Pair], make_cli: Callable[..., Cli], scene: str
) -> None:
    pair = own_pair()
    for database in (pair.pubdb, pair.subdb):
        database.execute("CREATE TABLE a (id int PRIMARY KEY, t text)")
    pair.pubdb.execute("CREATE PUBLICATION p FOR TABLE a")
    cli = make_cli(pair.pubdb.conninfo, pair.subdb.conninfo)
    assert cli.create("s").returncode == 0
    launcher = cli.launcher()
    assert cli("wait", "s", "--for", "caught-up").returncode == 0
    until(lambda: cli("status", "s", "--check", "--max-lag", "5s").returncode == 0)
    waits = {
        "lock": lambda: _locked(pair.subdb),
        "target": lambda: _stopped(_process(pair.target)),
        "launcher": lambda: _stopped(launcher.pid),
    }
    with waits[scene]():
        pair.pubdb.execute("INSERT INTO a SELECT g, 'x' FROM generate_series(1, 100) g")
        until(lambda: cli("status", "s", "--check").returncode == 3)
        seen = cli.status("s")
        assert seen["state"] == "waiting"
        assert seen["task"]["waits_for"] in (
            f"an answer of the target, or of pgsub run (PID {launcher.pid})",
            "its process on an executor, which has not reached the target",  # a next one, in the place of the first
        )
        assert cli("status", "s", "--check", "--max-lag", "5s").returncode == 3
        assert f"ps -o pid,stat,etime,args -p {launcher.pid}" in cli("status", "s", "--runbook").stdout
        assert re.search(r'^pgsub_subscription_state{.*state="waiting".*} 1\.0$', cli("metrics").stdout, re.MULTILINE)
    until(lambda: pair.subdb.value("SELECT count(*) FROM a") == 100)
    until(lambda: cli("status", "s", "--check").returncode == 0)
    said = Path(launcher.log).read_text()
    assert scene == "launcher" or said.index("has not answered for") < said.index("answers again")


def test_who_holds_a_lock_gives_signs_of_life_and_nobody_else(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    held, other = subscription_lock(tmp_path, 1), subscription_lock(tmp_path, 1)
    assert other.silence() == 0
    assert held.acquire()
    os.utime(held.path, (1000, 1000))
    other.touch()
    assert other.silence() > 1000
    held.touch()
    assert other.silence() < 1000


def test_a_state_folder_that_was_moved_away_gets_no_sign_of_life(tmp_path: Path) -> None:
    """What its launcher records is in a new one, so what ``status`` shows of the old one is not the present state."""
    place, moved = tmp_path / "state", tmp_path / "moved"
    place.mkdir(mode=0o700)
    held = subscription_lock(place, 1)
    assert held.acquire()
    place.rename(moved)
    os.utime(moved / held.path.name, (1000, 1000))
    held.touch()
    assert subscription_lock(moved, 1).silence() > 1000


_EPOCH = "SELECT epoch FROM pgsub.control WHERE worker = 0"
_HEARD = "SELECT last_msg_receipt_time FROM pg_stat_subscription WHERE subname = ? AND worker_type = 'apply'"
_END = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name LIKE %s"


def test_what_a_worker_has_heard_is_shown_after_the_target_went_back_in_time(served: tuple[Cli, str]) -> None:
    """The epochs of its workers are lower then than those that the launcher knows."""
    cli, name = served
    with closing(psycopg.connect(cli.target, autocommit=True)) as session:
        [(subid,)] = cli.sql("SELECT oid FROM pg_subscription WHERE subname = ?", name)
        for number in (100, 1):
            session.execute("UPDATE pgsub.control SET epoch = %s WHERE worker = 0", (number,))
            session.execute(_END, (f"pgsub {subid} %",))
            until(lambda number=number: session.execute(_EPOCH).fetchone()[0] > number)
            [before] = cli.sql(_HEARD, name) or [()]
            until(lambda before=before: cli.sql(_HEARD, name) not in ([], [(None,)], [before]))
