"""The launcher's background chores: receives heartbeats, checks that Spark answers, and rotates its log."""

from __future__ import annotations

import contextlib
import time

from pgsub.common.errors import Log, log_text
from pgsub.common.threads import CallTimedOut, TimedExecutor
from pgsub.launcher import error_rows
from pgsub.launcher.heartbeat_receiver import HeartbeatReceiver
from pgsub.launcher.spark.driver import Engine

#: Seconds that one round of the launcher waits for Spark, or for the disk with its log.
PATIENCE = 0.1
#: Seconds between queries to Spark about tasks that have not started.
LOOK_SECONDS = 0.5
TIDY_SECONDS = 10.0


class Housekeeping:
    """The chores of one launcher, done in each round. Their failures never stop replication."""

    def __init__(self, engine: Engine, heartbeats: HeartbeatReceiver, log: Log) -> None:
        self._engine = engine
        self._heartbeats = heartbeats
        self._log = log
        self._janitor = TimedExecutor("janitor", PATIENCE)
        self._unseen = ""  #: message of the last failure to ask Spark
        self._next_tidy = self._next_look = 0.0

    def listen(self) -> None:
        """Start the thread that receives heartbeats, or restart it if it died."""
        ended = self._heartbeats.start()
        if ended is not None:
            self._log(
                "WARNING", log_text("heartbeats of workers were not received for a moment", detail=f"{ended.message}.")
            )

    def look(self) -> None:
        """Check Spark and rotate its log if it is time."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            self._look()
        if time.monotonic() >= self._next_tidy:
            self._next_tidy = time.monotonic() + TIDY_SECONDS
            with contextlib.suppress(CallTimedOut, OSError):
                self._janitor.run(self._engine.rotate_log)

    def _look(self) -> None:
        with contextlib.suppress(RuntimeError):  # no thread to spare
            self._engine.watch.look()
        try:
            self._janitor.run(self._engine.look)
        except CallTimedOut:
            pass
        except Exception as error:  # only the display depends on it
            if (found := error_rows.internal_error(error)).message != self._unseen:
                self._unseen = found.message
                self._log("ERROR", found.log_text())

    def close(self) -> None:
        """End the thread."""
        self._janitor.close()
