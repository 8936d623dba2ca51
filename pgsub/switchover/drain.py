"""Waits until everything that the publisher committed is on the target, and nothing more arrives.

A commit on the publisher with synchronous_commit = on flushes every earlier commit, including asynchronous ones. So the
flush position after the commit of the fence, or after a later one of this module, covers everything that was confirmed
to clients. The publisher is quiet when apply has covered such a position and has applied no transaction that ended
after an earlier one: any writer in between would be noticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import psycopg

from pgsub.common import quoting
from pgsub.common.errors import StateForbids, TimeoutExpired
from pgsub.common.query import row, scalar
from pgsub.protocol.lsn import format_lsn, parse_lsn
from pgsub.publisher.current_wal_lsn import flushed_position
from pgsub.target.ledger import worker_takeover
from pgsub.target.session.transactions import durable

#: Number of times that changes may arrive after the fence before this is an error.
_LEAKS = 5
#: Bytes of WAL for which :func:`announce` is in effect, and seconds within which even busy apply notices it.
AHEAD_BYTES, KNOWN_SECONDS = 64 << 20, 1.25
_POLL = 0.002
_CHECK = 0.5
_PREPARED = """
SELECT gid, owner::text FROM pg_catalog.pg_prepared_xacts
 WHERE database = pg_catalog.current_database() ORDER BY prepared
"""
_LEDGER_PUBLISHED = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_publication_tables WHERE pubname = ANY(%s::text[]) AND schemaname = 'pgsub')
"""
_WRITING = """
SELECT l.pid FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a USING (pid)
 WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted AND a.datname = current_database()
   AND l.pid <> pg_catalog.pg_backend_pid() AND l.pid <> ALL(%s::int[])
"""


def announce(taking: psycopg.Connection, subid: int, position: int) -> None:
    """Make apply check frequently for requests, until the publisher has written AHEAD_BYTES. Wait until apply knows."""
    worker_takeover.ask_to_record(taking, subid, position + AHEAD_BYTES)
    time.sleep(KNOWN_SECONDS)


def withdraw(taking: psycopg.Connection, subid: int) -> None:
    """Let apply check at its usual rate again."""
    worker_takeover.ask_to_record(taking, subid, 0)


def mark(giving: psycopg.Connection, id: str) -> int:
    """Commit durably on the publisher. Return a position that covers this and every earlier commit."""
    with durable(giving):
        # Not an UPDATE, which would be replicated if all tables are published.
        giving.execute("SELECT FROM pgsub.switchover WHERE id = %s FOR UPDATE", (id,))
    return flushed_position(giving)


def publishes_ledger(giving: psycopg.Connection, publications: Sequence[str]) -> bool:
    """Return whether pgsub's own commits on the publisher are replicated, too."""
    return scalar(giving, _LEDGER_PUBLISHED, (list(publications),)) is True


def quiet(
    giving: psycopg.Connection,
    taking: psycopg.Connection,
    subid: int,
    id: str,
    deadline: float,
    check: Callable[[], object],
    keep: Collection[int] = (),
) -> int:
    """Wait until everything from a fenced publisher is applied, and nothing more arrives.

    :param deadline: in time of ``time.monotonic()``.
    :param check: called now and then. It raises the error that stops apply.
    :param keep: PIDs of this command's own sessions on the publisher.
    :return: a position after all changes.
    :raises TimeoutExpired: apply did not reach it in time, or a prepared transaction stays undecided.
    :raises StateForbids: clients still write.
    """
    resolved(giving, deadline)
    resolved(taking, deadline)
    _written(giving, keep, deadline)
    position = mark(giving, id)
    for _ in range(_LEAKS):
        covered(taking, subid, position, deadline, check)
        before, position = position, mark(giving, id)
        # guard: the right to write is not given while changes still arrive, always
        if covered(taking, subid, position, deadline, check) <= before:
            return position
    raise StateForbids(
        "clients still write to the fenced publisher",
        detail=f"Transactions were committed there behind {format_lsn(before)}.",
        hint="Look for sessions that set default_transaction_read_only off, and for writers that are no clients:\n"
        "SELECT pid, backend_type, usename, application_name, query FROM pg_stat_activity;",
    )


def covered(taking: psycopg.Connection, subid: int, position: int, deadline: float, check: Callable[[], object]) -> int:
    """Wait until apply has covered a position.

    :return: the end of the last transaction that it applied.
    :raises TimeoutExpired: apply did not cover the position in time.
    """
    asked, next_check = False, time.monotonic() + _CHECK
    while True:
        reached, applied = _progress(taking, subid)
        if reached >= position:
            return applied
        if not asked:
            worker_takeover.ask_to_record(taking, subid, position)
            asked = True
        if time.monotonic() >= next_check:
            check()
            next_check, asked = time.monotonic() + _CHECK, False
        if time.monotonic() > deadline:
            raise TimeoutExpired(
                "timeout while waiting for apply",
                detail=f"It is at {format_lsn(reached)}, not at {format_lsn(position)}.",
            )
        time.sleep(_POLL)


def _progress(taking: psycopg.Connection, subid: int) -> tuple[int, int]:
    found = row(
        taking,
        "SELECT greatest(remote_lsn, reported_lsn)::text, remote_lsn::text FROM pgsub.progress"
        " WHERE subid = %s AND worker = 0",
        (subid,),
    )
    if found is None:
        raise StateForbids("the subscription is no longer in the ledger")
    return parse_lsn(found[0]), parse_lsn(found[1])


def _written(giving: psycopg.Connection, keep: Collection[int], deadline: float) -> None:
    """Wait until all transactions that have written to the publisher's database have ended, of any process."""
    while found := giving.execute(_WRITING, (list(keep),)).fetchall():
        if time.monotonic() > deadline:
            raise TimeoutExpired(
                "timeout while waiting for open transactions of the publisher",
                detail=f"PIDs: {', '.join(str(pid) for (pid,) in found)}.",
                hint="See what they do there:\nSELECT pid, backend_type, usename, application_name, query FROM"
                " pg_stat_activity;",
            )
        time.sleep(_POLL)


def resolved(giving: psycopg.Connection, deadline: float) -> None:
    """Wait until the publisher has no undecided prepared transactions, which could be committed after the fence."""
    while found := giving.execute(_PREPARED).fetchall():
        if time.monotonic() > deadline:
            listed = ", ".join(f'"{gid}" of "{owner}"' for gid, owner in found)
            raise TimeoutExpired(
                "timeout while waiting for prepared transactions",
                detail=f"Prepared and not decided: {listed}.",
                hint="Commit them or roll them back there:\n"
                + "\n".join(f"ROLLBACK PREPARED {quoting.literal(gid)};" for gid, _ in found),
            )
        time.sleep(_POLL)
