"""Promises of job submission, on a real Spark."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from weakref import WeakSet

import patience
import pyspark
import pytest
from fix_faults import until
from spark import task_functions as tasks

from pgsub.apply.worker import executor_requirements
from pgsub.common.errors import ApplyError, Directive, InternalError, PgsubError, SparkUnusable, TimeoutExpired
from pgsub.common.subscription import Subscription
from pgsub.launcher.spark import driver_watch, executor_check
from pgsub.launcher.spark.driver import Engine
from pgsub.launcher.spark.driver_watch import Hang, SparkWatch
from pgsub.launcher.spark.executor_check import ExecutorCheck
from pgsub.protocol.messages import Relation
from pgsub.spark import contexts, executors, session
from pgsub.spark.jobs import JobCancelled, Submitter, WorkerDied
from pgsub.spark.jvm.process import environ
from pgsub.spark.session import close_context, open_context
from pgsub.tablesync.copy.plan import Chunk
from pgsub.tablesync.copy.row_by_row import CopiedTable
from pgsub.tablesync.copy.task import Piece
from pgsub.target.ledger.tables.chunks import ChunkKey
from pgsub.target.ledger.worker_takeover import Claim


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    with environ({"PYTHONPATH": str(Path(tasks.__file__).parents[1])}):
        opened = open_context(4, tmp_path_factory.mktemp("state"), imported=("no_such_module", "wave"))
        yield opened
        close_context(opened)


@pytest.fixture
def submitter(context):
    return Submitter(context)


@pytest.mark.long
def test_results_come_in_the_order_of_the_items(submitter):
    assert submitter.submit("double", tasks.double, [3, 1, 2]).result(60) == [6, 2, 4]
    assert submitter.submit("double", tasks.double, list(range(20))).result(60) == list(range(0, 40, 2))
    assert submitter.submit("double", tasks.double, []).result(60) == []


@pytest.mark.long
def test_workers_find_imported_what_was_named_and_a_name_that_is_wrong_keeps_none_from_its_work(submitter):
    assert submitter.submit("imported", tasks.imported, ["wave", "no_such_module"]).result(60) == [True, False]


@pytest.mark.long
def test_an_exception_of_a_task_comes_back_as_itself_with_all_its_fields(submitter):
    with pytest.raises(ApplyError) as raised:
        submitter.submit("apply", tasks.fail_as_apply_does, [1]).result(60)
    error = raised.value
    assert (error.message, error.detail) == ("could not apply", "Key (id)=(1) already exists.")
    assert (error.sqlstate, error.relation, error.finish_lsn) == ("23505", "public.t", "0/15F2A40")
    assert (error.xid, error.conflict, error.directive) == (740, "insert_exists", Directive.FAULT)


def test_any_other_exception_is_a_bug_and_brings_its_traceback(submitter):
    with pytest.raises(InternalError, match="ZeroDivisionError in a task: division by zero") as raised:
        submitter.submit("divide", tasks.divide_by, [1, 0]).result(60)
    assert "task_functions.py" in raised.value.detail
    with pytest.raises(InternalError, match="SystemExit in a task"):
        submitter.submit("exit", tasks.exit_quietly, [0]).result(60)


def test_a_killed_worker_is_reported_and_may_be_tried_again(submitter):
    with pytest.raises(WorkerDied, match='worker process of job "die" died') as raised:
        submitter.submit("die", tasks.die, [0]).result(60)
    assert raised.value.directive is Directive.RETRY
    assert submitter.submit("double", tasks.double, [1]).result(60) == [2]


def test_the_death_of_one_worker_does_not_end_the_tasks_beside_it(submitter):
    job = submitter.submit("die or double", tasks.die_or_double, [0, 1, 2])
    with pytest.raises(WorkerDied):
        job.result(60)
    assert job._results == {0: 0, 2: 4}


def test_a_guard_keeps_a_task_from_reading_its_item(submitter, context, tmp_path):
    guarded = Submitter(context, partial(tasks.fail_as_apply_does, 0))
    with pytest.raises(ApplyError, match="could not apply"):
        guarded.submit("mark", tasks.die_until, [(str(tmp_path), 1)]).result(patience.SECONDS)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_what_a_copy_of_thousands_of_pieces_is_given_is_not_too_large_for_a_task(submitter, context, monkeypatch):
    """1 TB in chunks of 64 MB: Spark warns of a task of 1 MiB, and pyspark makes a broadcast of a larger function."""
    claim = Claim(1_804_289_383, 16_385, 7, "0123456789abcdef" * 2)
    rows = "COPY (SELECT id, item, pad FROM ONLY public.orders WHERE ctid >= '({},0)' AND ctid < '({},0)') TO STDOUT"
    chunks = [Chunk(n, rows.format(8192 * n, 8192 * (n + 1)), 64 << 20, 500_000) for n in range(16_384)]
    copied = CopiedTable(Relation(1, "public", "orders", "d", ()), "", 1, "", False, False, None, True, ())
    pieces = tuple(Piece(ChunkKey(claim, 1, chunk.number), chunk, copied) for chunk in chunks)
    broadcast = []
    monkeypatch.setattr(context, "broadcast", broadcast.append)
    assert submitter.submit("copy", len, [pieces]).result(patience.SECONDS) == [16_384]
    assert not broadcast


@pytest.mark.long
def test_a_long_task_does_not_keep_other_jobs_waiting(submitter, tmp_path):
    long = submitter.submit("long", tasks.mark_and_wait, [str(tmp_path)] * 3)
    assert submitter.submit("double", tasks.double, [1, 2]).result(60) == [2, 4]
    assert not long.done()
    long.cancel()
    assert long.wait(patience.SECONDS)


@pytest.mark.long
def test_waiting_has_a_bound_and_the_job_goes_on(submitter, tmp_path):
    job = submitter.submit("long", tasks.interval, [2.0])
    with pytest.raises(TimeoutExpired, match='job "long" still runs'):
        job.result(0.01)
    assert len(job.result(60)) == 1


@pytest.mark.long
def test_a_cancelled_job_frees_the_driver_and_its_worker_ends(submitter, tmp_path):
    job = submitter.submit("long", tasks.mark_and_wait, [str(tmp_path)])
    pid = int(_first_file(tmp_path).name)
    job.cancel()
    with pytest.raises(JobCancelled, match='job "long" was cancelled'):
        job.result(60)
    deadline = time.monotonic() + patience.SECONDS
    while _exists(pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_job_cancelled_at_once_starts_nothing_later(submitter, tmp_path):
    job = submitter.submit("long", tasks.mark_and_wait, [str(tmp_path)] * 5)
    job.cancel()
    with pytest.raises(JobCancelled):
        job.result(60)


def test_jobs_go_on_though_the_files_of_spark_were_cleaned_up(submitter, context):
    shutil.rmtree(context._temp_dir)
    assert submitter.submit("double", tasks.double, [4]).result(60) == [8]


def test_the_files_of_jobs_are_not_written_where_another_user_could_exchange_them(submitter, context, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    taken.chmod(0o777)  # by whoever made a folder of the name that a cleaner had removed
    context._temp_dir = str(taken / "pyspark")
    assert submitter.submit("double", tasks.double, [5]).result(60) == [10]
    assert not list(taken.iterdir())
    (taken / "pyspark").mkdir(mode=0o700)
    context._temp_dir = str(taken / "pyspark")
    assert submitter.submit("double", tasks.double, [6]).result(60) == [12]
    assert context._temp_dir != str(taken / "pyspark")


def test_workers_run_this_interpreter_and_the_installed_package_with_a_private_umask(submitter):
    [(pid, executable, package, mask)] = submitter.submit("worker", tasks.worker, [0]).result(60)
    assert pid != os.getpid()
    assert executable == sys.executable
    assert package == pyspark.__file__
    assert mask == 0o077


def test_a_job_that_somebody_ends_on_the_pages_of_spark_is_no_bug_and_may_be_tried_again(submitter, tmp_path):
    job = submitter.submit("long", tasks.mark_and_wait, [str(tmp_path)])
    assert _first_file(tmp_path)
    submitter._context.cancelAllJobs()  # whatever is ended there says the same
    with pytest.raises(WorkerDied, match='job "long" was ended by Spark') as raised:
        job.result(patience.SECONDS)
    assert (raised.value.directive, raised.value.exit_code) == (Directive.RETRY, 13)


def test_a_failure_of_spark_that_no_retry_mends_is_its_own_and_no_bug(submitter, context, monkeypatch):
    monkeypatch.setattr(context, "parallelize", lambda *_: context.textFile("file:///nowhere"))
    with pytest.raises(SparkUnusable, match='job "double" failed in Spark') as raised:
        submitter.submit("double", tasks.double, [1]).result(patience.SECONDS)
    assert raised.value.directive is Directive.STOP


@pytest.mark.long
def test_a_service_that_only_some_subscriptions_lack_stops_none_of_the_others(submitter, tmp_path):
    """A look at an executor that no subscription can be served from is an error, of whoever asks for it."""
    lacking = Subscription(1, "lacking", "service=no_such", "service=no_such", (), None)
    other = Subscription(2, "other", "host=127.0.0.1 port=1", "host=127.0.0.1 port=1", (), None)
    said: list[str] = []
    check = ExecutorCheck(lambda level, text: said.append(f"{level}: {text}"), lambda: False)
    check.run(submitter, [lacking, other], str(tmp_path))
    named = 'service "no_such" of the target is not defined on the executors'
    assert any(text.startswith(f'ERROR: subscription "lacking": {named}') for text in said)
    assert any(text.startswith('ERROR: subscription "other": could not connect to the target') for text in said)
    with pytest.raises(SparkUnusable, match=named):
        check.run(submitter, [lacking], str(tmp_path))


@pytest.mark.long
def test_an_executor_that_is_lost_during_the_look_at_it_is_followed_by_a_look_at_another(
    submitter, tmp_path, monkeypatch
):
    said: list[str] = []
    check = ExecutorCheck(lambda level, text: said.append(f"{level}: {text}"), lambda: False)
    monkeypatch.setattr(executor_requirements, "run", tasks.die_until)
    assert check._ask(submitter, (str(tmp_path), 2)) == 2
    monkeypatch.setattr(executor_requirements, "run", tasks.die)
    with pytest.raises(SparkUnusable) as failure:
        check._ask(submitter, 0)
    assert not isinstance(failure.value, WorkerDied)  # a bounded run does not try for ever
    monkeypatch.setattr(executor_check, "_CHECK_SECONDS", 0.2)
    monkeypatch.setattr(executor_requirements, "run", tasks.interval)
    assert check._ask(submitter, 600.0) is None
    assert [text.partition(",")[0] for text in said] == ["WARNING: the check of an executor was skipped"]


@pytest.mark.long
def test_an_engine_counts_the_subscriptions_that_are_there_when_it_opens(context, state_dir, monkeypatch):
    for name, known in (("own", set()), ("opened", WeakSet())):  # as a notebook's, whose slots are given
        monkeypatch.setattr(contexts, name, known)
    served = [Subscription(number, f"s{number}", "host=p", "host=t", (), None) for number in range(20)]
    engine = Engine(state_dir, None, {}, lambda: served)

    before = dict(context.environment)

    def opened() -> PgsubError | None:
        opening = engine.start()
        opening.join(patience.SECONDS)
        engine._failed_at = -math.inf
        return opening.fatal_error

    assert "has 16 task slots, but 21 are needed" in str(opened())
    assert "has 16 task slots, but 21 are needed" in str(opened())
    del served[1:]
    assert opened() is None
    assert context.environment == before  # which workers of others have as well
    engine.close()
    contexts.guests.discard(context)


def test_a_wait_for_executors_keeps_nobody_from_opening_or_closing_another_context(context, state_dir, monkeypatch):
    waits, goes_on = threading.Event(), threading.Event()

    def wait(*_: object, **__: object) -> None:
        waits.set()
        goes_on.wait()

    with monkeypatch.context() as patch:
        patch.setattr(contexts, "own", set())  # of a notebook: no other one is started
        patch.setattr(contexts, "opened", WeakSet())
        patch.setattr(executors, "check_slots", wait)
        opening = threading.Thread(target=open_context, args=(2, state_dir))
        opening.start()
        assert waits.wait(patience.SECONDS)
        assert session._lock.acquire(timeout=patience.SECONDS)
        session._lock.release()
        goes_on.set()
        opening.join()
    contexts.guests.discard(context)


def test_a_java_process_that_hangs_holds_nobody_up_and_only_one_of_its_own_is_killed(context, tmp_path, monkeypatch):
    """The last test here: it ends the Java process of all."""
    monkeypatch.setattr(driver_watch, "HANGING_SECONDS", 0.3)
    said: list[str] = []
    watch = SparkWatch(tmp_path, lambda level, text: said.append(f"{level}: {text}"))

    def look() -> Hang | None:
        watch.look()
        return watch.hang

    [jvm] = contexts.started
    job = Submitter(context).submit("long", tasks.mark_and_wait, [str(tmp_path)])
    assert _first_file(tmp_path) and look() is None
    with monkeypatch.context() as patch:
        patch.setattr(contexts, "started", {})  # as of one that a notebook has started
        watch._patience = 0.6
        os.kill(jvm, signal.SIGSTOP)
        until(lambda: watch._jvm.look() > 1.0, "its silence is not noticed")
        hang = look()
        assert hang is not None
        named = f"the Java process of Spark (PID {jvm})"
        assert (hang.waits_for, hang.next) == (f"an answer of {named}", f"kill -9 {jvm}")
        os.kill(jvm, signal.SIGCONT)
        until(lambda: look() is None, "its answer is not noticed")
    assert not job.done()
    os.kill(jvm, signal.SIGSTOP)
    job.cancel()
    late = Submitter(context).submit("double", tasks.double, [1])
    until(lambda: look() is not None, "its silence is not noticed")
    assert watch.hang is not None and watch.hang.next is None
    until(lambda: look() is None, "it is not killed")
    watch.close()
    assert job.wait(patience.SECONDS)
    with pytest.raises(WorkerDied, match="the Java process of Spark died"):
        late.result(patience.SECONDS)
    with pytest.raises(WorkerDied, match='the Java process of Spark died before job "double" began'):
        Submitter(context).submit("double", tasks.double, [1])
    assert [re.sub(r"\d s$", "N s", text.partition("\n")[0]) for text in said] == [
        f"WARNING: {named} does not answer",
        f"LOG: {named} answers again, or is gone",
        f"WARNING: {named} does not answer",
        f"WARNING: {named} has not answered for N s",
    ]
    assert f"\nkill -9 {jvm}" in said[0] and "spark.log" in said[2]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _first_file(folder: Path) -> Path:
    deadline = time.monotonic() + patience.SECONDS
    while time.monotonic() < deadline:
        for file in folder.iterdir():
            return file
        time.sleep(0.02)
    raise AssertionError(f"nothing appeared in {folder}")
