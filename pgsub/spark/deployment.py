"""Diagnoses of executors that cannot run pgsub's tasks: the decisive line, with a command that helps.

Spark reports a Java exception that contains the Python traceback of the executor. Its last line is the reason.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from pgsub.common.errors import SparkUnusable
from pgsub.common.machine.out_of_resources import no_thread_in

_IMPORT = re.compile(r"^\s*((?:ModuleNotFoundError|ImportError): (.*))$", re.MULTILINE)
_VERSION = re.compile(r"Python in worker has different version:? \(?(\S+?)\)? than that in driver:? \(?([\d.]+)")
_PROGRAM = re.compile(r'Cannot run program "([^"]+)"[^\n]*')
_DAEMON = re.compile(r"Error from python worker:\s*\n\s*([^\n]+)")
_MODULE = re.compile(r"No module named '([\w.]+)'")
_EXECUTOR = re.compile(r"Lost task \S+ in stage \S+ \(TID \d+\) \((\S+) executor \S+\)")
_ATTRIBUTE = re.compile(r"^AttributeError: Can't get attribute '\w+' on <module 'pgsub[^\n]*", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last)"

#: Texts of jobs that Spark ended for its own reasons (DAGScheduler, TaskSetManager, TaskResultGetter, TorrentBroadcast,
#: StandaloneSchedulerBackend, NettyRpcEnv). Another job may succeed.
_PASSING = (
    *(
        "SparkContext was shut down",
        "on a stopped SparkContext",
        "SPARK_JOB_CANCELLED",
        "Master removed our application",
    ),
    *("Lost executor", "Executor lost", "executor lost", "Executor heartbeat timed out", "Executor killed by driver"),
    *("TaskResultLost", "Exception while getting task result", "FetchFailed", "Failed to get broadcast", "TaskKilled"),
    *("all executors excluded", "Failed to connect to", "RpcTimeoutException", "Futures timed out", "Connection reset"),
)

_ARCHIVE = "pgsub_env.tar.gz"


def not_started(message: str, why: str) -> SparkUnusable:
    """Return the error of something that did not start, with the limits of processes if it reached one.

    :param why: what it said.
    """
    lack = no_thread_in(why)
    if lack is None:
        return SparkUnusable(message, detail=why)
    return SparkUnusable(message, detail="\n".join(filter(None, (why, lack.detail))), hint=lack.hint)


def failure(text: str, master: str, local: bool) -> SparkUnusable | None:
    """Return the deployment error that a failed job's text shows, None for any other failure.

    :param text: the text of the Java exception.
    :param local: whether tasks run on this machine, where the user's settings determine the interpreter.
    """
    if found := _VERSION.search(text):
        message = f"the executors run Python {found[1]}, but this launcher runs Python {found[2]}"
        detail = "Both need the same minor version."
    elif found := _PROGRAM.search(text):
        message, detail = f'the Python interpreter "{found[1]}" cannot be run on the executors', f"{found[0]}."
    elif found := _IMPORT.search(text):
        module = _MODULE.search(found[2])
        message = f'the executors cannot import "{module[1] if module else found[2]}"'
        detail = f"{_IMPORT.findall(text)[-1][0].strip()}."  # the last line of the traceback
    elif found := _ATTRIBUTE.search(text):
        message, detail = "the executors have another pgsub than this launcher", f"{found[0]}."
    elif found := _DAEMON.search(text):
        message, detail = "the Python process of the executors does not start", f"{found[1].strip()}."
    else:
        return None
    where = None if local else _EXECUTOR.search(text)
    context = f'executor on "{where[1]}"' if where else None
    return SparkUnusable(message, detail=detail, context=context, hint=_hint(master, local))


def _hint(master: str, local: bool) -> str:
    if local:
        return f"Let Spark use the interpreter of this launcher.\nexport PYSPARK_PYTHON={sys.executable}"
    conf = f"--conf spark.archives={_ARCHIVE}#env --conf spark.pyspark.python=./env/bin/python"
    return "\n".join(
        [
            "Ship what this launcher runs with to the executors; --python names an interpreter that they have:",
            f"{sys.executable} -m pgsub.spark.archive {_ARCHIVE}",
            f"pgsub run --master {master} {conf}",
        ]
    )


def passes(text: str) -> bool:
    """Return whether a failed job's text shows a loss in Spark that may be temporary."""
    return not of_python(text) and any(words in text for words in _PASSING)


def of_python(text: str) -> bool:
    """Return whether the text has a Python exception. Exceptions of pgsub's functions are results instead."""
    return _TRACEBACK in text


def telling_lines(text: str) -> str:
    """Return the lines of a failed job's text with the reason: the end of a Python traceback, else the beginning."""
    lines = text.splitlines()
    if not of_python(text):
        return "\n".join(lines[:5])
    begin = max(number for number, line in enumerate(lines) if _TRACEBACK in line)
    shown = []
    for line in lines[begin + 1 :]:
        if line.startswith("\tat ") or not line.strip():
            break
        shown.append(line)
    return "\n".join(shown[-3:])


def refuse_connect(master: str, environ: Mapping[str, str]) -> None:
    """Refuse Spark Connect, which has no RDDs and no threads of the driver.

    :raises SparkUnusable: the master is ``sc://``, or SPARK_REMOTE is set.
    """
    remote = master if master.startswith("sc://") else environ.get("SPARK_REMOTE")
    if remote is None:
        return
    by = "--master" if master.startswith("sc://") else "SPARK_REMOTE"
    raise SparkUnusable(
        "Spark Connect cannot run the workers of pgsub",
        detail=f'{by} is "{remote}". The launcher is the driver of its workers, and needs the cluster\'s own master.',
        hint="Name the master.\n"
        + ("pgsub run --master spark://HOST:7077" if by == "--master" else "unset SPARK_REMOTE"),
    )


def check_archive_name(path: Path) -> None:
    """Refuse a name that Spark would not unpack."""
    if not path.name.endswith((".tar.gz", ".tgz")):
        raise SparkUnusable(f'Spark does not unpack "{path.name}"', detail="The name ends with .tar.gz or .tgz.")
