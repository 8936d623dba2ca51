"""A command that waits for something on the target says for what, and its --timeout ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from fix_clusters import MakeServer
from fix_failpoints import At
from fix_pair import MakePair, Pair
from fix_program import Cli, one_error
from fix_servers import Database

from pgsub.commands import target_wait
from pgsub.commands.reporter import CallbackReporter
from pgsub.commands.status import next_steps
from pgsub.commands.target_wait import TargetWait
from pgsub.common.errors import ThreadDied, TimeoutExpired


@contextmanager
def locked(database: Database, table: str) -> Iterator[int]:
    """Somebody has locked a table, as VACUUM FULL does; gives the process."""
    with closing(database.connect(application_name="sweeper")) as session:
        session.execute(f"BEGIN; LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        yield session.info.backend_pid


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is patient."""
    for name, seconds in (("AFTER", 0.3), ("EVERY", 0.1), ("GRACE", 0.0)):
        monkeypatch.setattr(target_wait, name, seconds)


def _watching(p: Pair, said: list[str], seconds: float | None = None) -> Any:
    reporter = CallbackReporter(lambda kind, text: said.append(f"{kind}: {text}"))
    return TargetWait(p.session, p.sub, reporter, None if seconds is None else time.monotonic() + seconds)


@pytest.mark.usefixtures("soon")
def test_what_is_waited_for_is_said_once_and_the_command_goes_on_when_it_is_there(pair: MakePair) -> None:
    p, said = pair("CREATE TABLE t (id int PRIMARY KEY)"), list[str]()
    with locked(p.subdb, "t") as pid, _watching(p, said) as watch:
        end = threading.Timer(2.0, lambda: p.subdb.rows("SELECT pg_terminate_backend(%s)", pid))
        end.start()
        p.session.execute("INSERT INTO public.t VALUES (1)")
        end.join()
        assert watch is not None
    [text] = said
    assert text.startswith(
        f'warning: the command for subscription "{p.sub.name}" waits for a lock that PID {pid} holds'
    )
    assert "on table public.t" in text and "sweeper" in text
    assert p.subdb.rows("SELECT id FROM t") == [(1,)]


@pytest.mark.usefixtures("soon")
def test_the_deadline_ends_what_waits_for_a_lock_and_names_its_holder(pair: MakePair) -> None:
    p, said = pair("CREATE TABLE t (id int PRIMARY KEY)"), list[str]()
    with (
        locked(p.subdb, "t") as pid,
        pytest.raises(TimeoutExpired, match="timeout while changing subscription") as raised,
        _watching(p, said, seconds=1.0),
    ):
        p.session.execute("INSERT INTO public.t VALUES (1)")
    assert (
        raised.value.detail is not None
        and f"It waited for a lock that PID {pid} holds on table public.t" in raised.value.detail
    )
    assert p.subdb.rows("SELECT id FROM t") == []
    p.session.execute("INSERT INTO public.t VALUES (2)")


@pytest.mark.usefixtures("soon")
def test_the_deadline_cancels_nothing_that_waits_for_nobody(pair: MakePair) -> None:
    p, said = pair("CREATE TABLE t (id int PRIMARY KEY)"), list[str]()
    with _watching(p, said, seconds=0.0):
        p.session.execute("SELECT pg_sleep(2)")
    assert said == []


@pytest.mark.usefixtures("soon")
def test_a_watch_that_dies_ends_what_it_cannot_limit_any_more(pair: MakePair, at: At) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY)")
    at("thread.target_wait=die@3")
    with locked(p.subdb, "t"), pytest.raises(ThreadDied), _watching(p, [], seconds=60.0):
        p.session.execute("INSERT INTO public.t VALUES (1)")


@pytest.mark.long
def test_the_timeout_of_a_command_holds_while_the_ledger_is_locked(cli: Cli, tables: tuple[Database, Database]) -> None:
    assert cli.create("s", "--no-wait").returncode == 0
    with locked(tables[1], "pgsub.subscription") as pid:
        ended = cli("refresh", "s", "--no-wait", "--timeout", "1s")
        one_error(ended, 8, "timeout while changing subscription", f"PID {pid} holds on table pgsub.subscription")
    assert cli("refresh", "s", "--no-wait", "--timeout", "1m").returncode == 0


def _await_nobody(target: Database) -> None:
    """Have commits of a server wait for a standby that is not there."""
    target.server.query("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    target.server.reload()


@pytest.mark.long
def test_the_query_of_the_runbook_shows_who_waits_for_a_standby(make_server: MakeServer) -> None:
    subdb = Database(make_server(), "app")
    subdb.execute("CREATE TABLE t (id int)")
    _await_nobody(subdb)
    query = next_steps._WAITING.removesuffix(";")
    with closing(subdb.connect(application_name="pgsub 1 apply 1")) as session:
        commit = threading.Thread(target=lambda: session.execute("INSERT INTO t VALUES (1)"))
        commit.start()
        subdb.wait(f"SELECT array_agg(wait_event) = '{{SyncRep}}' FROM ({query}) w")
        subdb.rows("SELECT pg_cancel_backend(%s)", session.info.backend_pid)
        commit.join()


@pytest.mark.long
def test_commands_say_that_a_standby_of_the_target_is_waited_for_and_end_in_time(
    pubdb: Database, make_server: MakeServer, make_cli: Any
) -> None:
    subdb = Database(make_server(track_commit_timestamp=True), "app")
    for database in (pubdb, subdb):
        database.execute("CREATE TABLE a (id int PRIMARY KEY)")
    pubdb.execute("CREATE PUBLICATION p FOR TABLE a")
    cli = make_cli(pubdb.conninfo, subdb.conninfo)
    assert cli.create("s", "--no-wait").returncode == 0
    for database in (pubdb, subdb):
        database.execute("CREATE TABLE b (id int PRIMARY KEY)")
    pubdb.execute("ALTER PUBLICATION p ADD TABLE b")
    _await_nobody(subdb)
    standby = "waits for a synchronous standby of the target to confirm a commit (synchronous_standby_names = 'nobody')"
    ended = cli("refresh", "s", "--no-wait", "--timeout", "8s")  # each COMMIT is done, and not confirmed
    assert ended.returncode in (0, 8) and standby in ended.stderr, ended.stderr
    ended = cli("refresh", "s", "--timeout", "8s")
    assert ended.returncode == 8 and standby in ended.stderr, ended.stderr
    assert set(cli.states()) == {"a", "b"}
    subdb.server.query("ALTER SYSTEM RESET synchronous_standby_names")
    subdb.server.reload()
    assert cli("run", "s", "--until-caught-up", "--timeout", "2m").returncode == 0
    assert cli.states() == {"a": "r", "b": "r"}
