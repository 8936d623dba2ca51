"""The wait for a cluster's executors: how many tasks they run at once, and whether that can be enough."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.errors import PySparkException

from pgsub.common.errors import PgsubError, SparkUnusable
from pgsub.spark import settings

#: Spark's setting for the time within which a cluster's executors must register, and its default.
_REGISTRATION = ("spark.scheduler.maxRegisteredResourcesWaitingTime", "30s")
#: Option that lets a bounded command wait longer for executors.
WAIT_LONGER = f"--conf {_REGISTRATION[0]}=5m"

WITHOUT_STATE = "It was started again without its state, and gives the application no executors."
#: Number of executors to request. Without dynamic allocation, a master gives as many as the cores allow.
_ALL = 2**31 - 1
_LISTENS_SECONDS = 2.0
_QUESTION_SECONDS, _STALE_SECONDS = 10.0, 60.0  #: seconds between two questions, and until an answer is outdated


@dataclass(frozen=True)
class Awaiting:
    """The limit of the wait for executors: Spark's spark.scheduler.maxRegisteredResourcesWaitingTime, or none.

    :ivar registered: called repeatedly with the number of slots and the master.
    :ivar given_up: returns whether nobody waits any more.
    :ivar partial: called after that time with the available and needed slots, if any are enough for now. Later ones are
        used, too. None if all are needed.
    :ivar needed: returns the number of needed slots, if it may change meanwhile.
    """

    patient: bool = False
    partial: Callable[[int, int], None] | None = None
    registered: Callable[[int, str], None] = lambda slots, master: None
    given_up: Callable[[], bool] = lambda: False
    needed: Callable[[], int] | None = None


def check_slots(context: SparkContext, workers: int, awaiting: Awaiting, log: Path, *, own: bool = True) -> None:
    """Wait until enough executors have registered, like Spark does before it schedules a barrier stage.

    Executors that start only for existing tasks cannot be counted.
    """
    if settings.is_local(context.master) or _dynamic(context):
        return
    scala = context._jsc.sc()
    deadline = time.monotonic() + scala.conf().getTimeAsSeconds(*_REGISTRATION)
    question = MasterQuestion(context, own=own)
    needed = awaiting.needed or (lambda: workers)
    while (slots := _registered(context, log)) < needed() and (awaiting.patient or time.monotonic() < deadline):
        if awaiting.given_up():
            raise PgsubError("the start of Spark was given up")
        if slots and awaiting.partial is not None and time.monotonic() >= deadline:
            awaiting.partial(slots, needed())
            return
        if not slots and question.forgotten():
            raise SparkUnusable(forgotten_by(context.master), detail=WITHOUT_STATE)
        awaiting.registered(slots, context.master)
        time.sleep(0.2)
    cpus = int(context.getConf().get("spark.task.cpus", "1") or 1)
    settings.check_slots(slots, needed(), context.master, hint=_hint(context.master, slots, needed() * cpus))


def _dynamic(context: SparkContext) -> bool:
    return bool(context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true")


def _hint(master: str, slots: int, cores: int) -> str:
    """Return what helps if too few executors came in time. spark.cores.max was checked before."""
    if master.startswith("spark://"):
        room = "Start another worker of Spark, or end other applications that have its cores and memory"
    elif slots:
        return settings.more_cores(master, cores)
    else:
        room = "The cluster has no room for them, or they do not start"
    return f"{room}; or let the command wait longer.\n{WAIT_LONGER}"


def _registered(context: SparkContext, log: Path) -> int:
    """Return the slots of a context that has not given up, as Spark does after a minute without a master."""
    scala = context._jsc.sc()
    try:
        slots = registered_slots(context)
    except (Py4JJavaError, PySparkException):  # it is half gone
        if not scala.isStopped():
            raise
    if scala.isStopped():
        raise SparkUnusable(
            f'Spark master "{context.master}" cannot be reached, or gave the application up',
            hint=f"Its address may be wrong; see the end of the log.\ntail -n 20 {shlex.quote(str(log))}",
        )
    return slots


def registered_slots(context: SparkContext) -> int:
    """Return how many tasks the registered executors run at once."""
    scala = context._jsc.sc()
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))


def forgotten_by(master: str) -> str:
    """Return the message about a master that does not know the application."""
    return f'Spark master "{master}" no longer knows this application'


class MasterQuestion:
    """A repeated question to a standalone master: whether it still knows the application.

    A master that was restarted without its state has the application's executors killed and gives it no new ones. The
    question is a request for as many executors as the master gives anyway. A master that kept its state has told the
    application its address (MasterChanged of StandaloneAppClient.scala). Others are asked over the lost connection,
    which fails.

    Several masters are not asked, because they keep their state elsewhere. Neither is a master whose number of
    executors pgsub does not control: with dynamic allocation, or in a context of others.
    """

    def __init__(self, context: SparkContext, *, own: bool = True) -> None:
        self._context = context
        self._asks = own and re.fullmatch("spark://[^,]+", context.master) is not None and not _dynamic(context)
        self._asked_at = -math.inf
        self._answers = 0  #: number of successive negative answers

    def forgotten(self) -> bool:
        """Return whether two successive answers are negative. A master may still be reading its state."""
        clock = time.monotonic()
        if not self._asks or clock < self._asked_at + _QUESTION_SECONDS:
            return False
        if clock > self._asked_at + _STALE_SECONDS:
            self._answers = 0
        self._answers = 0 if self._known() else self._answers + 1
        self._asked_at = time.monotonic()
        return self._answers == 2

    def _known(self) -> bool:
        jvm = self._context._jvm
        nowhere = jvm.org.apache.spark.api.python.PythonUtils.toScalaMap(jvm.java.util.HashMap())
        try:
            known = bool(self._context._jsc.sc().requestTotalExecutors(_ALL, 0, nowhere))
        except Py4JJavaError as error:
            known = "RpcTimeoutException" in str(error)  # it is slow
        return known or not _listens(self._context.master.removeprefix("spark://"))


def _listens(place: str) -> bool:
    host, _, port = place.rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        socket.create_connection((host.strip("[]"), int(port)), _LISTENS_SECONDS).close()
        return True
    return False
