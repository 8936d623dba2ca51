"""Opens and closes the launcher's Spark context.

Only RDD jobs run in it, so there is no SparkSession. The user's settings have priority (:mod:`pgsub.spark.settings`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway

from pgsub.common.errors import PgsubError, WorkerDied
from pgsub.common.machine.interpreter import importing_environment
from pgsub.common.threads import SupervisedThread
from pgsub.spark import contexts, daemon, deployment, executors, settings
from pgsub.spark.executors import Awaiting
from pgsub.spark.jvm import class_archive, folders
from pgsub.spark.jvm import flags as jvm_flags
from pgsub.spark.jvm import process as jvm_process
from pgsub.spark.jvm.java import cache_folder, find_java, write_atomically

#: Seconds that a JVM may take to end, usually less than one. Killing it loses nothing.
ENDING_SECONDS = 8.0

#: pyspark stores the JVM and its context in class attributes, so a process has one at a time.
_lock = threading.RLock()


def open_context(
    workers: int,
    state_dir: Path,
    submitted: Mapping[str, str] | None = None,
    imported: Sequence[str] = (),
    awaiting: Awaiting | None = None,
) -> SparkContext:
    """Start Spark, or join the one that spark-submit started.

    :param workers: number of tasks that run at once.
    :param state_dir: private folder for the log, the JVM's PID and scratch files.
    :param submitted: Spark settings of the command line. Without a master in these or the user's other settings, it is
        ``local[N]`` with spare slots.
    :param imported: modules that local workers inherit as imported (:mod:`pgsub.spark.daemon`).
    :param awaiting: gets the number of slots while there are too few.
    :raises StateForbids: there is no Java, another Spark version in SPARK_HOME, or there are too few task slots.
    :raises SparkUnusable: Spark does not start.
    """
    with _lock, _signals_kept():
        context = _open(workers, state_dir, submitted or {})
        if context in contexts.own:  # workers of a guest belong to others
            context.environment[daemon.IMPORTED] = ",".join(imported)
    log = state_dir / "log" / "spark.log"
    try:  # without the lock, because the wait may have no limit
        executors.check_slots(context, workers, awaiting or Awaiting(), log, own=context in contexts.own)
    except (PySparkException, Py4JError, OSError) as error:
        why = jvm_process.reason(error)  # asks the JVM
        close_context(context)
        raise deployment.not_started("Spark did not start", why) from None
    except BaseException:
        close_context(context)
        raise
    return context


def _open(workers: int, state_dir: Path, submitted: Mapping[str, str]) -> SparkContext:
    guest = contexts.active()
    if guest is None and contexts.ending():
        raise WorkerDied("Spark is still being stopped")
    if guest is not None:
        contexts.guests.add(guest)
        settings.check_known_slots(guest.getConf().get, workers, guest.master)
        return guest
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        scratch = folders.scratch_folder(state_dir / "run")  # removed by a later start, once this process has ended
        return _connect(launch_gateway(), workers, state_dir, {}, scratch)
    chosen = settings.user_settings(submitted, jvm_process.spark_home())
    deployment.refuse_connect(chosen.get("spark.master", ""), os.environ)
    return _start(workers, state_dir, submitted, chosen, None)


def given_settings() -> dict[str, str] | None:
    """Return the settings of a running Spark: this process's context, or the JVM of spark-submit."""
    guest = contexts.active()
    if guest is not None:
        return dict(guest.getConf().getAll())
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return dict(SparkConf(_jvm=launch_gateway().jvm).getAll())
    return None


def open_trained(state_dir: Path, flags: list[str]) -> SparkContext:
    """Start Spark for one worker with JVM flags that make it write an archive, and without the user's settings."""
    with _lock:
        return _start(1, state_dir, {}, {}, flags)


def _start(
    workers: int,
    state_dir: Path,
    submitted: Mapping[str, str],
    chosen: dict[str, str],
    flags: list[str] | None,
) -> SparkContext:
    master = chosen.get("spark.master") or settings.default_master(workers)
    settings.check_known_slots(chosen.get, workers, master)
    cache = cache_folder(state_dir / "cache")
    java = find_java(cache)
    found = class_archive.find_archive(java, jvm_process.spark_home(), cache)
    options = jvm_flags.user_options(chosen)
    run = state_dir / "run"
    scratch = folders.scratch_folder(run)
    # guard: nobody else gives code to Spark's JVM, without ", *jvm_flags.temporary_flags(scratch, options)"
    own = [*(flags or jvm_flags.flags(found, options)), *jvm_flags.temporary_flags(scratch, options)]
    try:
        jvm = jvm_process.start_jvm(java, submitted, master, state_dir, own, jvm_flags.launcher_flags(found))
        contexts.started[jvm.proc.pid] = contexts.Started(found, run / "jvm.pid", scratch)
        return _connect(jvm, workers, state_dir, chosen, scratch)
    except BaseException:
        folders.remove_scratch(scratch)
        raise


