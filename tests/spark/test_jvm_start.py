"""Promises of the start of a JVM: it has an end, and nothing of it outlives the process that began it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from fix_program import until
from pyspark import SparkConf
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway

from pgsub.spark.jvm import start as jvm_start

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file for the process ids of a Java that tells nothing and does not end."""
    program, file = tmp_path / "bin" / "java", tmp_path / "pids"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho $$ >> {file}\nexec sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    return file


def lives(pids: Path) -> bool:
    return any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split())


def test_a_java_process_that_tells_no_port_in_time_is_killed(pids: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jvm_start, "START_SECONDS", 2.0)
    with pytest.raises(PySparkRuntimeError, match="JAVA_GATEWAY_EXITED"), jvm_start.bounded():
        launch_gateway(SparkConf(loadDefaults=False), {"start_new_session": True})
    until(lambda: not lives(pids))


def test_a_java_process_that_ends_well_without_a_port_has_failed(tmp_path: Path, pids: Path) -> None:
    (tmp_path / "bin" / "java").write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(PySparkRuntimeError, match="JAVA_GATEWAY_EXITED"), jvm_start.bounded():
        launch_gateway(SparkConf(loadDefaults=False), {"start_new_session": True})


@pytest.mark.long
def test_a_process_that_ends_meanwhile_leaves_no_java_process_that_starts(pids: Path) -> None:
    script = """
    import pathlib, sys, threading, time
    from pyspark import SparkConf
    from pyspark.java_gateway import launch_gateway
    from pgsub.spark.jvm import start as jvm_start

    def start():
        with jvm_start.bounded():
            launch_gateway(SparkConf(loadDefaults=False), {"start_new_session": True})

    threading.Thread(target=start, daemon=True).start()
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.05)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(pids)], check=True, cwd=ROOT)
    until(lambda: not lives(pids))
