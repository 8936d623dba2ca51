"""Runs :mod:`pgsub.apply.worker.executor_requirements` on an executor of a cluster before any worker starts there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from pgsub.apply.worker import executor_requirements
from pgsub.apply.worker.executor_requirements import Checked, CheckSpec
from pgsub.common.errors import Log, LogText, SparkUnusable, WorkerDied, log_text
from pgsub.common.subscription import Subscription
from pgsub.launcher.heartbeat_receiver import HeartbeatReceiver
from pgsub.spark import jobs

#: Seconds for each task that checks an executor. Each of its connections may take ten.
_CHECK_SECONDS = 90.0
#: Seconds that a heartbeat of that task may arrive after its result.
_HEARTBEAT_SECONDS = 2.0
_POLL = 0.05
#: Executors that may be lost while they are checked before Spark is reopened.
_EXECUTORS = 3


class ExecutorCheck:
    """The check, done once for each context.

    :param given_up: returns whether nobody waits for it any more.
    :ivar heartbeats: the receiver of the executors' heartbeats.
    """

    def __init__(self, log: Log, given_up: Callable[[], bool]) -> None:
        self._log = log
        self._given_up = given_up
        self._checks = 0
        self.heartbeats: HeartbeatReceiver | None = None

    def run(self, submitter: jobs.Submitter, subscriptions: Sequence[Subscription], spool_dir: str | None) -> None:
        """Check one executor.

        :param subscriptions: the subscriptions to serve.
        :param spool_dir: the folder of transactions in progress, None for Spark's scratch folder.
        :raises SparkUnusable: pgsub or every subscription cannot run there. If only some cannot run, or a server cannot
            be reached from there, that is logged: each worker reports it again, and tries again.
        """
        self._checks += 1
        address = None if self.heartbeats is None else self.heartbeats.address
        spec = CheckSpec(self._checks, tuple(subscriptions), address, spool_dir)
        found = self._ask(submitter, spec)
        if found is None:
            return
        unusable = {name: error for name, error in reversed(found.errors) if isinstance(error, SparkUnusable)}
        if subscriptions and len(unusable) == len(subscriptions):
            raise next(iter(unusable.values()))
        for name, error in found.errors:
            message = f'subscription "{name}": {error.message}'
            self._log("ERROR", log_text(message, detail=error.detail, context=error.context, hint=error.hint))
        self._check_heartbeat(found.host)

    def _ask(self, submitter: jobs.Submitter, spec: CheckSpec) -> Checked | None:
        """Run a task that checks an executor. Repeat it if the executor is lost.

        :return: its result, None if it did not start or end in time, which is logged.
        """
        end = time.monotonic() + _CHECK_SECONDS
        for left in reversed(range(_EXECUTORS)):
            job = submitter.submit("check executor", executor_requirements.run, [spec])
            while not job.wait(_POLL) and not self._given_up() and time.monotonic() < end:
                pass
            if not job.done():
                job.cancel()
                break
            try:
                return job.result(0)[0]
            except WorkerDied as error:
                if not left:  # losing so many executors is no temporary problem
                    raise SparkUnusable(error.message, detail=error.detail, hint=error.hint) from None
        if not self._given_up():
            text = f"the check of an executor was skipped, because it did not end within {_CHECK_SECONDS:.0f} s"
            detail = "A service or a passfile that is missing there, or another pgsub, is an error of each worker."
            self._log("WARNING", log_text(text, detail=detail))
        return None

    def _check_heartbeat(self, host: str) -> None:
        """Warn if no heartbeat arrives. Nothing else would explain why ``status`` is late."""
        receiver, nobody = self.heartbeats, executor_requirements.NOBODY
        end = time.monotonic() + _HEARTBEAT_SECONDS
        while receiver is not None and receiver.seconds_since(nobody, nobody, self._checks) == math.inf:
            if self._given_up():
                return
            if time.monotonic() >= end:
                self._log("WARNING", _deaf(host, receiver.address.host, receiver.address.port))
                return
            time.sleep(_POLL)


def _deaf(executor: str, host: str, port: int) -> LogText:
    return log_text(
        f'no heartbeat of the executor on "{executor}" arrives at "{host}", UDP port {port}',
        detail="Nothing is lost: positions come from the ledger, and are shown later.",
        hint="Let executors reach the port; give it a number if a firewall has to know it."
        "\n--conf spark.pgsub.heartbeat.port=7079",
    )
