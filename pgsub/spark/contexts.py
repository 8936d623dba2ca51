"""The state of Spark's contexts in this process: who opened them, and whether and how they have ended.

:mod:`pgsub.spark.session` opens and closes them.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from py4j.protocol import Py4JError
from pyspark import SparkContext

from pgsub.common.machine.path_safety import exchangeable
from pgsub.spark.jvm.class_archive import Archive

_ANSWER_SECONDS = 1.0  #: limit for the JVM of spark-submit to accept a connection


@dataclass(frozen=True)
class Started:
    """The clean-up data of a JVM that this process started. ``scratch`` has its sockets and scratch files."""

    archive: Archive
    pid_file: Path
    scratch: Path


started: dict[int, Started] = {}  #: by process ID
own: set[SparkContext] = set()  #: contexts opened here, until they are closed
opened: WeakSet[SparkContext] = WeakSet()  #: contexts opened here, including closed ones
guests: set[SparkContext] = set()  #: contexts of others that were used
homeless: WeakSet[SparkContext] = WeakSet()  #: own contexts whose files somebody removed; no job runs in them any more
pids: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  #: process IDs of JVMs, by pyspark's gateway
_folders: list[tempfile.TemporaryDirectory[str]] = []  #: of :func:`have_folder`, removed when the process ends
_folders_lock = threading.Lock()


def active() -> SparkContext | None:
    """Return the context that others, such as a notebook, opened in this process. It is never closed here."""
    found = SparkContext._active_spark_context
    return None if found is None or found in opened or found._jsc is None else found


def ending() -> bool:
    """Return whether a closed context of this process has not stopped yet. pyspark allows one at a time."""
    found = SparkContext._active_spark_context
    return found is not None and found in opened and found not in own


def is_guest(context: SparkContext) -> bool:
    """Return whether others opened the context, and will close it."""
    return context in guests


def present(context: SparkContext) -> bool:
    """Return whether the context is not known to have ended, without asking the JVM, which may hang."""
    if context._jsc is None or context is not SparkContext._active_spark_context:
        return False
    process = context._gateway.proc
    return process is None or process.poll() is None


def alive(context: SparkContext) -> bool:
    """Return whether the context's JVM runs and the context is not stopped. Hangs if the JVM does."""
    return ended(context) is None


def ended(context: SparkContext) -> str | None:
    """Return how a context has ended, None if it has not. Hangs if the JVM does."""
    process = context._gateway.proc
    code = None if process is None else process.poll()
    if code:
        return "the Java process of Spark died"
    if code == 0 or not (context in own or context in guests):
        return "Spark was closed"
    # guard: Spark is started again after somebody has removed its local folder
    if context in homeless:
        return "the local folder of Spark was removed"
    try:
        stopped = not present(context) or context._jsc.sc().isStopped()
    except (Py4JError, OSError):
        return "the Java process of Spark died"
    except AttributeError:  # another thread is closing it
        return "Spark was closed"
    return "the Spark context was stopped" if stopped else None


def lost(context: SparkContext | None) -> bool:
    """Return whether the Spark that this process was given has ended, which cannot be restarted here.

    The JVM of spark-submit ends with its script or is killed, without notice to this child process. A notebook may stop
    its context. If it has opened another context, that one can be used.

    :param context: the last open context, None if there was none.
    """
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        try:
            socket.create_connection(("127.0.0.1", int(os.environ["PYSPARK_GATEWAY_PORT"])), _ANSWER_SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:  # it is too busy to answer
            return False
    return context in guests and not alive(context) and active() in (None, context)


def have_folder(context: SparkContext) -> None:
    """Replace the folder in which parallelize() writes what a task unpickles, if somebody has removed it.

    It is not made again under its name: in a folder such as /tmp, that may have been taken by another user, who could
    exchange the file.
    """
    with _folders_lock:
        folder = Path(context._temp_dir)
        # guard: the files of jobs are not written where others could exchange them, without " and _is_safe(folder)"
        if os.path.isdir(folder) and _is_safe(folder):
            return
        _folders.append(tempfile.TemporaryDirectory(prefix="pgsub-jobs-"))
        context._temp_dir = _folders[-1].name


def _is_safe(folder: Path) -> bool:
    return exchangeable(folder) == (None, None) and folder.stat().st_uid == os.geteuid()


def is_own(jvm: Any) -> bool:
    """Return whether this process started a JVM.

    :param jvm: pyspark's gateway, or None.
    """
    process = None if jvm is None else jvm.proc
    return process is not None and process.pid in started


def kill(jvm: Any) -> None:
    """Kill a JVM that was started here. Its python workers notice this, and pgsub.spark.session cleans up.

    Does not wait for its end, which may be delayed by a disk that does not answer.
    """
    if is_own(jvm):
        jvm.proc.kill()
