"""Reads from the publisher whether its commits wait for this subscription. Mirrors syncrep.c's view.

synchronous_standby_names may change while a worker streams, and a walsender answers no query during a stream. So a
separate session reads it in a thread, and only while a commit may be waiting.
"""

from __future__ import annotations

import time

import psycopg

from pgsub.common.errors import PgsubError
from pgsub.common.threads import SupervisedThread
from pgsub.publisher import connect as publisher
from pgsub.publisher.server_errors import translate

#: Seconds between two reads: the longest wait of the first commit after the setting was changed.
CHECK_SECONDS = 15.0
_NAMES = ("synchronous_standby_names", "application_name")


class StandbyNames:
    """The setting as last read. A failed read is followed by another one.

    :param application_name: used unless ``conninfo`` has one.
    :param waits: result of :func:`named` at the start of the stream.
    """

    def __init__(self, conninfo: str, application_name: str, waits: bool) -> None:
        self._conninfo = conninfo
        self._application_name = application_name
        self._waits = waits
        self._next = time.monotonic() + CHECK_SECONDS
        self._thread: SupervisedThread | None = None

    def waits(self) -> bool:
        """Return whether commits wait. Called only where a position is reported at once just for such a commit."""
        clock = time.monotonic()
        if clock >= self._next and (self._thread is None or not self._thread.is_alive()):
            self._next = clock + CHECK_SECONDS
            self._thread = SupervisedThread("standby_names", "standby names", self._check)
            self._thread.try_start()
        return self._waits

    @property
    def waited(self) -> bool:
        """Whether commits waited when the setting was last read; does not read it."""
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
    """Return whether synchronous_standby_names has this session's application_name or ``*``.

    A name that merely contains it also counts: that costs only some writes to the ledger.

    :raises PgsubError: the session broke.
    """
    try:
        shown = [connection.execute(f"SHOW {name}".encode()).fetchone() for name in _NAMES]
    except psycopg.Error as error:
        raise translate(error, "read the publisher's settings") from None
    names, own = (row[0].lower() if row else "" for row in shown)  # pg_strcasecmp
    return "*" in names or (own != "" and own.replace('"', '""') in names)
