"""The slot of the way back: it is created before the pause, and begins behind all that came from the publisher.

NOTES
The slot's position is recorded in the journal of the taking side while nobody can write there, and the slot goes to
what is recorded, whoever does it and however late: no write of a client lies before it. All that was applied does, so
nothing is sent back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import psycopg

from pgsub.common.errors import PublisherUnavailable, SlotLost, StateForbids
from pgsub.protocol.lsn import format_lsn, parse_lsn
from pgsub.publisher import connect as publisher
from pgsub.publisher import slots
from pgsub.publisher.faults import translating
from pgsub.publisher.position import flushed_position
from pgsub.switchover import journal
from pgsub.target.session.transactions import durable

# A partition whose root is published is published with it.
_PUBLISHED = """
SELECT p.schemaname::text, p.tablename::text FROM pg_catalog.pg_publication_tables p WHERE p.pubname = ANY(%s::text[])
 UNION
SELECT n.nspname::text, c.relname::text
  FROM pg_catalog.pg_publication_tables p, pg_catalog.pg_class r, pg_catalog.pg_namespace s,
       pg_catalog.pg_partition_tree(r.oid) t, pg_catalog.pg_class c, pg_catalog.pg_namespace n
 WHERE p.pubname = ANY(%s::text[]) AND s.nspname = p.schemaname AND r.relnamespace = s.oid AND r.relname = p.tablename
   AND c.oid = t.relid AND n.oid = c.relnamespace
"""


def record(taking: psycopg.Connection, id: str) -> int:
    """Record where the slot is to begin: behind everything that was committed on the taking side.

    :return: that position.
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
    query = "UPDATE pgsub.progress SET reported_lsn = greatest(reported_lsn, %s) WHERE subid = %s AND worker = 0"
    if giving.execute(query, (format_lsn(position), subid)).rowcount != 1:
        raise StateForbids("the subscription that leads back is not in the ledger any more")


def published(source: publisher.Connection, publications: Sequence[str], tables: Collection[tuple[str, str]]) -> None:
    """Check that the taking side publishes tables, so that the way back will bring their changes."""
    with translating(source, "read the publications of the way back"):
        rows = source.execute(_PUBLISHED, (list(publications),) * 2).fetchall()
    missing = sorted(set(tables) - {(schema, name) for schema, name in rows})
    if missing:
        listed = ", ".join(f'"{schema}.{name}"' for schema, name in missing[:10])
        raise StateForbids(
            "the target does not publish every table, so that nothing would lead back",
            detail=f"{len(missing)} not published by {', '.join(publications)}: {listed}.",
            hint="See what to run there with --dry-run.",
        )