def _connect(jvm: Any, workers: int, state_dir: Path, chosen: Mapping[str, str], scratch: Path) -> SparkContext:
    """Make the context in a running JVM, which is ended if that fails.

    :param scratch: folder for Spark's scratch files and sockets.
    """
    jvm_process.silence_py4j()
    SparkContext._gateway, SparkContext._jvm = jvm, jvm.jvm
    try:
        jvm_process.log_in(jvm)
        conf = _configuration(jvm, workers, scratch, chosen)
        with jvm_process.environ({"PYSPARK_PYTHON": _python(conf)}):
            context = SparkContext(conf=conf, gateway=jvm)
        contexts.own.add(context)
        contexts.opened.add(context)
        context._gateway = jvm  # the class attribute would become that of the next context
        context._accumulatorServer.handle_error = lambda *_: None  # a dead JVM would print a traceback
        _write_pid(jvm, state_dir)
        return context
    except (PySparkException, Py4JError, OSError) as error:
        why = jvm_process.reason(error)
        jvm_process.forget()
        raise deployment.not_started("Spark did not start", why) from None
    except PgsubError:
        jvm_process.forget()
        raise


def _configuration(jvm: Any, workers: int, scratch: Path, chosen: Mapping[str, str]) -> SparkConf:
    """Return spark-submit's version of the user's settings, with pgsub's own as defaults."""
    conf = SparkConf(_jvm=jvm.jvm)
    master = conf.get("spark.master", "")
    settings.check_known_slots(conf.get, workers, master)
    own_spark = jvm.proc is not None and "SPARK_HOME" not in os.environ
    own = settings.defaults(master, scratch, own_spark)
    if jvm.proc is not None and settings.is_local(master):
        folder = folders.socket_folder(scratch)
        own |= {} if folder is None else settings.private_sockets(folder)
    for name, value in own.items():
        conf.setIfMissing(name, value)
    if jvm.proc is not None:  # spark-submit sets these two if the user did not
        for name, value in (("spark.ui.showConsoleProgress", "false"), ("spark.app.name", "pgsub")):
            conf.set(name, chosen.get(name, value))
    return conf


def _python(conf: SparkConf) -> str | None:
    """Return the workers' interpreter: on this machine the present one, not ``python3`` on PATH."""
    python = os.environ.get("PYSPARK_PYTHON") or conf.get("spark.pyspark.python", None)
    if python is None and settings.is_local(conf.get("spark.master", "")):
        return sys.executable
    return python


def _write_pid(jvm: Any, state_dir: Path) -> None:
    pid = contexts.pids[jvm] = int(jvm.jvm.java.lang.ProcessHandle.current().pid())
    (state_dir / "run").mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(OSError):  # a full disk; the PID is only for those who look
        write_atomically(state_dir / "run" / "jvm.pid", f"{pid}\n")


def close_context(context: SparkContext, patience: float = ENDING_SECONDS, train: bool = True) -> None:
    """End Spark, its JVM and its python workers, even after the JVM was killed. A guest's context stays open.

    Closing the JVM's standard input stops the context in a third of the time.

    :param patience: seconds until a JVM that does not end is killed.
    :param train: make an archive in the background if there is none for this Java and Spark.
    """
    with _lock:
        if context not in contexts.own:
            return
        contexts.own.discard(context)
        process = context._gateway.proc
        if process is None or context._jsc is None:
            stopping = SupervisedThread("jvm_end", "end of a context", partial(_stop, context))
            stopping.start()  # spark-submit's JVM continues; a second call finds nothing to do
            stopping.join(patience)
            return
        ending = SupervisedThread("jvm_end", "end of Spark", partial(_end_jvm, process, patience))
        ending.start()
        context._jsc = None
        context.stop()
        ending.join()
        jvm_process.forget()  # kills a remaining JVM
        started = contexts.started.pop(process.pid)
        with suppress(OSError):  # a read-only disk
            if started.pid_file.read_text() == f"{process.pid}\n":  # not of another process with this state folder
                started.pid_file.unlink(missing_ok=True)
        folders.remove_scratch(started.scratch)
        if train and process.returncode == 0:
            class_archive.train_in_background(started.archive, {**os.environ, **importing_environment()})


def _stop(context: SparkContext) -> None:
    with suppress(Py4JError, OSError):  # its JVM was killed
        context.stop()


def _end_jvm(process: subprocess.Popen[bytes], patience: float) -> None:
    try:
        if process.stdin is not None:
            process.stdin.close()
    except OSError:  # it was killed
        pass
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:  # a JVM does not end while it starts an interpreter
        children = _children(process.pid)
        process.kill()
        process.wait()
        for child in children:
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    """Return the child processes of a process, none if the system does not list them."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, listed.read_text().split())
    return found


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep the handler of SIGINT, which SparkContext replaces in the main thread. The launcher has its own."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGINT, before)
