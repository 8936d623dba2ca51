"""A JVM that the commands of this test process join one after the other, as programs of spark-submit do.

A start of Spark costs four seconds of processor time, a further context in a JVM that runs one. Where the start, the
JVM's environment or its end is what a test is about, the command starts its own; so does one that runs while another
has the JVM, and with ``PGSUB_TEST_THOROUGH=1`` every one.

What a command that was killed leaves in the JVM is stopped at once, as the JVM of its own would do on its way out.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forked import Started
from py4j.protocol import Py4JError

from pgsub.spark.jvm import class_archive
from pgsub.spark.jvm import flags as jvm_flags
from pgsub.spark.jvm import process as jvm_process
from pgsub.spark.jvm.java import cache_folder, find_java

_SLOTS = 200
#: Variables that launcher and workers read, and the JVM does not; Spark hands them on by settings of this name.
_OF_WORKERS = {
    *("PGSUB_RETRY_SECONDS", "PGSUB_SEQUENCE_SECONDS", "PGSUB_WORKER_TIMEOUT", "PGSUB_SPOOL_LIMIT"),
    "PGSUB_CONFLICT_HISTORY",
    *("PGSUB_CHUNK_BYTES", "PGSUB_GROUP_TABLES", "PGSUB_SET_BASED", "PGSUB_FAILPOINTS", "PGSUB_FAILPOINTS_DIR"),
}
_HANDED_ON = "spark.executorEnv."
#: Commands that do themselves what no launcher does.
_SERVES_ITSELF = ("create", "reconcile", "refresh", "verify")
#: Options with which they do nothing.
_NEEDS_NONE = {"--no-wait", "--dry-run", "--no-connect", "--no-enabled"}
#: Seconds in which the JVM notices that a command has ended; it may still do what one that was killed had asked for.
_NOTICED_SECONDS = 5.0
_OPEN = {"01", "08"}  #: ESTABLISHED, CLOSE_WAIT: the other side is gone, and what it said is not read to its end
_LOOPBACK = "--conf spark.driver.host=127.0.0.1 pyspark-shell"

_jvms: list[Any] = []  #: the one that runs
_folders: list[Path] = []  #: what it writes to
_holders: list[Started] = []  #: the command that joined it and may still run
_watches: list[threading.Thread] = []  #: one waits for that command's end


def variables(args: Sequence[str], env: Mapping[str, str], *, served: bool = False) -> dict[str, str]:
    """Variables with which a command joins the JVM; none where it shall start its own, or needs none.

    :param args: words of the command line.
    :param env: what the test sets beyond a command's usual environment.
    :param served: whether a launcher runs to which others leave the work.
    """
    opens = args[0] == "run" or (args[0] in _SERVES_ITSELF and not served and _NEEDS_NONE.isdisjoint(args))
    if not opens or set(env) - _OF_WORKERS or os.environ.get("PGSUB_TEST_THOROUGH"):
        return {}
    if "--master" in args:  # the JVM of a cluster's driver is its own
        return {}
    if "jvm.pid" in env.get("PGSUB_FAILPOINTS", ""):  # it is to be killed
        return {}
    if not hasattr(os, "pidfd_open") or any(holder.poll() is None for holder in _holders):
        return {}
    while _watches:
        _watches.pop().join()
    if not _jvms or not _idle(_jvms[0]):
        end()
        _jvms.append(_start())
    _hand_on(_jvms[0], env)
    found = _jvms[0].gateway_parameters
    return {
        "PYSPARK_GATEWAY_PORT": str(found.port),
        "PYSPARK_GATEWAY_SECRET": found.auth_token,
        "PYSPARK_SUBMIT_ARGS": _LOOPBACK,
    }


def _hand_on(jvm: Any, env: Mapping[str, str]) -> None:
    """Let the workers of the next context have these variables and none of those before."""
    properties = jvm.jvm.java.lang.System
    for name in list(properties.getProperties().stringPropertyNames()):
        if name.startswith(_HANDED_ON):
            properties.clearProperty(name)
    for name, value in env.items():
        properties.setProperty(f"{_HANDED_ON}{name}", value)


def hold(process: Started) -> None:
    """Nobody else joins before this process has ended."""
    _holders[:] = [process]
    try:
        ended = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    _watches.append(threading.Thread(target=_clean_up_after, args=(ended, _jvms[0]), daemon=True))
    _watches[0].start()


def _clean_up_after(ended: int, jvm: Any) -> None:
    """Stop the context that a process leaves.

    :param ended: file descriptor that can be read once it has.
    """
    select.select([ended], [], [])
    os.close(ended)
    _clean_up(jvm)


def ended() -> None:
    """Tell that the command which joined has ended, however it did."""
    for jvm in _jvms:
        _clean_up(jvm)


def _clean_up(jvm: Any) -> None:
    deadline = time.monotonic() + _NOTICED_SECONDS
    with contextlib.suppress(Py4JError, OSError):  # the JVM was killed
        while not _empty(jvm) and time.monotonic() < deadline:
            active = _contexts(jvm).getActive()
            if active.isDefined():
                active.get().stop()
            time.sleep(0.01)


def _contexts(jvm: Any) -> Any:
    return getattr(getattr(jvm.jvm.org.apache.spark, "SparkContext$"), "MODULE$")


def _empty(jvm: Any) -> bool:
    """Whether it has no context and makes none."""
    contexts = _contexts(jvm)
    being_made = contexts.getClass().getDeclaredField("contextBeingConstructed")
    being_made.setAccessible(True)
    return not being_made.get(contexts).isDefined() and not contexts.getActive().isDefined()


def _idle(jvm: Any) -> bool:
    """Whether it has no context, makes none, and nobody is about to make one.

    Between its connection and the context a moment passes in which only the connection shows.
    """
    deadline = time.monotonic() + _NOTICED_SECONDS
    while _in_use(jvm):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    try:
        return _empty(jvm)
    except (Py4JError, OSError):
        return False


def _in_use(jvm: Any) -> bool:
    """Whether there is a connection beside our own: the JVM closes one once it has done all that was asked there."""
    ours = {one.socket.getsockname()[1] for one in jvm._gateway_client.deque if one.socket is not None}
    tables = [file for file in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if file.exists()]
    rows = [line.split()[1:4] for file in tables for line in file.read_text().splitlines()[1:]]
    port = jvm.gateway_parameters.port
    return any(_port(local) == port and _port(peer) not in ours for local, peer, state in rows if state in _OPEN)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _start() -> Any:
    folder = Path(tempfile.mkdtemp(prefix="pgsub-spark-"))
    _folders.append(folder)
    cache = cache_folder(folder / "cache")
    java = find_java(cache)
    archive = class_archive.find_archive(java, jvm_process.spark_home(), cache)
    submitted = {"spark.python.daemon.module": "pgsub.spark.daemon"}
    flags = jvm_flags.flags(archive, "")
    removed = {name: None for name in os.environ if name.startswith(("PG", "SPARK_")) and name not in _OF_WORKERS}
    with jvm_process.environ({**removed, "HOME": str(folder), "PYTHONPATH": str(Path(__file__).parents[1])}):
        return jvm_process.start_jvm(
            java, submitted, f"local[{_SLOTS}]", folder, flags, jvm_flags.launcher_flags(archive)
        )


def end() -> None:
    """End it; a worker of xdist runs nothing that was registered for its exit."""
    while _jvms:
        jvm = _jvms.pop()
        jvm.shutdown()
        jvm.proc.kill()
        jvm.proc.wait()
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)
