"""The wait of a slot's creation for older transactions: which they are, and how the wait is ended.

A new slot is consistent after every transaction that was writing when its creation began has ended
(``SnapBuildWaitSnapshot``, snapbuild.c), in any database of the publisher and including prepared ones. The server waits
silently and without a limit. Here a second connection watches the wait, reports it, and cancels it on request.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from pgsub.common import quoting, server_words
from pgsub.common.errors import Fenced, PgsubError, TimeoutExpired, one_line
from pgsub.common.query import number, shown
from pgsub.common.threads import SupervisedThread
from pgsub.publisher.connect import Connection, connect
from pgsub.publisher.server_errors import translating

#: Receives message, detail and hint; called from the watching thread.
Report = Callable[[str, str | None, str | None], None]

_AFTER = 2.0  #: seconds after which a creation is watched
_POLL = 0.05
_EVERY = 1.0  #: seconds between checks, and between cancel requests
_JOIN = 10.0  #: seconds to wait for the end of a check, whose connection may be to a vanished host
_QUERY_LENGTH = 80
_SEE = (
    "See which ones are open, on the publisher:\nSELECT pid, xact_start, state, query"
    " FROM pg_stat_activity WHERE backend_xid IS NOT NULL ORDER BY xact_start;"
)


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction on the publisher that has written. Values that the role may not see are None."""

    pid: int | None  #: None: a prepared transaction
    gid: str | None  #: None: not a prepared transaction
    user: str | None
    application: str | None
    database: str | None
    since: str | None  #: UTC
    age: float | None  #: seconds
    state: str | None
    query: str | None

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"the transaction of PID {self.pid}" if self.gid is None else f'prepared transaction "{self.gid}"'

    def detail(self) -> str:
        """Format all known values, in one line."""
        named = (("User", self.user), ("application", self.application), ("database", self.database))
        parts = [f'{word} "{value}"' for word, value in named if value]
        if self.since is not None:
            parts.append(f"{'open' if self.gid is None else 'prepared'} since {self.since} UTC ({_age(self.age or 0)})")
        if self.state:
            parts.append(self.state)
        text = ", ".join(parts) or "Nothing of it may be seen by this role"
        return f"{text[0].upper()}{text[1:]}{f': {_line(self.query)}' if self.query else '.'}"

    def hint(self) -> str:
        """Format the statements that end it, to be run on the publisher."""
        if self.gid is None:
            return f"To end it, run this on the publisher:\nSELECT pg_terminate_backend({self.pid});"
        gid, database = quoting.literal(self.gid), one_line(str(self.database))
        return (
            f'Let its transaction manager end it, or run one of these in database "{database}" of the publisher:\n'
            f"COMMIT PREPARED {gid};\nROLLBACK PREPARED {gid};"
        )


