"""Catch a subscription up every hour, on a machine where no ``pgsub run`` stays, and fail where something is wrong."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from airflow.decorators import dag, task

FOLDER = Path("/var/lib/pgsub")


@task(retries=2, retry_delay=timedelta(minutes=5))
def catch_up(name: str) -> None:
    """Apply what waits in the slot; what another try does not mend is not tried again."""
    import scheduled
    from airflow.exceptions import AirflowFailException

    from pgsub.common.errors import PgsubError

    try:
        scheduled.catch_up(name, FOLDER)
    except scheduled.RETRIED:
        raise
    except PgsubError as error:
        raise AirflowFailException("\n".join([error.message, *error.lines()])) from None


@task
def report(name: str) -> dict[str, object]:
    """Return what monitoring wants to know."""
    import scheduled

    return scheduled.report(name, FOLDER)


@dag(schedule="@hourly", start_date=datetime(2026, 1, 1), catchup=False, max_active_runs=1)
def pgsub_sales() -> None:
    """Catch up, then report."""
    catch_up("sales") >> report("sales")


pgsub_sales()
