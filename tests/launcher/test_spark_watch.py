"""A Java process of Spark that hangs: it is shown, killed where it is the launcher's own, and replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import patience
import pytest
from fix_faults import Site, until
from spark.seen import begins, status, stored

import pgsub
from pgsub.common.errors import UsageError
from pgsub.launcher.retry import take_over_seconds
from pgsub.launcher.spark.driver_watch import SparkWatch
from pgsub.spark.jvm.java import find_java


@pytest.mark.long
def test_a_java_process_that_hangs_is_shown_and_replaced_while_apply_goes_on(site: Callable[[], Site]) -> None:
    case = site()
    case.own_spark = True
    writer = case.make_ready("audit1", "counter1")
    process = case.serve(PGSUB_WORKER_TIMEOUT="15")
    writer.some(10)
    until(lambda: stored(case, "stage") == "alive", case.said)
    jvm, epoch, applied = int(case.jvm_pid.read_text()), case.epoch(), case.ledger("remote_lsn")
    os.kill(jvm, signal.SIGSTOP)
    until(lambda: stored(case, "waits_for") == f"an answer of the Java process of Spark (PID {jvm})", case.said)
    os.kill(process.pid, signal.SIGSTOP)  # it would kill the JVM while the command starts
    ended = status(case, "--check")
    os.kill(process.pid, signal.SIGCONT)
    assert (ended.returncode, f"waits for an answer of the Java process of Spark (PID {jvm})" in ended.stderr) == (3, 1)
    assert case.ledger("remote_lsn") > applied
    begins(case, "the JVM hung", epoch)
    assert int(case.jvm_pid.read_text()) != jvm and not Path(f"/proc/{jvm}").exists()
    until(lambda: stored(case, "waits_for") is None, case.said)
    assert "has not answered for" in case.output.read_text()
    case.wait_equal()

    os.kill(int(case.jvm_pid.read_text()), signal.SIGSTOP)
    case.terminate(process)  # which a process that hangs does not keep from it
    case.check()


#: What a notebook does that serves a subscription in its own Spark.
_GUEST = """
import pathlib, sys
from pyspark import SparkConf, SparkContext
from pgsub.cli.main import run
context = SparkContext(conf=SparkConf().setMaster("local[8]").set("spark.ui.enabled", "false"))
pathlib.Path(sys.argv[1]).write_text(str(context._gateway.proc.pid))
print("code", run(["--state-dir", sys.argv[2], "run", sys.argv[3]]))
"""


@pytest.mark.long
def test_in_a_notebook_whose_java_process_dies_the_launcher_ends_and_another_one_goes_on(
    site: Callable[[], Site], tmp_path: Path
) -> None:
    case = site()
    writer = case.make_ready("audit1", "counter1")
    home, pid = find_java(tmp_path).home, tmp_path / "pid"
    environment = {**os.environ, "PYTHONPATH": str(Path(pgsub.__file__).parents[1]), "PYSPARK_PYTHON": sys.executable}
    environment |= {"JAVA_HOME": str(home)} if home else {}
    with case.output.open("ab") as output:
        notebook = subprocess.Popen(
            [sys.executable, "-c", _GUEST, str(pid), str(case.state), case.name],
            env=environment,
            stdout=output,
            stderr=output,
        )
    try:
        until(lambda: stored(case, "stage") == "alive", case.said)
        writer.some(10)
        os.kill(int(pid.read_text()), signal.SIGKILL)
        assert notebook.wait(patience.SECONDS) == 0, case.said()
    finally:
        notebook.kill()
        notebook.wait()
    said = case.output.read_text()
    assert "code 13" in said and "the Spark that this launcher was started in has ended" in said
    writer.some(10)
    writer.rest()
    case.end(case.run())
    case.check()


def test_the_process_that_a_launcher_before_this_one_has_used_is_not_named_to_be_killed(state_dir: Path) -> None:
    (state_dir / "run").mkdir()
    (state_dir / "run" / "jvm.pid").write_text("4711\n")  # it may be another launcher's, too
    watch = SparkWatch(state_dir, lambda level, text: None)
    assert (watch._named(), watch._kill()) == ("the Java process of Spark", "kill -9 PID")
    watch.close()


def test_the_time_until_a_worker_or_spark_is_given_up_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert take_over_seconds() == 60
    for text in ("x", "3", "inf"):
        monkeypatch.setenv("PGSUB_WORKER_TIMEOUT", text)
        with pytest.raises(UsageError, match="PGSUB_WORKER_TIMEOUT"):
            take_over_seconds()
