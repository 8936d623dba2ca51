"""Creates the slot that replaces a lost one, and drops the old one."""

from __future__ import annotations

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.reconcile.diagnosis import Diagnosis, check_ours, is_foreign
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import connect_publisher
from pgsub.commands.subscription.drop_slots import warn_of_unnamed
from pgsub.common import failpoints, quoting
from pgsub.common.errors import StateForbids
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher import identity, slots
from pgsub.publisher.slot_creation import SlotWatch
from pgsub.target.ledger import subscriptions
from pgsub.target.ledger.subscriptions import Publisher
from pgsub.target.session.connect import must_use_password


def make(
    session: psycopg.Connection,
    store: StateStore,
    sub: Subscription,
    diagnosis: Diagnosis,
    deadline: float | None,
    reporter: Reporter,
) -> tuple[Publisher, int]:
    """Drop the rest of the old slot, and make the new one.

    The state store always names the only existing slot, so that a drop of the subscription finds it.

    :return: the publisher and the slot's consistent point.
    """
    name = diagnosis.slot_name
    must = must_use_password(session, sub)
    expected = diagnosis.publisher.database  # as checked before the operator agreed
    with connect_publisher(sub, expected=expected, replication=True, must_use_password=must) as replication:
        who = identity.identify(replication)
        # A restored target does not know the slots made since its backup.
        warn_of_unnamed(_unnamed(session, replication, sub), reporter)
        for old in {name: None, sub.slot_name or name: None}:
            state = slots.slot_state(replication, old)
            if state is None or is_foreign(state, who.dbname):
                continue
            # guard: a slot that another consumer uses is not dropped
            if old != name and _has_another_consumer(replication, sub, diagnosis, state, who.dbname, reporter):
                continue
            slots.drop_slot(replication, old)
        failpoints.point("reconcile.dropped")
        store.alter(sub.subid, slot_name=name)  # no worker uses it yet, because of the ledger's mark
        with SlotWatch(replication, sub.connection, name, reporter.warning, deadline=deadline):
            position = slots.create_slot(replication, name, failover=sub.failover)
    failpoints.point("reconcile.created")
    return Publisher(who.system_identifier, who.dbname, who.database_oid, who.timeline), position


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
        check_ours(replication, sub, slot.name, dbname)
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
