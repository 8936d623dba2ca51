"""The connections of one worker: the publisher's stream, and sessions on the target."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import psycopg

from pgsub.apply.conflicts.unique_violation import complete_report
from pgsub.apply.rows.relation_cache import RelationCache
from pgsub.apply.stream.assembler import Assembler
from pgsub.apply.stream.receiver import Timing
from pgsub.apply.stream.synchronous_standby import StandbyNames
from pgsub.common.errors import ApplyError
from pgsub.common.query import leave_transaction
from pgsub.common.subscription import Subscription
from pgsub.publisher.stream.walsender import WalSender
from pgsub.target.ledger.progress import Progress
from pgsub.target.ledger.worker_takeover import APPLY, Claim
from pgsub.target.session import connect as target
from pgsub.target.session import ledger_guard, origins
from pgsub.target.session.connect import SessionName


@dataclass(slots=True)
class TargetSession:
    """A writing session under the worker's claim."""

    connection: psycopg.Connection
    progress: Progress
    relations: RelationCache


@dataclass(slots=True)
class WorkerStreams:
    """Both ends of one worker; they are only restarted together."""

    session: TargetSession
    walsender: WalSender
    assembler: Assembler
    open_session: Callable[[], TargetSession]  #: opens a further writing session under the same claim
    open_writer: Callable[[], TargetSession]  #: opens a session for one of several writers
    standby: StandbyNames  #: whether publisher commits, even empty ones, wait for the flush position
    timing: Timing
    parallel_workers: int = 0  #: maximum transactions applied while they are received
    writers: int = 1  #: sessions that apply, including this one; AUTO for as many as pay
    set_based: bool = True  #: changes may be executed as sets
    pending: bool = False  #: two_phase waits until every table is ready
    confirmed: int = 0  #: the slot's confirmed_flush_lsn


def target_session(
    sub: Subscription,
    name: SessionName,
    claim: Claim,
    synchronous_commit: str,
    *,
    must: bool = False,
    spare: bool = False,
) -> TargetSession:
    """Open a session that makes changes as apply does, with its settings and replication origin.

    :param claim: checked by its commits of progress.
    :param must: see :func:`pgsub.target.session.origins.attach`, also for ``spare``.
    :raises TargetUnavailable: no origin is free.
    """
    connection = target.open_session(sub, name, synchronous_commit=synchronous_commit, bulk=True)
    try:
        # Rows are found by their index, as in RelationFindReplTupleByIndex. A plan made while the table was small would
        # stay as it grows, even for a whole long transaction. Without an index the plan is still a scan.
        connection.execute("SET enable_seqscan = off")
        ledger_guard.check(connection)
        tagged = origins.attach(connection, sub, must=must, spare=spare) is not None
        progress = Progress(connection, claim, tagged=tagged)
        tracked = progress.tagged and target.tracks_commits(connection)
        relations = RelationCache(connection, sub, replica=target.is_replica(connection), tracked=tracked)
        return TargetSession(connection, progress, relations)
    except BaseException:
        connection.close()
        raise


@contextlib.contextmanager
def changing_rows(sub: Subscription, worker: str, doing: str) -> Iterator[TargetSession]:
    """Open a session for a command that makes changes as apply does, all or none, without conflict rules."""
    name, claim = SessionName(sub.subid, worker, 0), Claim(sub.subid, APPLY, 0, "")
    session = target_session(replace(sub, on_conflict=()), name, claim, "on", must=True)
    with contextlib.closing(session.connection) as connection:
        try:
            yield session
        except ApplyError as error:
            leave_transaction(connection)
            complete_report(connection, error)
            raise
        except psycopg.Error as error:
            raise target.translate(error, doing) from None
