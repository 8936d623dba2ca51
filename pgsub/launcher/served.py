"""One subscription that a launcher serves: its runner, its lock, and the sign of life that it gives by the lock."""

from __future__ import annotations

from dataclasses import dataclass

from pgsub.catalog.locks import Lock
from pgsub.common.errors import Log, LogText, log_text
from pgsub.launcher.runner import Runner

#: How long a runner may wait for the target and count as alive, as in a take-over.
STALL_SECONDS = 15.0


@dataclass(slots=True)
class Served:
    """A runner with the lock that keeps other launchers from its subscription.

    :ivar again_at: when one that failed for good is restarted.
    """

    runner: Runner
    lock: Lock
    again_at: float = 0.0
    _stalled: bool = False  #: as it was logged

    def sign_of_life(self, log: Log) -> None:
        """Give one if the runner's thread goes on: a lock of the ledger or a target may keep it waiting.

        What its thread writes into the state store is old then, and so is each thing that it watches.
        """
        runner = self.runner
        stalled = runner.is_alive() and runner.silence > STALL_SECONDS
        # guard: a launcher that waits for the target gives no sign of life, always
        if not stalled:
            self.lock.touch()
        if stalled != self._stalled and (stalled or runner.serves):
            log("WARNING" if stalled else "LOG", _text(runner, stalled=stalled))
        self._stalled = stalled


def _text(runner: Runner, *, stalled: bool) -> LogText:
    name = f'subscription "{runner.sub.name}"'
    if not stalled:
        return log_text(f"the target of {name} answers again")
    return log_text(
        f"the target of {name} has not answered for {runner.silence:.0f} s",
        detail="Meanwhile its workers are not watched, and what pgsub status shows of it is old.",
        hint="See whether the target answers, whether somebody locks a table of the ledger, and whether commits there"
        " wait for a standby (synchronous_standby_names) that is away.",
    )