def _age(seconds: float) -> str:
    whole = int(seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if whole >= 2 * length:
            return f"{whole // length} {unit}"
    return f"{whole} s"


def _line(query: str) -> str:
    text = " ".join(query.split())
    return text if len(text) <= _QUERY_LENGTH else f"{text[: _QUERY_LENGTH - 1]}…"


# A role without pg_read_all_stats does not see the activity of other roles, except pid, user and application.
# A database with SQL_ASCII cannot send text that is not valid UTF-8. Others send text of other databases unchanged.
_TRANSACTIONS = """
    SELECT a.pid, NULL::text, a.usename::text, a.application_name, a.datname::text,
        to_char(a.xact_start AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS'),
        date_part('epoch', clock_timestamp() - a.xact_start), a.state,
        CASE pg_catalog.getdatabaseencoding() WHEN 'SQL_ASCII'
             THEN pg_catalog.regexp_replace(a.query, '[^!-~]+', ' ', 'g') ELSE a.query END
    FROM pg_catalog.pg_stat_activity a WHERE a.backend_xid IS NOT NULL AND {active}
    UNION ALL
    SELECT NULL, p.gid, p.owner::text, NULL, p.database::text,
        to_char(p.prepared AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS'),
        date_part('epoch', clock_timestamp() - p.prepared), NULL, NULL
    FROM pg_catalog.pg_prepared_xacts p WHERE {prepared}
    ORDER BY 7 DESC NULLS LAST"""

_OLDER = _TRANSACTIONS.format(
    active="""a.pid <> pg_catalog.pg_backend_pid()
        AND clock_timestamp() - a.xact_start >= make_interval(secs => %(age)s)""",
    prepared="clock_timestamp() - p.prepared >= make_interval(secs => %(age)s)",
)

# A prepared transaction holds its locks without a pid.
_BLOCKING = _TRANSACTIONS.replace("a.backend_xid IS NOT NULL AND ", "").format(
    active="a.pid = ANY (pg_catalog.pg_blocking_pids(%(pid)s))",
    prepared="""p.transaction IN (SELECT l.transactionid FROM pg_catalog.pg_locks l
        WHERE l.pid = %(pid)s AND NOT l.granted AND l.locktype = 'transactionid')""",
)


def long_transactions(connection: Connection, age: float) -> list[OpenTransaction]:
    """List the transactions that have written and that a new slot would wait for, the oldest first.

    :param age: minimum age in seconds.
    """
    with translating(connection, "list open transactions of the publisher"):
        return _transactions(connection, _OLDER, {"age": age})


def _transactions(connection: Connection, query: str, params: dict[str, Any]) -> list[OpenTransaction]:
    return [_transaction(*row) for row in shown(connection, query, params)]


def _transaction(pid: Any, gid: Any, user: Any, application: Any, database: Any, *known: Any) -> OpenTransaction:
    """Make a transaction of a publisher's values. Its PID becomes part of a statement to run.

    :raises ProtocolViolation: a value is invalid.
    """
    since, age, state, query = known
    process = None if pid is None else number(pid, "process ID")
    seconds = age if isinstance(age, int | float) else None
    who = _text(gid), _text(user), _text(application), _text(database)
    return OpenTransaction(process, *who, _text(since), seconds, _text(state), _text(query))


def _text(sent: Any) -> str | None:
    return None if sent is None else str(sent)


class SlotWatch:
    """A watch of CREATE_REPLICATION_SLOT during a ``with`` block: it reports the transactions waited for, and cancels.

    A canceled creation leaves nothing behind: the server drops the slot with the command.

    :param replication: the connection that creates the slot in the block, and does nothing else.
    :param conninfo: for the second connection, which is opened only if the creation takes long.
    :param report: called once for each transaction waited for.
    :param stop: ends the wait when it is set.
    :param deadline: ends the wait, by ``time.monotonic()``.
    :raises Fenced: at the end of the block, if ``stop`` canceled the creation.
    :raises TimeoutExpired: likewise for the deadline, with the transactions waited for.
    """

    def __init__(
        self,
        replication: Connection,
        conninfo: str,
        slot_name: str,
        report: Report,
        *,
        stop: threading.Event | None = None,
        deadline: float | None = None,
        after: float = _AFTER,
    ) -> None:
        self._replication = replication
        self._pid = replication.pgconn.backend_pid
        self._conninfo = conninfo
        self._slot_name = slot_name
        self._report = report
        self._stop = stop
        self._deadline = deadline
        self._after = after
        self._done = threading.Event()
        self._cancelled: str | None = None  #: stop or deadline
        self._named: set[tuple[int | None, str | None, str | None]] = set()
        self._last: Sequence[OpenTransaction] = ()
        self._second: Connection | None = None
        self._thread = SupervisedThread(
            "slot_creation", "slot creation", self._run, on_death=lambda: self._cancel("death")
        )

    def __enter__(self) -> SlotWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._done.set()
        self._thread.join(_JOIN)
        if self._cancelled is None or not isinstance(error, PgsubError | psycopg.Error):
            return
        if self._cancelled == "death":
            raise self._thread.fatal_error or error from None
        if self._cancelled == "stop":
            raise Fenced("asked to stop") from None
        raise self._timeout() from None

    def _timeout(self) -> TimeoutExpired:
        message = f'timeout while creating replication slot "{self._slot_name}" on the publisher'
        if self._last:
            first, *more = self._last
            detail = f"It waits for {first.name}. {first.detail()}"
            others = f"\nAlso for {', '.join(other.name for other in more)}." if more else ""
            return TimeoutExpired(message, detail=f"{detail}{others}\nNothing was created.", hint=first.hint())
        return TimeoutExpired(
            message,
            detail="It waits for transactions that were open before; nothing was created.",
            hint=_SEE,
        )

    def _run(self) -> None:
        """Watch the creation (in the thread)."""
        check, cancel = time.monotonic() + self._after, 0.0
        with contextlib.ExitStack() as stack:
            while not self._done.wait(_POLL):
                self._thread.checkpoint()
                unwanted = self._unwanted()
                if time.monotonic() >= check or (unwanted == "deadline" and not cancel and not self._named):
                    check = time.monotonic() + _EVERY if self._check(stack) else float("inf")
                if unwanted and time.monotonic() >= cancel:
                    # repeatedly: the command may just be on its way to the server
                    self._cancel(unwanted)
                    check, cancel = float("inf"), time.monotonic() + _EVERY

    def _unwanted(self) -> str | None:
        if self._stop is not None and self._stop.is_set():
            return "stop"
        return "deadline" if self._deadline is not None and time.monotonic() >= self._deadline else None

    def _cancel(self, reason: str) -> None:
        self._cancelled = self._cancelled or reason
        with contextlib.suppress(psycopg.Error):  # the session has ended already
            self._replication.cancel_safe(timeout=5)

    def _check(self, stack: contextlib.ExitStack) -> bool:
        """Report the transactions waited for; return whether another check may find more."""
        try:
            if self._second is None:
                second = connect(self._conninfo, application_name=self._slot_name, timeout=3)
                self._second = stack.enter_context(contextlib.closing(second))
            self._name(self._second)
        except (PgsubError, psycopg.Error) as error:
            self._blind(error)
            return False
        return True

    def _name(self, second: Connection) -> None:
        self._last = _transactions(second, _BLOCKING, {"pid": self._pid}) or self._last
        for one in self._last:
            key = (one.pid, one.gid, one.since)
            if key not in self._named:
                self._named.add(key)
                message = f'creation of replication slot "{self._slot_name}" on the publisher waits for {one.name}'
                self._report(message, one.detail(), one.hint())
        if not self._named and second.execute("SELECT pg_catalog.pg_is_in_recovery()").fetchone() == (True,):
            self._named.add((None, None, None))
            self._report(
                f'creation of replication slot "{self._slot_name}" waits for the primary of the publisher',
                "The publisher is a standby; it needs the primary's next record of running transactions.",
                "Run this on the primary:\nSELECT pg_log_standby_snapshot();",
            )

    def _blind(self, error: PgsubError | psycopg.Error) -> None:
        reason = error.message if isinstance(error, PgsubError) else server_words.said(error).message
        self._report(
            f'creation of replication slot "{self._slot_name}" on the publisher waits for older transactions',
            f"Which ones could not be seen: {reason}.",
            _SEE,
        )
