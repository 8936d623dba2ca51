"""What a scheduler does with a subscription that no ``pgsub run`` serves: catch it up, and say how it is.

Nothing here needs the scheduler: airflow_dag.py, beside it in the folder of DAGs, calls it.
"""

from __future__ import annotations

from pathlib import Path

from pgsub.commands.reporter import CallbackReporter
from pgsub.commands.serve.run import RunOptions, run
from pgsub.commands.status.status import status
from pgsub.common.errors import PublisherUnavailable, TargetUnavailable, TimeoutExpired

#: What another try may mend; what else is raised waits for a person.
RETRIED = (PublisherUnavailable, TargetUnavailable, TimeoutExpired)


def catch_up(name: str, folder: Path, timeout: float = 1800) -> None:
    """Apply what waits in the slot.

    :raises PgsubError: the program's error, with message, detail, hint and exit code.
    """
    reporter = CallbackReporter(message=print, log=print)
    run(RunOptions((name,), folder, until_caught_up=True, timeout=timeout), reporter=reporter)


def report(name: str, folder: Path) -> dict[str, object]:
    """Return what monitoring wants to know."""
    [found] = status(folder, name)
    return {"state": found.state, "applied_lsn": found.applied_lsn, "errors": [row.message for row in found.errors]}
