"""A Java process of Spark that hangs: it is shown, killed where it is the launcher's own, and replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from fix_faults import Site, until
from spark.seen import begins, status, stored

from pgsub.common.errors import UsageError
from pgsub.launcher.retry import take_over_seconds


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


def test_the_time_until_a_worker_or_spark_is_given_up_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert take_over_seconds() == 60
    for text in ("x", "3", "inf"):
        monkeypatch.setenv("PGSUB_WORKER_TIMEOUT", text)
        with pytest.raises(UsageError, match="PGSUB_WORKER_TIMEOUT"):
            take_over_seconds()
