"""Whether the tasks that synchronize tables give signs of life: one whose process stands still is given up.

NOTES
A task is known by its sessions. A sign is a statement that runs and waits for no client, on either server; one that
began or ended since the last look; or bytes that a COPY has taken. Without a session nothing is known: the task may
wait for a slot of Spark, or for a server that it connects to, which has limits of its own. Heartbeats are not asked: a
copy sends them only while rows move. A take-over that was not needed costs the copy one more attempt, and nothing else.

Time is counted in looks, none of which adds more than a second: after a launcher was suspended, its tasks get their
time again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import psycopg

from pgsub.common.errors import WorkerDied
from pgsub.publisher.connect import Connection
from pgsub.target.ledger import worker_takeover
from pgsub.target.ledger.worker_takeover import Claim, TableSign

#: Seconds between two looks at the servers, but several in the time that a task has.
_EVERY, _LOOKS = 5.0, 8
_STEP = 1.0
# The sessions of a copy bear the name of the one that holds its snapshot. What is shown of them is as of now, although
# that one is in a transaction.
_WORKS = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_stat_activity a
  WHERE a.pid <> pg_catalog.pg_backend_pid() AND a.usename = current_user AND a.state = 'active'
    AND a.application_name = pg_catalog.current_setting('application_name')
    AND a.wait_event_type IS DISTINCT FROM 'Client')
"""


class TaskWatch:
    """The watch of tasks that run under some claims.

    :param session: the coordinator's, on the target.
    :param patience: seconds without a sign of life.
    :param holder: the session on the publisher that holds the snapshot of a copy.
    """

    def __init__(
        self, session: psycopg.Connection, claims: Sequence[Claim], patience: float, holder: Connection | None = None
    ) -> None:
        self._session = session
        self._claims = claims
        self._patience = patience
        self._holder = holder
        self._clock = self._looked = time.monotonic()
        self._quiet = 0.0
        self._before: TableSign | None = None

    def look(self) -> None:
        """See whether there is a sign of life.

        :raises WorkerDied: there was none for too long.
        """
        clock = time.monotonic()
        self._quiet += min(clock - self._clock, _STEP)
        self._clock = clock
        if clock - self._looked < min(_EVERY, self._patience / _LOOKS):
            return
        self._looked = clock
        sign, before = worker_takeover.table_sign(self._session, self._claims), self._before
        self._before = sign
        if not sign.sessions or sign.works or sign != before or self._publisher_works():
            self._quiet = 0.0
        elif self._quiet >= self._patience:
            raise WorkerDied(
                f"a task that synchronizes tables gave no sign of life for {self._quiet:.0f} s",
                detail="It is taken over.",
            )

    def _publisher_works(self) -> bool:
        with contextlib.suppress(psycopg.Error):  # a snapshot that is lost is noticed by who imports it
            if self._holder is not None:
                self._holder.execute("SELECT pg_catalog.pg_stat_clear_snapshot()")
                return self._holder.execute(_WORKS.encode()).fetchone() == (True,)
        return False
