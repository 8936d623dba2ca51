"""Which JVM a command may join that the commands of a test process share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import shared_spark

#: A command that has asked for something that takes a while, which the JVM may not have begun.
_COMMAND = """
from pyspark.java_gateway import launch_gateway
client = launch_gateway()._gateway_client
client.deque[0].socket.sendall(b"c\\nz:java.lang.Thread\\nsleep\\ni600000\\ne\\n")
print("asked", flush=True)
input()
"""


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """How a command joins a JVM that is shared; no other test gets this one."""
    monkeypatch.delenv("PGSUB_TEST_THOROUGH", raising=False)
    shared_spark.end()
    yield shared_spark.variables(["run"], {})
    shared_spark.end()


@pytest.mark.long
def test_no_command_joins_a_jvm_that_still_works_for_one_that_was_killed(
    shared: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    [jvm] = shared_spark._jvms
    assert shared_spark._idle(jvm) and shared_spark.variables(["run"], {}) == shared
    pipe, env = subprocess.PIPE, {**os.environ, **shared}
    with subprocess.Popen([sys.executable, "-c", _COMMAND], env=env, stdin=pipe, stdout=pipe) as command:
        assert command.stdout is not None and command.stdout.readline() == b"asked\n"
        command.kill()
    monkeypatch.setattr(shared_spark, "_NOTICED_SECONDS", 0.1)
    assert not shared_spark._idle(jvm)
    assert shared_spark.variables(["run"], {}) != shared and jvm.proc.poll() is not None
