"""Searches for obstacles to a switchover, in both directions. Nothing is changed on either server.

An *error* would make the switchover or its way back fail, or lose a write. A *warning* is about what applications may
miss on the other side. Each kind is one obstacle with the statements to paste. The reverse subscription is checked like
``create --no-copy-data``, with the servers exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg

from pgsub.commands.switchover.obstacles import (
    access,
    forward_publications,
    sequences,
    subscription_state,
    table_definitions,
    unfenced_writers,
    unreplicated_objects,
    way_back,
    way_back_publication,
)
from pgsub.commands.switchover.obstacles.obstacle import ERROR, Obstacle, Sides, Way
from pgsub.common.subscription import Subscription
from pgsub.target.ledger import subscriptions

_Search = Callable[[Sides], Iterator[Obstacle]]
_SEARCHES: tuple[_Search, ...] = (
    way_back.reading,
    way_back.writing,
    unfenced_writers.find,
)
#: Searches that need subscribed tables.
_OF_TABLES: tuple[_Search, ...] = (
    forward_publications.find,
    way_back_publication.find,
    way_back.identities,
    way_back.tables,
    sequences.find,
    access.find,
    table_definitions.find,
    unreplicated_objects.find,
)
#: Searches of both kinds for obstacles that may have appeared after the first search.
_AGAIN: tuple[tuple[_Search, ...], tuple[_Search, ...]] = (
    (unfenced_writers.find,),
    (forward_publications.find, way_back_publication.find),
)


def find(
    giving: psycopg.Connection, taking: psycopg.Connection, sub: Subscription, back: Way, *, again: bool = False
) -> list[Obstacle]:
    """Search for all obstacles, errors first.

    :param giving: a session on the publisher with the role of the reverse subscription.
    :param taking: a session on the target with the role of the subscription. Both are outside a transaction.
    :param sub: the ending subscription.
    :param back: the reverse subscription.
    :param again: search only for obstacles that may have appeared since. The reverse subscription may exist by now.
    :raises psycopg.Error: a session is lost.
    """
    relations = subscriptions.relations(taking, sub.subid)
    tables = {one.recorded or (one.schemaname, one.relname): (one.schemaname, one.relname) for one in relations}
    sides = Sides(giving, taking, sub, back, tables, [one.srrelid for one in relations])
    found = list(subscription_state.find(sides, relations))
    searches, of_tables = _AGAIN if again else (_SEARCHES, _OF_TABLES)
    for search in (*searches, *(of_tables if relations else ())):
        found += search(sides)
    return sorted(dict.fromkeys(found), key=lambda one: one.severity != ERROR)
