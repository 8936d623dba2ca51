"""Handles a Java process of Spark that does not answer.

Running tasks do not need that process, so apply continues. But ended tasks are not restarted, and no table is copied.
Eventually a process of the launcher's own is killed. Callers that wait for its answer then handle its death as usual. A
process that spark-submit or a notebook started is only reported.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from pgsub.catalog.times import ago
from pgsub.common.errors import Log, log_text
from pgsub.launcher.retry import take_over_seconds
from pgsub.spark.jvm_watch import JvmWatch

#: Seconds without an answer until it is reported. Garbage collection or a busy machine may take a few seconds.
HANGING_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class Hang:
    """The hang as ``status`` shows it.

    :ivar since: when the process last answered.
    :ivar waits_for: what subscriptions wait for.
    :ivar next: the command for the operator, None if waiting is enough.
    """

    since: str
    waits_for: str
    next: str | None


class SparkWatch:
    """The repeated check of the Java process.

    :param state_dir: the folder with the log and the PID of the process.
    :ivar hang: the hang of the process, None if it answers.
    """

    def __init__(self, state_dir: Path, log: Log) -> None:
        self._state_dir = state_dir
        self._log = log
        self._jvm = JvmWatch()
        self._patience = take_over_seconds()
        self.hang: Hang | None = None

    def look(self, *, stopping: bool = False) -> None:
        """Check that the process answers. Kill an own one that has not answered for long. This call never hangs.

        :param stopping: whether the launcher stops. It is then less patient, because ending workers need the process.
        """
        silent = self._jvm.look()
        if silent < HANGING_SECONDS:
            if self.hang is not None:
                self._log("LOG", log_text(f"{self._named()} answers again, or is gone"))
            self.hang = None
            return
        self.hang = self.hang or self._hangs(silent)
        if self._jvm.own and (stopping or silent >= self._patience):
            detail = "It is killed." if stopping else "It is killed, and Spark is started again."
            self._log("WARNING", log_text(f"{self._named()} has not answered for {silent:.0f} s", detail=detail))
            self._jvm.kill()
            self.hang = None

    def _hangs(self, silent: float) -> Hang:
        """Log the hang."""
        own, named = self._jvm.own, self._named()
        detail = "Running tasks continue, and no other task begins. "
        if own:
            detail += f"It is killed and started again when it has not answered for {self._patience:.0f} s."
            hint = f"See what it wrote last.\ntail -n 20 {shlex.quote(str(self._state_dir / 'log' / 'spark.log'))}"
        else:
            detail += "This launcher did not start it, and does not end it."
            hint = f"End it, and start both again.\n{self._kill()}"
        self._log("WARNING", log_text(f"{named} does not answer", detail=detail, hint=hint))
        return Hang(ago(silent), f"an answer of {named}", None if own else self._kill())

    def _named(self) -> str:
        return "the Java process of Spark" + ("" if self._jvm.pid is None else f" (PID {self._jvm.pid})")

    def _kill(self) -> str:
        return f"kill -9 {self._jvm.pid or 'PID'}"

    def close(self) -> None:
        """Stop watching."""
        self._jvm.close()
