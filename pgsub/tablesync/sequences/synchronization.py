"""The synchronization of a subscription's sequences with the publisher's values, and its results.

Mirrors copy_sequences (sequencesync.c): an obstacle to one sequence does not keep the others from being set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from pgsub.common.errors import PgsubError, TargetUnavailable
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher.server_errors import translating
from pgsub.publisher.tables import only_published
from pgsub.tablesync.sequences import reading, writing
from pgsub.tablesync.sequences.comparison import Compared, Obstacle, Wanted, compare
from pgsub.tablesync.sequences.definition import Name, Position
from pgsub.target.ledger import subscriptions
from pgsub.target.session import connect as target


@dataclass(frozen=True, slots=True)
class Outcome:
    """A sequence after an attempt to synchronize it. Positions are None if they were not read.

    :ivar ahead: how far the target is ahead, in the direction of the sequence; negative if it is behind.
    :ivar busy: it could not be set: open transactions of the target took values from it, or it was set back meanwhile.
    """

    key: Name
    oid: int | None
    publisher: Position | None = None
    target: Position | None = None
    ahead: int | None = None
    moved: bool = False
    busy: bool = False
    obstacle: Obstacle | None = None
    error: PgsubError | None = None  #: the target's error when it was set

    @property
    def shown(self) -> str:
        """Schema and name, unquoted."""
        return ".".join(self.key)

    @property
    def problem(self) -> str | None:
        """Why it is not synchronized; None if it is."""
        if self.obstacle is not None:
            return self.obstacle.message
        if self.error is not None:
            return self.error.message
        return "open transactions of the target took values of it" if self.busy else None


def look(session: psycopg.Connection[Any], source: publisher.Connection, sub: Subscription) -> Compared:
    """Compare the sequences of a subscription without changing anything. Both sessions are prepared for it first.

    :param session: session on the target, which :func:`bring` may use afterwards.
    """
    reading.prepare(session)
    known = subscriptions.relations(session, sub.subid)
    tables = {one.recorded or (one.schemaname, one.relname): (one.schemaname, one.relname) for one in known}
    with translating(source, "fetch sequence info from publisher"):
        reading.prepare(source)
        # guard: the target names no sequence of an unpublished table to be read
        tables = {name: tables[name] for name in only_published(source, tables, sub.publications)}
        return compare(source, session, tables, sub.publications, run_as_owner=sub.run_as_owner)


def bring(
    session: psycopg.Connection[Any],
    found: Compared,
    *,
    run_as_owner: bool,
    allow_backward: bool = False,
    lock_timeout: str = writing.LOCK_TIMEOUT,
    stop: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """Set the target's values that are behind, or, with ``allow_backward``, that differ.

    :param session: the target's session of :func:`look`, in autocommit mode.
    :param stop: if it returns True, the remaining sequences are left out.
    :return: the outcomes, sorted by name.
    :raises psycopg.Error: the session is lost.
    """
    readable = [one.local.key for one in found.wanted if one.local.usable and one.local.readable]
    try:
        known = reading.positions(session, readable)
    except psycopg.errors.LockNotAvailable:  # one is being truncated: each is read separately
        known = {}
    outcomes = [Outcome(one.key, one.oid, obstacle=one) for one in found.obstacles]
    for one in found.wanted:
        if stop():
            break
        before = known.get(one.local.key)
        if before is not None and not writing.moves(before, one, allow_backward=allow_backward):
            outcomes.append(_outcome(one, before))
        else:
            outcomes.append(_set(session, one, before, run_as_owner, allow_backward, lock_timeout))
    return sorted(outcomes, key=lambda one: one.key)


def bring_together(session: psycopg.Connection[Any], found: Compared, *, run_as_owner: bool) -> None:
    """Set values that are behind, in the open transaction. No session may draw values from these sequences.

    :func:`bring` sets each in a transaction of its own, and waits for sessions that draw values.
    """
    readable = [one.local.key for one in found.wanted if one.local.usable and one.local.readable]
    known = reading.positions(session, readable)
    both = [(known[one.local.key], one) for one in found.wanted if one.local.key in known]
    behind = [one for before, one in both if writing.moves(before, one, allow_backward=False)]
    writing.set_together(session, behind, run_as_owner=run_as_owner)


def _set(
    session: psycopg.Connection[Any],
    one: Wanted,
    before: Position | None,
    run_as_owner: bool,
    allow_backward: bool,
    lock_timeout: str,
) -> Outcome:
    try:
        before, moved = writing.bring_up(
            session, one, run_as_owner=run_as_owner, allow_backward=allow_backward, lock_timeout=lock_timeout
        )
    except (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled):
        return _outcome(one, before, busy=True)
    except psycopg.Error as error:
        if session.closed:
            raise
        doing = f'set sequence "{one.local.shown}"'
        return _outcome(one, before, error=target.translate(error, doing, user=session.info.user))
    return _outcome(one, one.position if moved else before, moved=moved)


def _outcome(one: Wanted, target: Position | None, **more: Any) -> Outcome:
    ahead = None if target is None else target.ahead_of(one.position, one.definition.increment)
    set_back = target is not None and not more.get("moved") and writing.went_back(target, one)
    more["busy"] = more.get("busy", False) or set_back
    return Outcome(one.local.key, one.local.oid, one.position, target, ahead, **more)


def failure(sub: Subscription, outcomes: Iterable[Outcome], kind: type[PgsubError]) -> PgsubError | None:
    """Make the server's error for sequences that could not be synchronized, with statements that help.

    Sequences that open transactions took values from are not failures: the next attempt may find them free.

    :param kind: class of the error, unless the only failures are the target's own errors.
    :return: None if there is no failure.
    """
    failed = [one for one in outcomes if one.problem is not None and not one.busy]
    if not failed:
        return None
    obstacles = [one.obstacle for one in failed if one.obstacle is not None]
    if failed[0].error is not None and not obstacles:
        return failed[0].error
    return kind(
        f'logical replication sequence synchronization failed for subscription "{sub.name}"',
        detail="\n".join(one.problem or "" for one in failed),
        hint="\n".join([*_statements(obstacles), "Then try again:", f"pgsub refresh {word(sub.name)} --sequences"]),
        sqlstate="55000",
    )


def kept(sub: Subscription, outcomes: Iterable[Outcome]) -> PgsubError | None:
    """Make the error for sequences that open transactions keep from being set; None if there are none."""
    names = [f'"{one.shown}"' for one in outcomes if one.busy]
    if not names:
        return None
    return TargetUnavailable(
        f'open transactions of the target keep sequences of subscription "{sub.name}" from being set',
        detail=f"Sequences: {', '.join(names)}.",
        hint="Sessions that took values of them, or truncate their tables, must end their transactions. pg_locks on the"
        " target names them.",
        sqlstate="55P03",
    )


def _statements(obstacles: Sequence[Obstacle]) -> list[str]:
    lines = []
    for side in ("publisher", "target"):
        statements = [text for one in obstacles if one.side == side for text in one.statements]
        if statements:
            lines += [f"Run this on the {side}:", *statements]
    return lines
