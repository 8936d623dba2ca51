"""Diagnoses why a subscription cannot continue at its publisher and slot, and finds obstacles to a new slot.

Makes the same checks as a worker at its start (``apply/worker/start.py``), and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import psycopg

from pgsub.apply import verified_publisher
from pgsub.commands.subscription import slot_owner
from pgsub.common.errors import PgsubError, PublisherUnavailable, ReplicationBroken, StateForbids, WrongSystem
from pgsub.common.quoting import named, word
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher import identity, slot_names, slots
from pgsub.publisher.current_wal_lsn import check_replayed
from pgsub.publisher.identity import PublisherIdentity
from pgsub.publisher.slots import SlotState
from pgsub.target.ledger import subscriptions
from pgsub.target.ledger.maintenance import origin_advance
from pgsub.target.ledger.maintenance.origin_advance import Position
from pgsub.target.ledger.subscriptions import Identity

#: The first version whose standbys support logical slots.
_STANDBY_VERSION = 160000


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The state of a subscription's slot and publisher.

    :ivar slot_name: the name of the new slot.
    :ivar replaces: a slot of that name exists, and is dropped for the new one.
    :ivar position: the position of apply.
    :ivar trouble: why apply cannot continue, None if it can.
    """

    known: Identity
    publisher: PublisherIdentity
    slot_name: str
    replaces: bool
    position: Position
    trouble: PgsubError | None

    @property
    def interrupted(self) -> bool:
        """Whether an earlier command began to make a new slot."""
        return self.known.new_slot is not None

    @property
    def fits(self) -> bool:
        """Whether slot, publisher and ledger match."""
        return self.trouble is None and not self.interrupted

    @property
    def reason(self) -> str:
        """The reason as a clause for the operator."""
        if self.trouble is not None:
            return self.trouble.message
        return "an earlier reconciliation was interrupted" if self.interrupted else "it was asked for"


def diagnose(
    session: psycopg.Connection,
    replication: publisher.Connection,
    sub: Subscription,
    slot_name: str | None,
    *,
    force: bool,
) -> Diagnosis:
    """Find out why a subscription cannot continue.

    :param slot_name: a name for the new slot, None for the subscription's.
    :param force: whether to make a new slot even if nothing is wrong.
    :raises StateForbids: nothing is wrong, or a new slot cannot be made.
    :raises WrongSystem: the server is not the subscription's publisher.
    """
    known = subscriptions.identity(session, sub.subid)
    _check_connected(known, sub)
    actual, trouble = _publisher(session, replication, sub)
    # read first: a launcher that serves it meanwhile moves both
    slot = None if sub.slot_name is None else slots.slot_state(replication, sub.slot_name)
    position = origin_advance.position(session, sub.subid)
    # Never a name from the ledger, because its owner must not decide which slots of the publisher are dropped.
    wanted = slot_name or sub.slot_name
    if wanted is None:
        raise StateForbids(
            f'subscription "{sub.name}" has no replication slot',
            hint=f"Name the one to be made:\npgsub reconcile {word(sub.name)} --slot-name NAME",
            sqlstate="55000",
        )
    slot_names.valid_slot_name(wanted)
    if sub.slot_name is not None and trouble is None:
        trouble = _slot(session, replication, sub, slot, position, actual)
    if trouble is not None:
        trouble.hint = named(trouble.hint, sub.name)
    found = Diagnosis(known, actual, wanted, False, position, trouble)
    if found.fits and not force:
        raise _nothing_to_do(sub)
    _check_standby(replication, position.remote_lsn)
    return replace(found, replaces=slot_owner.is_replaced(replication, sub, wanted, actual.dbname))


def _check_connected(known: Identity, sub: Subscription) -> None:
    """Refuse a subscription that has nothing to compare.

    :raises StateForbids: the subscription was never connected.
    """
    if known.system_identifier is None:
        raise StateForbids(
            f'subscription "{sub.name}" has never been connected to its publisher',
            hint=f"Make its slot on the publisher, then:\npgsub refresh {word(sub.name)}",
            sqlstate="55000",
        )


def _publisher(
    session: psycopg.Connection, replication: publisher.Connection, sub: Subscription
) -> tuple[PublisherIdentity, PgsubError | None]:
    """Identify the publisher. If it went back in time, return that error.

    :raises WrongSystem: the server is another system or database.
    """
    try:
        with verified_publisher.telling(sub):
            return verified_publisher.verify(session, replication, sub.subid), None
    except WrongSystem as error:
        # guard: tables are not compared with another publisher
        if not error.diverged:
            raise
        return identity.identify(replication), error


def _slot(
    session: psycopg.Connection,
    replication: publisher.Connection,
    sub: Subscription,
    slot: SlotState | None,
    position: Position,
    who: PublisherIdentity,
) -> PgsubError | None:
    """Return the problem of the subscription's slot, or of the WAL that it decodes, None if there is none."""
    try:
        reported, name = position.reported_lsn, sub.slot_name or ""
        identity.check_slot(slot, reported, name, who.dbname, in_recovery=who.in_recovery)
        verified_publisher.check_last_transaction(session, replication, sub, slot, position.remote_lsn)
    except ReplicationBroken as error:
        return error
    except PublisherUnavailable as error:
        if slot is not None or not error.standby:
            raise
        return error  # the slot may have been made on this standby
    return None


def _nothing_to_do(sub: Subscription) -> StateForbids:
    name = word(sub.name)
    return StateForbids(
        f'replication slot "{sub.slot_name}" has all that subscription "{sub.name}" needs',
        detail="Nothing was lost, as far as slot, publisher and ledger show.",
        hint="To compare the tables, or to make another slot all the same:\n"
        f"pgsub verify {name}\npgsub reconcile {name} --force",
        sqlstate="55000",
    )


def _check_standby(replication: publisher.Connection, applied: int) -> None:
    """Refuse a standby that cannot have a logical slot, or that has not replayed what the target has.

    :param applied: the position that apply has reached.
    """
    check_replayed(replication, applied)
    if slots.in_recovery(replication) and replication.info.server_version < _STANDBY_VERSION:
        raise StateForbids(
            "the publisher is a standby",
            detail="Standbys can have logical replication slots from PostgreSQL 16 on.",
            hint="Promote it, or give the primary's address with pgsub alter --connection.",
            sqlstate="55000",
        )
