"""Verifies the identity of the publisher, on the session that is used, before anything is created, read or dropped.

This is the only place that compares the publisher with the one in the ledger. It mirrors nothing: the server's own
subscriber does not check, and silently loses changes after a restore or a failover.

NOTES: :func:`connect` compares system and database. That is enough to read under a snapshot, or to drop a slot that the
ledger names. Before START_REPLICATION and CREATE_REPLICATION_SLOT, :func:`verify` also compares the history. It uses
the furthest position of the whole subscription, because one worker's position says nothing about the others. A new
timeline is recorded before anything is created or read on it, so the ledger never has a position of an unrecorded
timeline.

Restored files (a volume snapshot without archive recovery) have the same system identifier and timeline. Once their WAL
has grown past the old position, only its content reveals them: :func:`check_last_transaction`. No such check is needed
if the slot's confirmed_flush_lsn has reached the worker's position. Restored files have a slot as old as themselves, so
they cannot be older than that position, and nothing before it is lost.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

import psycopg

from pgsub.common.errors import PgsubError, WrongSystem
from pgsub.common.quoting import named
from pgsub.common.subscription import Subscription, complete_hint
from pgsub.protocol.wal_records import Unreadable
from pgsub.publisher import connect as publisher
from pgsub.publisher import current_wal_lsn, database, identity, slots, wal_reader
from pgsub.publisher.connect import Connection
from pgsub.publisher.database import Database
from pgsub.publisher.identity import PublisherIdentity
from pgsub.publisher.slots import SlotState
from pgsub.target.ledger import publisher_record, subscriptions, worker_takeover
from pgsub.target.ledger.subscriptions import Identity, Publisher
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session.connect import must_use_password

_log = logging.getLogger(__name__)


def recorded(known: Identity) -> PublisherIdentity:
    """Return the publisher's identity as the ledger has it."""
    dbname, dboid = known.publisher_dbname or "", known.publisher_dboid or 0
    return PublisherIdentity(known.system_identifier or "", dbname, dboid, known.timeline or 0, 0, 0)


def recorded_database(session: psycopg.Connection, subid: int) -> Database | None:
    """Return the publisher's database as the ledger has it; None if no publisher has answered yet."""
    known = subscriptions.identity(session, subid)
    return None if known.system_identifier is None else recorded(known).database


def opener(
    session: psycopg.Connection, sub: Subscription, application_name: str | None = None, *, replication: bool = False
) -> Callable[[], Connection]:
    """Return a connect function for any thread; the publisher's identity is read from the target now.

    :param application_name: defaults to the name of the subscription.
    """
    expected, must = recorded_database(session, sub.subid), must_use_password(session, sub)

    def opened() -> Connection:
        with telling(sub):
            return database.open_session(
                sub.connection,
                expected,
                application_name=application_name or sub.name,
                replication=replication,
                must_use_password=must,
            )

    return opened


def connect(
    session: psycopg.Connection, sub: Subscription, application_name: str | None = None, *, replication: bool = False
) -> Connection:
    """Connect to the publisher; the parameters are those of :func:`opener`.

    :raises WrongSystem: another server, or another database, answers.
    """
    return opener(session, sub, application_name, replication=replication)()


def committed_position(session: psycopg.Connection, sub: Subscription) -> int:
    """Return where the publisher is, with every commit of this moment; an end position to wait for.

    :param session: on the target.
    :raises WrongSystem: another server answers, or one that went back in time: apply never comes there, or is beyond.
    """
    # read first: who applies meanwhile gets to what the publisher has flushed by then
    furthest = publisher_record.furthest(session, sub.subid)
    with contextlib.closing(connect(session, sub)) as connection:
        reached, standby = current_wal_lsn.committed_position(connection), slots.in_recovery(connection)
    with telling(sub):
        identity.check_not_behind(reached, furthest, in_recovery=standby)
    return reached


def verify(
    session: psycopg.Connection, replication: Connection, subid: int, claims: Sequence[Claim] = ()
) -> PublisherIdentity:
    """Verify the publisher and its history.

    :param claims: the workers that are about to use it. If given, a new timeline is recorded, and so is the first
        publisher that answers after ``create --no-connect``.
    :raises WrongSystem: another system, database or history.
    :raises Fenced: another worker took over.
    """
    known = subscriptions.identity(session, subid)
    if known.system_identifier is None:
        if not claims:
            return identity.identify(replication)
        known = _adopt(session, replication, claims[0])
    actual = _compared(session, replication, known)
    if not claims or actual.timeline == known.timeline:
        return actual
    others = worker_takeover.take_over_others(session, claims)
    actual = _compared(session, replication, known)
    # guard: a timeline is recorded before a position of it
    publisher_record.follow(session, [*claims, *others], actual.timeline)
    return actual


def _compared(session: psycopg.Connection, replication: Connection, known: Identity) -> PublisherIdentity:
    # read first: another worker may meanwhile apply up to a later flush position of the publisher
    furthest = publisher_record.furthest(session, known.subid)
    try:
        return identity.verify_publisher(replication, recorded(known), remote_lsn=furthest)
    except WrongSystem as error:
        error.hint = named(error.hint, known.subname)
        raise


def check_last_transaction(
    session: psycopg.Connection,
    replication: Connection,
    sub: Subscription,
    slot: SlotState | None,
    remote_lsn: int,
    worker: int = worker_takeover.APPLY,
) -> None:
    """Check that the publisher's WAL contains the transaction that ends at a worker's position.

    Only a proven absence is an error. WAL that cannot be read proves nothing and is ignored.

    :param replication: the session to verify; the WAL is read through a second one.
    :param slot: the worker's slot; None if there is none.
    :param remote_lsn: the worker's position.
    :raises WrongSystem: the WAL has another history; ``diverged``.
    """
    if slot is None or not (slot.confirmed_flush_lsn or 0) < remote_lsn:
        return
    ended = publisher_record.commit_time(session, sub.subid, worker, remote_lsn)
    if ended is None:
        return
    try:
        must = must_use_password(session, sub)
        there = _has_transaction(replication, sub, slot.restart_lsn or 0, remote_lsn, ended, must)
    except (Unreadable, PgsubError, psycopg.Error) as error:
        _log.debug("whether the publisher's WAL has the last transaction is not known: %s", error)
        return
    # guard: a publisher whose files were put back is not followed over the gap
    if not there:
        with telling(sub):
            raise identity.replaced_history(remote_lsn)


def _has_transaction(replication: Connection, sub: Subscription, oldest: int, lsn: int, ended: int, must: bool) -> bool:
    other = publisher.connect(sub.connection, application_name=sub.name, replication=True, must_use_password=must)
    with contextlib.closing(other):
        if not wal_reader.same_server(replication, other):
            raise Unreadable("another server answers at the publisher's address")
        return wal_reader.has_transaction(other, lsn, ended, oldest)


@contextlib.contextmanager
def telling(sub: Subscription) -> Iterator[None]:
    """Complete the hint of an error of the block, which was made without the subscription."""
    try:
        yield
    except WrongSystem as error:
        complete_hint(error, sub)
        raise


def _adopt(session: psycopg.Connection, replication: Connection, claim: Claim) -> Identity:
    """Record the first publisher that answers after ``create --no-connect``."""
    who = identity.identify(replication)
    known = Publisher(who.system_identifier, who.dbname, who.database_oid, who.timeline)
    subscriptions.adopt_publisher(session, claim, known)
    return subscriptions.identity(session, claim.subid)
