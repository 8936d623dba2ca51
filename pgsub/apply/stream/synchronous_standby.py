"""Whether commits on the publisher wait for this subscription: its synchronous_standby_names. Mirrors syncrep.c's view.

The setting may change while a worker streams, and a walsender in the middle of a stream answers no question. So a
separate session reads it, in a thread of its own, and only while there is something that a commit may wait for.
"""

from __future__ import annotations

import time

import psycopg

from pgsub.common.errors import PgsubError
from pgsub.common.threads import SupervisedThread
from pgsub.publisher import connect as publisher
from pgsub.publisher.faults import translate

#: Seconds between two reads: what the first commit waits at most after the setting was changed.
CHECK_SECONDS = 15.0
_NAMES = ("synchronous_standby_names", "application_name")


class StandbyNames:
    """The setting as last read. A read that failed, however it ended, is followed by another.

    :param conninfo: of the publisher; ``application_name`` is shown there unless the conninfo names one.
    :param waits: what the setting said at the start of the stream, see :func:`named`.
    """

    def __init__(self, conninfo: str, application_name: str, waits: bool) -> None:
        self._conninfo = conninfo
        self._application_name = application_name
        self._waits = waits
        self._next = time.monotonic() + CHECK_SECONDS
        self._thread: SupervisedThread | None = None

    def waits(self) -> bool:
        """Return whether commits wait; asked where a position is reported at once only for such a commit."""
        clock = time.monotonic()
        if clock >= self._next and (self._thread is None or not self._thread.is_alive()):
            self._next = clock + CHECK_SECONDS
            self._thread = SupervisedThread("standby_names", "standby names", self._check)
            self._thread.try_start()
        return self._waits

    @property
    def waited(self) -> bool:
        """Whether commits waited when the setting was read last; it is not read again for that."""
        return self._waits

    def _check(self) -> None:
        try:
            connection = publisher.connect(self._conninfo, application_name=self._application_name)
            try:
                self._waits = named(connection)
            finally:
                connection.close()
        except PgsubError:
            return  # the stream meets the same problem and reports it


def named(connection: publisher.Connection) -> bool:
    """Return whether synchronous_standby_names names this session's application_name, or every one.

    A name that only contains it counts as well: that costs some writes to the ledger and nothing else.

    :raises PgsubError: the session broke.
    """
    try:
        shown = [connection.execute(f"SHOW {name}".encode()).fetchone() for name in _NAMES]
    except psycopg.Error as error:
        raise translate(error, "read the publisher's settings") from None
    names, own = (row[0].lower() if row else "" for row in shown)  # pg_strcasecmp
    return "*" in names or (own != "" and own.replace('"', '""') in names)
