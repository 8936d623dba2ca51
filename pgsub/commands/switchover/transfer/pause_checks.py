"""Checks in the pause, before the right is given: both directions include all tables, and copy none."""

from __future__ import annotations

import psycopg

from pgsub.common.errors import StateForbids
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher import publication
from pgsub.switchover import way_back
from pgsub.target.ledger import skipped_changes, subscriptions
from pgsub.target.ledger.tables import held_tables


def check_way_there(
    taking: psycopg.Connection, sub: Subscription, back: Subscription, slots: publisher.Connection
) -> None:
    """Check that apply skips no table, and that every table is published on the taking side.

    :param slots: the session that advances the reverse subscription's slot.
    :raises StateForbids: a table is held, not synchronized, or not published there, or changes were skipped.
    """
    relations = subscriptions.relations(taking, sub.subid)
    held = held_tables.overview(taking, sub.subid)
    # guard: the right to write is not given while apply leaves out a table
    if held or any(one.srsubstate != "r" for one in relations):
        raise StateForbids(
            f'not all tables of subscription "{sub.name}" are synchronized, or some are held',
            hint=f"See which:\npgsub status {word(sub.name)}",
        )
    # guard: the right to write is not given while skipped changes wait for replay
    if skipped_changes.usage(taking, sub.subid).waiting:
        raise StateForbids(
            f'changes of subscription "{sub.name}" were skipped meanwhile, and not replayed',
            hint=f"See them, then replay or prune them:\npgsub conflicts list {word(sub.name)}",
        )
    names = [one.recorded or (one.schemaname, one.relname) for one in relations]
    way_back.published(slots, back.publications, names)


def check_way_back(giving: psycopg.Connection, back: Subscription, slots: publisher.Connection, command: str) -> None:
    """Check that the reverse subscription has every published table, and copies none.

    :param command: the command that restarts the switchover.
    """
    relations = subscriptions.relations(giving, back.subid)
    known = {one.recorded or (one.schemaname, one.relname) for one in relations}
    unknown = {one[:2] for one in publication.published_tables(slots, back.publications)} - known
    # guard: the right to write is not given while the way back would omit or copy a table
    if unknown or any(one.srsubstate != "r" for one in relations):
        raise StateForbids(
            f'subscription "{back.name}", which is to lead back, has not every table, or would copy one',
            hint=f"To create it again, begin the switchover again:\n{command}",
        )
