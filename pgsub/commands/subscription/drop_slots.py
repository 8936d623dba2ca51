"""Drops the replication slots of a subscription. Mirrors ReplicationSlotDropAtPubNode (subscriptioncmds.c)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import psycopg

from pgsub.apply.verified_publisher import recorded_database
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import connect_publisher
from pgsub.commands.subscription import slot_owner
from pgsub.common.errors import PermissionMissing, PublisherUnavailable, SlotLost, StateForbids, WrongSystem
from pgsub.common.plural import counted
from pgsub.common.quoting import literal, word
from pgsub.common.subscription import Subscription, complete_hint
from pgsub.publisher import connect as publisher
from pgsub.publisher import slots
from pgsub.publisher.database import Database
from pgsub.publisher.server_errors import standby_lacks_slot
from pgsub.publisher.slot_names import is_sync_slot
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
    :raises PublisherUnavailable: a standby that lacks the main slot answers.
    :raises WrongSystem: the server is not the one on which the slots were made.
    """
    leftover = _of_tables(sub.subid, tables or ())
    if sub.slot_name is None and tables is not None and not leftover:
        return
    hint = f"To drop the subscription without its slot:\npgsub drop {word(sub.name)} --keep-slot --yes"
    first = sub.slot_name or next(iter(leftover), "pgsub_*")
    try:
        opened = connect_publisher(sub, expected=_made_on(session, sub.subid))
    except (WrongSystem, PermissionMissing) as error:
        # Slots of these names may be others' there, and the subscription's own slots would keep WAL forever.
        complete_hint(error, sub)
        error.hint = f"{error.hint}\n{hint}"
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
        if sub.slot_name is not None:
            _drop_main(connection, sub, sub.slot_name, session, reporter, hint, lost=lost)


def name_kept_slots(subid: int, tables: Sequence[RelationState], reporter: Reporter) -> None:
    """Name the slots of tables that may stay, because nothing knows them once the ledger has forgotten them."""
    if names := _of_tables(subid, tables):
        reporter.notice(
            f"{counted(len(names), 'replication slot')} of tables may stay on the publisher, and keep WAL there",
            "To drop them, run this there:\n"
            + "\n".join(f"SELECT pg_drop_replication_slot({literal(name)});" for name in names),
        )


def _of_tables(subid: int, tables: Sequence[RelationState]) -> list[str]:
    found = {one for table in tables for one in (table.sync_slot, table.spare_slot) if one is not None}
    # guard: a ledger names no slot of others, without " if is_sync_slot(subid, one)"
    return sorted(one for one in found if is_sync_slot(subid, one))


def _drop_main(
    connection: publisher.Connection,
    sub: Subscription,
    name: str,
    session: psycopg.Connection | None,
    reporter: Reporter,
    hint: str,
    *,
    lost: bool,
) -> None:
    """Drop the main slot. The ledger records before that it may be missing, and afterwards that it was dropped.

    :param hint: how to drop the subscription without its slot.
    """
    state = slots.slot_state(connection, name)
    # guard: a slot of another kind or database is not dropped
    if state is not None and slot_owner.is_foreign(state, connection.info.dbname):
        raise slot_owner.foreign(state, hint)
    # guard: a slot that the ledger has as that of another subscription is not dropped
    if session is not None and subscriptions.has_slot_of_another(session, sub.subid, name):
        detail = "The ledger on the target has it as that of another subscription."
        reporter.warning(f'replication slot "{name}" on the publisher is left as it is', detail)
        return
    begun, dropped = (True, False) if session is None else subscriptions.begin_slot_drop(session, sub.subid, name)
    # guard: a slot that was made after the subscription's was dropped stays
    if dropped and state is not None:
        detail = "An earlier command dropped the subscription's slot. Somebody else has made this one since."
        reporter.warning(f'replication slot "{name}" on the publisher is left as it is', detail)
        return
    try:
        slots.drop_slot(connection, name, missing_ok=False)
        reporter.notice(f'dropped replication slot "{name}" on publisher')
    except SlotLost as error:
        elsewhere = not dropped and slots.in_recovery(connection)
        # guard: a standby without the slot does not show that the slot is gone, without "elsewhere or "
        if elsewhere or not (begun or lost):
            if session is not None:
                subscriptions.registered(session, sub.subid)  # otherwise the next drop would accept the missing slot
            refused = standby_lacks_slot(name) if elsewhere else error
            refused.hint = hint
            raise refused from None
        reporter.warning(f'replication slot "{name}" does not exist on the publisher')
    if session is not None:
        subscriptions.end_slot_drop(session, sub.subid)


def warn_of_unnamed(left: Iterable[str], reporter: Reporter) -> None:
    """Warn of slots with names of the subscription that its ledger, after a restore, does not know."""
    for name in left:
        reporter.warning(f'replication slot "{name}" on the publisher is left as it is', *slots.of_no_table(name))


def _made_on(session: psycopg.Connection | None, subid: int) -> Database | None:
    """Return the database in which the slots were made, None if no ledger knows it."""
    if session is None:
        return None
    try:
        return recorded_database(session, subid)
    except StateForbids:  # the ledger has no such subscription
        return None
