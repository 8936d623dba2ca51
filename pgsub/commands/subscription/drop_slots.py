"""Drops the replication slots of a subscription. Mirrors ReplicationSlotDropAtPubNode (subscriptioncmds.c)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import psycopg

from pgsub.apply.verified_publisher import recorded_database
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import connect_publisher
from pgsub.common.errors import PermissionMissing, PublisherUnavailable, SlotLost, StateForbids, WrongSystem
from pgsub.common.quoting import named, word
from pgsub.common.subscription import Subscription
from pgsub.publisher import slots
from pgsub.publisher.database import Database
from pgsub.target.ledger import subscriptions
from pgsub.target.ledger.subscriptions import RelationState


def drop_slots(
    sub: Subscription,
    tables: Sequence[RelationState] | None,
    session: psycopg.Connection | None,
    reporter: Reporter,
    *,
    lost: bool,
) -> None:
    """Drop the subscription's slots on the publisher.

    :param tables: the tables, None if they are unknown. The slots of their synchronization are then found by name.
    :param session: a session on the target, None if no ledger knows the subscription.
    :param lost: whether the main slot is known to be lost.
    :raises SlotLost: the main slot is missing, but is not known to be lost, nor was dropped by an earlier command.
    :raises WrongSystem: the server is not the one on which the slots were made.
    """
    leftover = sorted({one for t in tables or () for one in (t.sync_slot, t.spare_slot) if one is not None})
    if sub.slot_name is None and tables is not None and not leftover:
        return
    hint = f"To drop the subscription without its slot:\npgsub drop {word(sub.name)} --keep-slot --yes"
    first = sub.slot_name or next(iter(leftover), "pgsub_*")
    try:
        opened = connect_publisher(sub, expected=_made_on(session, sub.subid))
    except (WrongSystem, PermissionMissing) as error:
        # Slots of these names may be others' there, and the subscription's own slots would keep WAL forever.
        error.hint = f"{named(error.hint, sub.name)}\n{hint}"
        raise
    except PublisherUnavailable as error:
        raise PublisherUnavailable(
            f'could not connect to publisher when attempting to drop replication slot "{first}": {error.message}',
            detail=error.detail,
            hint=hint,
            sqlstate=error.sqlstate,
        ) from None
    with opened as connection:
        for name in leftover if tables is not None else slots.sync_slots(connection, sub.subid):
            slots.drop_sync_slot(connection, sub.subid, name)
        warn_of_unnamed(slots.sync_slots(connection, sub.subid), reporter)
        if sub.slot_name is None:
            return
        with _begun(None if lost else session, sub.subid) as may_be_missing:
            try:
                slots.drop_slot(connection, sub.slot_name, missing_ok=False)
            except SlotLost as error:
                if not may_be_missing:
                    error.hint = hint
                    raise
                reporter.warning(f'replication slot "{sub.slot_name}" does not exist on the publisher')
                return
        reporter.notice(f'dropped replication slot "{sub.slot_name}" on publisher')


def warn_of_unnamed(left: Iterable[str], reporter: Reporter) -> None:
    """Warn of slots with names of the subscription that its ledger, after a restore, does not know."""
    for name in left:
        reporter.warning(f'replication slot "{name}" on the publisher is left as it is', *slots.of_no_table(name))


@contextlib.contextmanager
def _begun(session: psycopg.Connection | None, subid: int) -> Iterator[bool]:
    """Record in the ledger that the slot is being dropped, so that the next drop accepts that it is missing.

    :return: whether it may already be missing.
    """
    if session is None:
        yield True
        return
    before = subscriptions.begin_slot_drop(session, subid)
    try:
        yield before
    except SlotLost:
        subscriptions.registered(session, subid)  # otherwise the next drop would accept the missing slot
        raise


def _made_on(session: psycopg.Connection | None, subid: int) -> Database | None:
    """Return the database in which the slots were made, None if no ledger knows it."""
    if session is None:
        return None
    try:
        return recorded_database(session, subid)
    except StateForbids:  # the ledger has no such subscription
        return None
