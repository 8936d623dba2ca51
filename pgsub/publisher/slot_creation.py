"""The wait of a slot's creation for older transactions: which they are, and how the wait is ended.

A new slot is consistent once every transaction that wrote when it was begun has ended (``SnapBuildWaitSnapshot``,
snapbuild.c): in any database of the publisher, prepared ones included. The server waits without a word and without a
bound. Here the wait is watched from a second connection, named, and cancelled on request.
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
from pgsub.common.query import number
from pgsub.common.threads import SupervisedThread
from pgsub.publisher.connect import Connection, connect
from pgsub.publisher.faults import translating

#: message, detail, hint; called from the watching thread.
Report = Callable[[str, str | None, str | None], None]

_AFTER = 2.0  #: seconds that a creation may take before it is watched
_POLL = 0.05
_EVERY = 1.0  #: seconds between checks, and between tries to cancel
_JOIN = 10.0  #: seconds for a check under way to end; its connection may be to a host that vanished
_QUERY_LENGTH = 80
_SEE = (
    "See which ones are open, on the publisher:\nSELECT pid, xact_start, state, query"
    " FROM pg_stat_activity WHERE backend_xid IS NOT NULL ORDER BY xact_start;"
)


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction on the publisher that has written; what the role may not see of it is None."""

    pid: int | None  #: None: prepared
    gid: str | None  #: of a prepared one
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
        """Format everything that is known, in one line."""
        named = (("User", self.user), ("application", self.application), ("database", self.database))
        parts = [f'{word} "{value}"' for word, value in named if value]
        if self.since is not None:
            parts.append(f"{'open' if self.gid is None else 'prepared'} since {self.since} UTC ({_age(self.age or 0)})")
        if self.state:
            parts.append(self.state)
        text = ", ".join(parts) or "Nothing of it may be seen by this role"
        return f"{text[0].upper()}{text[1:]}{f': {_line(self.query)}' if self.query else '.'}"

    def hint(self) -> str:
        """Format the statements that end it, to be pasted on the publisher."""
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


# Activity of other roles is hidden from a role without pg_read_all_stats; pid, user and application are not.
_TRANSACTIONS = """
    SELECT a.pid, NULL::text, a.usename::text, a.application_name, a.datname::text,
        to_char(a.xact_start AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS'),
        date_part('epoch', clock_timestamp() - a.xact_start), a.state, a.query
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

# The holder of a prepared transaction's lock has no pid.
_BLOCKING = _TRANSACTIONS.replace("a.backend_xid IS NOT NULL AND ", "").format(
    active="a.pid = ANY (pg_catalog.pg_blocking_pids(%(pid)s))",
    prepared="""p.transaction IN (SELECT l.transactionid FROM pg_catalog.pg_locks l
        WHERE l.pid = %(pid)s AND NOT l.granted AND l.locktype = 'transactionid')""",
)


def long_transactions(connection: Connection, age: float) -> list[OpenTransaction]:
    """List the transactions that have written and that a new slot would wait for, the oldest first.

    :param age: seconds that they have been open at least.
    """
    with translating(connection, "list open transactions of the publisher"):
        return _transactions(connection, _OLDER, {"age": age})


def _transactions(connection: Connection, query: str, params: dict[str, Any]) -> list[OpenTransaction]:
    found = connection.execute(query.encode(), params).fetchall()
    return [_transaction(*row) for row in found]


def _transaction(pid: Any, gid: Any, user: Any, application: Any, database: Any, *known: Any) -> OpenTransaction:
    """Make a transaction of what a publisher sent: its number becomes a part of a statement to paste.

    :raises ProtocolViolation: it is none.
    """
    since, age, state, query = known
    process = None if pid is None else number(pid, "process ID")
    seconds = age if isinstance(age, int | float) else None
    who = _text(gid), _text(user), _text(application), _text(database)
    return OpenTransaction(process, *who, _text(since), seconds, _text(state), _text(query))


def _text(sent: Any) -> str | None:
    return None if sent is None else str(sent)


class SlotWatch:
    """Watches CREATE_REPLICATION_SLOT for the length of a ``with`` block: names whom it waits for, cancels it.

    Nothing is left behind a cancelled creation: the server drops the slot with the command.

    :param replication: the connection that creates the slot, inside the block and nothing else.
    :param conninfo: for the second connection, opened only once the creation takes long.
    :param report: called once for each transaction waited for.
    :param stop: ends the wait when it is set.
    :param deadline: of ``time.monotonic()``.
    :raises Fenced: from the block's end, where the creation was cancelled because of ``stop``.
    :raises TimeoutExpired: likewise because of the deadline; names whom it waited for.
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
        """Run in the thread."""
        check, cancel = time.monotonic() + self._after, 0.0
        with contextlib.ExitStack() as stack:
            while not self._done.wait(_POLL):
                self._thread.checkpoint()
                unwanted = self._unwanted()
                if time.monotonic() >= check or (unwanted == "deadline" and not cancel and not self._named):
                    check = time.monotonic() + _EVERY if self._check(stack) else float("inf")
                if unwanted and time.monotonic() >= cancel:
                    # again and again: the command may only just be on its way
                    self._cancel(unwanted)
                    check, cancel = float("inf"), time.monotonic() + _EVERY

    def _unwanted(self) -> str | None:
        if self._stop is not None and self._stop.is_set():
            return "stop"
        return "deadline" if self._deadline is not None and time.monotonic() >= self._deadline else None

    def _cancel(self, reason: str) -> None:
        self._cancelled = self._cancelled or reason
        with contextlib.suppress(psycopg.Error):  # the session has ended by itself
            self._replication.cancel_safe(timeout=5)

    def _check(self, stack: contextlib.ExitStack) -> bool:
        """Name what is waited for.

        :return: whether another check may see more.
        """
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
