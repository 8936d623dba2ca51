"""The slot of the reverse subscription, created before the pause. It starts after all changes from the publisher.

The slot's start is recorded in the taking side's journal while nobody can write there. The slot is advanced to the
recorded position, by whichever run and however late, so no write of a client is before it. All applied changes are
before it, so nothing is sent back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import psycopg

from pgsub.common.errors import PublisherUnavailable, SlotLost, StateForbids
from pgsub.protocol.lsn import format_lsn, parse_lsn
from pgsub.publisher import connect as publisher
from pgsub.publisher import slots
from pgsub.publisher.current_wal_lsn import flushed_position
from pgsub.publisher.server_errors import translating
from pgsub.switchover import journal
from pgsub.target.ledger import subscriptions
from pgsub.target.ledger.maintenance import origin_advance
from pgsub.target.session.transactions import durable

# A partition is published with its published root.
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
    """Record where the slot must start: after everything that was committed on the taking side.

    :return: that position.
    :raises StateForbids: the taking side is not in phase *prepared*.
    """
    with durable(taking):  # flushed with all earlier commits, because slots advance only to flushed WAL
        journal.move(taking, id, (journal.PREPARED,), journal.PREPARED)
    position = flushed_position(taking)
    with durable(taking):
        journal.move(taking, id, (journal.PREPARED,), journal.PREPARED, position=format_lsn(position))
    return position


def advance(source: publisher.Connection, slot_name: str, position: int) -> None:
    """Advance a slot to a position.

    :param source: a connection to the taking side, with a role that may use slots.
    :raises SlotLost: the slot does not exist.
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
    """Advance the reverse subscription's ledger to a position, in the open transaction. It never goes backwards.

    :param subid: the reverse subscription.
    :raises StateForbids: it is not in the ledger.
    """
    if subscriptions.apply_position(giving, subid) < position:
        # guard: a way back gets nothing that the other direction applied before it began
        origin_advance.move(giving, subid, position)


def published(source: publisher.Connection, publications: Sequence[str], tables: Collection[tuple[str, str]]) -> None:
    """Check that the taking side publishes tables, so that the reverse subscription gets their changes."""
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
