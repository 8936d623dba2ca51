"""No thread of launcher and workers ends unnoticed: each is ended here at a failpoint, and what it did goes on."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
import sources
from fix_failpoints import At
from fix_pair import MakePair
from fix_program import Cli, one_error, until
from fix_servers import Database

from pgsub.apply.stream import publisher_shutdown, spool_space, synchronous_standby
from pgsub.catalog.store import StateStore
from pgsub.common import failpoints
from pgsub.common.errors import StateStoreError, ThreadDied
from pgsub.common.threads import CallTimedOut, TimedExecutor
from pgsub.launcher.recorder import Recorder
from pgsub.publisher.connect import connect
from pgsub.publisher.slot_creation import SlotWatch
from pgsub.publisher.slots import create_slot

#: Threads of a launcher that lives on, and of its workers.
SERVING = (
    *(
        "apply_receiver",
        "janitor",
        "job",
        "jvm_end",
        "jvm_watch",
        "log",
        "notice",
        "heartbeats",
        "recorder",
        "slot_watch",
    ),
    *("spark_start", "sync", "sequences", "signs"),
)
#: What has a test of its own.
OTHERS = (
    *("barrier", "parallel_worker", "pause_limit", "publisher_state", "runner", "slot_creation", "standby_names"),
    *("target_wait", "verify", "wait", "writer"),
)


#: Their threads hand whatever ends them to the one that waits for the result.
POOLS = {"reconcile/reading/sessions.py", "demo/workload.py"}


def test_every_thread_has_an_owner_and_a_test_that_ends_it() -> None:
    started = re.compile(r"threading\.(?:Thread|Timer)\b|ThreadPoolExecutor\(")
    assert {module for module, text in sources.modules().items() if started.search(text)} == {
        "common/threads.py",
        *POOLS,
    }
    points = {name.partition(".")[2] for name in failpoints.POINTS if name.startswith("thread.")}
    assert points == {*SERVING, *OTHERS}


@pytest.mark.long
@pytest.mark.own_spark  # whose end a thread watches
def test_a_launcher_goes_on_whichever_of_its_threads_ends(
    cli: Cli, tables: tuple[Database, Database], reached: Callable[[str], None]
) -> None:
    pubdb, subdb = tables
    assert cli.create("s", "--sequences", "--no-wait").returncode == 0
    folder = cli.state.parent / "reached"
    folder.mkdir()
    deaths = {
        "PGSUB_FAILPOINTS": ";".join(f"thread.{kind}=die" for kind in SERVING),
        "PGSUB_FAILPOINTS_DIR": str(folder),
        "PGSUB_RETRY_SECONDS": "0.2",
    }
    running = cli.launcher("--log-file", str(cli.state.parent / "log"), env=deaths)
    ended = cli("wait", "s", "--for", "caught-up", "--timeout", "2m", env={"PGSUB_RETRY_SECONDS": "0.2"})
    assert ended.returncode == 0 or "SystemExit" in ended.stderr, ended.stderr
    pubdb.execute("INSERT INTO a VALUES (1000, 'later')")
    until(lambda: subdb.rows("SELECT t FROM a WHERE id = 1000") == [("later",)])
    until(lambda: cli.sql("SELECT count(*) FROM pgsub_slot") == [(1,)])
    assert cli.stop(running) == 0
    died = {path.name for path in folder.iterdir()}
    assert died == {f"thread.{kind}" for kind in SERVING}
    for point in died:
        reached(point)


@pytest.mark.long
def test_a_bounded_run_whose_service_ends_unexpectedly_says_so(cli: Cli, reached: Callable[[str], None]) -> None:
    assert cli.create("s", "--no-wait").returncode == 0
    env = {"PGSUB_FAILPOINTS": "thread.runner=die"}
    ended = cli("run", "s", "--until-caught-up", "--timeout", "2m", env=env)
    assert ended.returncode == 12 and 'thread "subscription s" was ended by SystemExit' in ended.stderr, ended.stderr
    reached("thread.runner")


@pytest.mark.long
def test_create_that_only_watches_does_not_watch_for_ever(cli: Cli, reached: Callable[[str], None]) -> None:
    running = cli.launcher()
    ended = cli.create("s", env={"PGSUB_FAILPOINTS": "thread.wait=die"})
    one_error(ended, 12, 'thread "wait" was ended', hint=False)
    reached("thread.wait")
    assert cli.stop(running) == 0


def test_a_transaction_whose_parallel_worker_ends_is_replayed(
    pair: MakePair, at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_space, "SPARE", 0)
    it = pair("CREATE TABLE t (id int PRIMARY KEY, v text)", streaming="parallel")
    at("thread.parallel_worker=die@3")
    it.pubdb.execute(f"ALTER DATABASE {it.pubdb.name} SET logical_decoding_work_mem = '64kB'")
    it.pubdb.execute("INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(1, 20000) g")
    it.catch_up()
    it.same("t")
    assert failpoints._counts["thread.parallel_worker"] == 3


def test_a_creation_of_a_slot_that_nobody_watches_any_more_is_given_up(pubdb: Database, at: At) -> None:
    at("thread.slot_creation=die@3")
    with pubdb.connect() as blocking, connect(pubdb.conninfo, application_name="w", replication=True) as replication:
        with blocking.transaction():
            blocking.execute("CREATE TABLE written (id int)")
            with (
                pytest.raises(ThreadDied, match="slot creation"),
                SlotWatch(replication, pubdb.conninfo, "w_slot", lambda *said: None, stop=threading.Event()),
            ):
                create_slot(replication, "w_slot")
    assert pubdb.rows("SELECT FROM pg_replication_slots WHERE slot_name = 'w_slot'") == []


def test_a_look_at_the_names_of_standbys_that_ends_is_followed_by_another(
    pubdb: Database, at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synchronous_standby, "CHECK_SECONDS", 0.0)
    at("thread.standby_names=die")
    names = synchronous_standby.StandbyNames(pubdb.conninfo, "x", True)
    names.waits()
    deadline = time.monotonic() + 60
    while names.waits():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_look_at_a_publisher_that_shuts_down_that_ends_is_followed_by_another(
    pubdb: Database, at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_shutdown, "_CHECK_SECONDS", 0.0)
    at("thread.publisher_state=die")
    with connect(pubdb.conninfo, application_name="x", replication=True) as replication:
        watch = publisher_shutdown.PublisherShutdown(replication)
        watch._refuses(1.0)
        first = watch._check_thread
        assert first is not None
        first.join()
        assert isinstance(first.fatal_error, ThreadDied)
        watch._refuses(2.0)
        assert watch._check_thread is not None and watch._check_thread is not first
        watch._check_thread.join()
        assert watch._check_thread.fatal_error is None


def test_what_a_executor_cannot_do_in_time_holds_nobody_up_and_is_done_again_when_he_can(at: At) -> None:
    executor, go = TimedExecutor("recorder", 0.05), threading.Event()
    assert executor.run(lambda: 1) == 1
    done: list[str] = []
    with pytest.raises(CallTimedOut):
        executor.run(lambda: go.wait() and done.append("late"))
    executor._patience = 3600.0  # nobody waits for the one that is late
    for _ in range(100):
        with pytest.raises(CallTimedOut):
            executor.run(lambda: done.append("never"))
    go.set()
    deadline = time.monotonic() + 30
    while True:
        try:
            executor.run(lambda: done.append("next"))
            break
        except CallTimedOut:
            assert time.monotonic() < deadline
    assert done == ["late", "next"]
    with pytest.raises(psycopg.OperationalError):
        executor.run(lambda: (_ for _ in ()).throw(psycopg.OperationalError("x")))
    executor.close()


def test_a_store_that_answers_somebody_else_at_that_moment_is_an_error_of_the_store_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with StateStore.open(tmp_path) as store:
        recorder = Recorder(store, lambda level, text: said.append(f"{level}: {text}"))
        failed = recorder._failed

        def while_another_thread_succeeds(error: StateStoreError) -> None:
            failed(error)
            recorder._works()

        def fail() -> None:
            raise StateStoreError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(recorder, "_failed", while_another_thread_succeeds)
            with pytest.raises(StateStoreError, match="no room"):
                recorder.run(fail)
        assert recorder.run(lambda: 1) == 1
        recorder.close()
    assert [text.partition(":")[0] for text in said] == ["ERROR", "LOG"]
