"""The watch for signs of life of tasks that synchronize tables. A task whose process hangs is given up.

NOTES
A task is recognized by its sessions. A sign of life is a statement that runs on either server and does not wait for the
client, one that began or ended since the last look, or progress of a COPY. Without a session nothing is known: the task
may wait for a task slot of Spark, or for a connection, which has a timeout of its own. Heartbeats are no evidence: a
copy sends them only while rows move. An unnecessary take-over costs another attempt at the copy, and nothing else.

Time is counted in looks, each of which adds at most a second. So after a launcher was suspended, its tasks get their
full time again.
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

#: Seconds between two looks at the servers, and the minimum number of looks within ``patience``.
_EVERY, _LOOKS = 5.0, 8
_STEP = 1.0
# The sessions of a copy have the same name as the one that holds its snapshot. Their state is current, although that
# session is in a transaction.
_WORKS = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_stat_activity a
  WHERE a.pid <> pg_catalog.pg_backend_pid() AND a.usename = current_user AND a.state = 'active'
    AND a.application_name = pg_catalog.current_setting('application_name')
    AND a.wait_event_type IS DISTINCT FROM 'Client')
"""


class TaskWatch:
    """The watch of tasks that run under some claims.

    :param session: the coordinator's session on the target.
    :param patience: maximum seconds without a sign of life.
    :param holder: session on the publisher that holds the snapshot of a copy.
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
        """Look for a sign of life.

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
        with contextlib.suppress(psycopg.Error):  # the session that imports a lost snapshot raises the error
            if self._holder is not None:
                self._holder.execute("SELECT pg_catalog.pg_stat_clear_snapshot()")
                return self._holder.execute(_WORKS.encode()).fetchone() == (True,)
        return False
