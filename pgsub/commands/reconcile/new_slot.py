"""Creates the slot that replaces a lost one, and drops the old one."""

from __future__ import annotations

import contextlib

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.reconcile.diagnosis import Diagnosis
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import connect_publisher
from pgsub.commands.subscription import slot_owner
from pgsub.commands.subscription.drop_slots import warn_of_unnamed
from pgsub.common import failpoints, quoting
from pgsub.common.errors import PgsubError, StateForbids, TimeoutExpired
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher import identity, slots
from pgsub.publisher.slot_creation import SlotWatch
from pgsub.target.ledger import subscriptions
from pgsub.target.ledger.maintenance import reconciliation
from pgsub.target.ledger.subscriptions import Publisher
from pgsub.target.session.connect import must_use_password


def make(
    session: psycopg.Connection,
    store: StateStore,
    sub: Subscription,
    diagnosis: Diagnosis,
    deadline: float | None,
    reporter: Reporter,
    *,
    rolled_back: bool,
) -> tuple[Publisher, int]:
    """Drop the rest of the old slot, and make the new one.

    :param rolled_back: whether prepared transactions were rolled back, so that apply cannot go on from the old slot.
    :return: the publisher and the slot's consistent point.
    :raises StateForbids: somebody has made a slot of that name since it was looked for.
    """
    must = must_use_password(session, sub)
    expected = diagnosis.publisher.database  # as checked before the operator agreed
    changed, asked = rolled_back or diagnosis.interrupted, False
    try:
        with connect_publisher(sub, expected=expected, replication=True, must_use_password=must) as replication:
            who = identity.identify(replication)
            # A restored target does not know the slots made since its backup.
            warn_of_unnamed(_unnamed(session, replication, sub), reporter)
            changed |= _drop_old(replication, sub, diagnosis, who.dbname, reporter)
            failpoints.point("reconcile.dropped")
            asked = True
            position = _create(replication, store, sub, diagnosis.slot_name, deadline, reporter)
    except PgsubError as error:
        # guard: a reconciliation that changed nothing stops nothing
        if not changed and not (asked and _may_exist(error)):
            with contextlib.suppress(psycopg.Error):  # the user must see the original error
                reconciliation.withdraw(session, sub.subid)
        raise
    failpoints.point("reconcile.created")
    return Publisher(who.system_identifier, who.dbname, who.database_oid, who.timeline), position


def _drop_old(
    replication: publisher.Connection, sub: Subscription, diagnosis: Diagnosis, dbname: str, reporter: Reporter
) -> bool:
    """Drop the subscription's slot, unless another consumer has used it since.

    :return: whether a slot was dropped.
    :raises StateForbids: a slot has the name of the new one, and had it not when the operator agreed.
    """
    name = diagnosis.slot_name
    # guard: a slot that was made since it was looked for is not dropped
    if not diagnosis.replaces and slots.slot_state(replication, name) is not None:
        raise slot_owner.exists(sub, name)
    old = sub.slot_name
    state = None if old is None else slots.slot_state(replication, old)
    if old is None or state is None or slot_owner.is_foreign(state, dbname):
        return False
    # guard: a slot that another consumer uses is not dropped
    if old != name and _has_another_consumer(replication, sub, diagnosis, state, dbname, reporter):
        return False
    slots.drop_slot(replication, old)
    return True


def _create(
    replication: publisher.Connection,
    store: StateStore,
    sub: Subscription,
    name: str,
    deadline: float | None,
    reporter: Reporter,
) -> int:
    """Create the slot. The state store names it from just before, so that a drop of the subscription finds it.

    :return: the slot's consistent point.
    """
    store.alter(sub.subid, slot_name=name)  # no worker uses it yet, because of the ledger's mark
    try:
        with SlotWatch(replication, sub.connection, name, reporter.warning, deadline=deadline):
            return slots.create_slot(replication, name, failover=sub.failover)
    except PgsubError as error:
        # guard: a slot that was not created is not taken for the subscription's
        if not _may_exist(error):
            store.alter(sub.subid, slot_name=sub.slot_name)
        raise slot_owner.exists(sub, name) if error.sqlstate == slot_owner.DUPLICATE_OBJECT else error from None


def _may_exist(error: PgsubError) -> bool:
    """Return whether the slot may have been created although its creation ended with an error."""
    return error.sqlstate != slot_owner.DUPLICATE_OBJECT and not isinstance(error, TimeoutExpired)


def _unnamed(session: psycopg.Connection, replication: publisher.Connection, sub: Subscription) -> list[str]:
    """Return slots with names of this subscription's table slots that the ledger does not contain."""
    there = slots.sync_slots(replication, sub.subid)
    named = {name for one in subscriptions.relations(session, sub.subid) for name in (one.sync_slot, one.spare_slot)}
    return [name for name in there if name not in named]


def _has_another_consumer(
    replication: publisher.Connection,
    sub: Subscription,
    diagnosis: Diagnosis,
    slot: slots.SlotState,
    dbname: str,
    reporter: Reporter,
) -> bool:
    """Return whether another consumer has used the lost slot since, and warn if so."""
    detail = "It is past what the subscription has received."
    try:
        slot_owner.check_ours(replication, sub, slot.name, dbname)
        if (slot.confirmed_flush_lsn or 0) <= diagnosis.position.reported_lsn:
            return False
    except StateForbids as error:
        detail = error.detail or detail
    reporter.warning(
        f'replication slot "{slot.name}" was left on the publisher',
        detail=detail,
        hint="If nothing else needs it, drop it on the publisher, because it keeps WAL:\n"
        f"SELECT pg_drop_replication_slot({quoting.literal(slot.name)});",
    )
    return True
