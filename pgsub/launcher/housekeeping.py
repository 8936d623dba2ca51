"""What a launcher does beside serving: it receives heartbeats, looks whether Spark answers, and keeps its log small."""

from __future__ import annotations

import contextlib
import time

from pgsub.common.errors import Log, log_text
from pgsub.common.threads import CallTimedOut, TimedExecutor
from pgsub.launcher import error_rows
from pgsub.launcher.heartbeat_receiver import HeartbeatReceiver
from pgsub.launcher.spark.driver import Engine

#: Seconds that a turn of the launcher waits for Spark, or for the disk with its log.
PATIENCE = 0.1
#: Between questions to Spark about tasks that have not begun, if there are any.
LOOK_SECONDS = 0.5
TIDY_SECONDS = 10.0


class Housekeeping:
    """The chores of one launcher, a few in each of its turns; no failure of them stops replication."""

    def __init__(self, engine: Engine, heartbeats: HeartbeatReceiver, log: Log) -> None:
        self._engine = engine
        self._heartbeats = heartbeats
        self._log = log
        self._janitor = TimedExecutor("janitor", PATIENCE)
        self._unseen = ""  #: why Spark could not be asked last
        self._next_tidy = self._next_look = 0.0

    def listen(self) -> None:
        """Start the thread that receives heartbeats, also after it died."""
        ended = self._heartbeats.start()
        if ended is not None:
            self._log(
                "WARNING", log_text("heartbeats of workers were not received for a moment", detail=f"{ended.message}.")
            )

    def look(self) -> None:
        """Look after Spark and its log where it is time."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            self._look()
        if time.monotonic() >= self._next_tidy:
            self._next_tidy = time.monotonic() + TIDY_SECONDS
            with contextlib.suppress(CallTimedOut, OSError):
                self._janitor.run(self._engine.rotate_log)

    def _look(self) -> None:
        with contextlib.suppress(RuntimeError):  # no thread to spare
            self._engine.watch()
        try:
            self._janitor.run(self._engine.look)
        except CallTimedOut:
            pass
        except Exception as error:  # it only shows
            if (found := error_rows.internal_error(error)).message != self._unseen:
                self._unseen = found.message
                self._log("ERROR", found.log_text())

    def close(self) -> None:
        """End its thread."""
        self._janitor.close()
