"""The slot of the way back: it is created before the pause, and begins behind all that came from the publisher.

NOTES
The slot's position is recorded in the journal of the taking side while nobody can write there, and the slot goes to
what is recorded, whoever does it and however late: no write of a client lies before it. All that was applied does, so
nothing is sent back.
"""

from __future__ import annotations

import psycopg

from pgsub.common.errors import PublisherUnavailable, SlotLost
from pgsub.protocol.lsn import format_lsn, parse_lsn
from pgsub.publisher import connect as publisher
from pgsub.publisher import slots
from pgsub.publisher.faults import translating
from pgsub.publisher.position import flushed_position
from pgsub.switchover import journal
from pgsub.target.session.transactions import durable


def record(taking: psycopg.Connection, id: str) -> int:
    """Record where the slot is to begin: behind everything that was committed on the taking side.

    :raises StateForbids: the taking side is not, or not any more, prepared.
    """
    with durable(taking):  # on disk with all commits before it: a slot goes no further than that
        journal.move(taking, id, (journal.PREPARED,), journal.PREPARED)
    position = flushed_position(taking)
    with durable(taking):
        journal.move(taking, id, (journal.PREPARED,), journal.PREPARED, position=format_lsn(position))
    return position


def advance(source: publisher.Connection, slot_name: str, position: int) -> None:
    """Let a slot begin at a position.

    :param source: on the taking side, of a role that may use slots.
    :raises SlotLost: there is no such slot.
    """
    state = slots.slot_state(source, slot_name)
    if state is None:
        raise SlotLost(f'replication slot "{slot_name}" of the way back does not exist')
    if (state.confirmed_flush_lsn or 0) < position:
        with translating(source, f'advance replication slot "{slot_name}"'):
            query = "SELECT end_lsn::text FROM pg_catalog.pg_replication_slot_advance(%s, %s::pg_lsn)"
            found = source.execute(query, (slot_name, format_lsn(position))).fetchone()
        if found is None or parse_lsn(found[0]) < position:
            raise PublisherUnavailable(f'replication slot "{slot_name}" did not reach {format_lsn(position)}')


def begin_at(giving: psycopg.Connection, subid: int, position: int) -> None:
    """Let the ledger of the way back begin there, too, in the open transaction; it never goes backward.

    :param subid: of the subscription that leads back.
    """
    giving.execute(
        "UPDATE pgsub.progress SET reported_lsn = greatest(reported_lsn, %s) WHERE subid = %s AND worker = 0",
        (format_lsn(position), subid),
    )
