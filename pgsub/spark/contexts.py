"""What is known of Spark's contexts in this process: who opened them, and whether and how they have ended.

:mod:`pgsub.spark.session` opens and closes them.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from py4j.protocol import Py4JError
from pyspark import SparkContext

from pgsub.spark.class_archive import Archive

_ANSWER_SECONDS = 1.0  #: that the JVM of spark-submit may take to accept a connection


@dataclass(frozen=True)
class Started:
    """The clean-up after a JVM that this process started."""

    archive: Archive
    pid_file: Path


started: dict[int, Started] = {}  #: by process id
own: set[SparkContext] = set()  #: contexts that were opened here, until they are closed
opened: WeakSet[SparkContext] = WeakSet()  #: contexts that were opened here, closed ones too
guests: set[SparkContext] = set()  #: contexts of others that were used
pids: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  #: process ids of JVMs, by pyspark's gateway


def active() -> SparkContext | None:
    """Return the context that somebody else opened in this process: a notebook, a job. It is never closed here."""
    found = SparkContext._active_spark_context
    return None if found is None or found in opened or found._jsc is None else found


def ending() -> bool:
    """Return whether a context that was opened here and is closed has not stopped yet; pyspark has one at a time."""
    found = SparkContext._active_spark_context
    return found is not None and found in opened and found not in own


def is_guest(context: SparkContext) -> bool:
    """Return whether somebody else opened the context, and closes it."""
    return context in guests


def present(context: SparkContext) -> bool:
    """Return whether nothing is known of an end of the context; the JVM, which may hang, is not asked."""
    if context._jsc is None or context is not SparkContext._active_spark_context:
        return False
    process = context._gateway.proc
    return process is None or process.poll() is None


def alive(context: SparkContext) -> bool:
    """Return whether the context's JVM is there and the context is not stopped; this hangs with the JVM."""
    return ended(context) is None


def ended(context: SparkContext) -> str | None:
    """Return how a context has ended, None as long as it has not; this hangs with its JVM."""
    process = context._gateway.proc
    code = None if process is None else process.poll()
    if code:
        return "the Java process of Spark died"
    if code == 0 or not (context in own or context in guests):
        return "Spark was closed"
    try:
        stopped = not present(context) or context._jsc.sc().isStopped()
    except (Py4JError, OSError):
        return "the Java process of Spark died"
    except AttributeError:  # another thread closes it
        return "Spark was closed"
    return "the Spark context was stopped" if stopped else None


def lost(context: SparkContext | None) -> bool:
    """Return whether the Spark that this process was given is gone, which nothing here can start again.

    spark-submit's JVM ends with its script or is killed, and this process, its child, is not told; a notebook stops its
    context. Another context that is open there then is as good.

    :param context: the one that was open last, None if none was.
    """
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        try:
            socket.create_connection(("127.0.0.1", int(os.environ["PYSPARK_GATEWAY_PORT"])), _ANSWER_SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:  # it is too busy to answer
            return False
    return context in guests and not alive(context) and active() in (None, context)


def is_own(jvm: Any) -> bool:
    """Return whether a JVM is one that was started here.

    :param jvm: pyspark's gateway, or None.
    """
    process = None if jvm is None else jvm.proc
    return process is not None and process.pid in started


def kill(jvm: Any) -> None:
    """Kill a JVM that was started here; its python workers see that, and pgsub.spark.session cleans up after it.

    Its end is not awaited: a process whose disk does not answer takes its time even for that.
    """
    if is_own(jvm):
        jvm.proc.kill()
