"""One subscription that a launcher serves: its runner, its lock, and whether it is stalled."""

from __future__ import annotations

from dataclasses import dataclass

from pgsub.catalog.locks import Lock
from pgsub.common.errors import Log, LogText, log_text
from pgsub.launcher.runner import Runner

#: Seconds that a runner may wait for the target and still count as alive, as in a take-over.
STALL_SECONDS = 15.0


@dataclass(slots=True)
class Served:
    """A runner with the lock that keeps other launchers from its subscription.

    :ivar again_at: when to restart it after a permanent failure, 0 for never.
    """

    runner: Runner
    lock: Lock
    again_at: float = 0.0
    _stalled: bool = False  #: as logged last

    def stalled(self, log: Log) -> bool:
        """Return whether the runner's thread is stalled by a lock of the ledger or by the target. Log each change.

        A stalled thread's entries in the state store are outdated, and it watches nothing.
        """
        runner = self.runner
        stalled = runner.is_alive() and runner.silence > STALL_SECONDS
        if stalled != self._stalled and (stalled or runner.serves):
            log("WARNING" if stalled else "LOG", _text(runner, stalled=stalled))
        self._stalled = stalled
        return stalled


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
