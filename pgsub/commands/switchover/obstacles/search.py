"""What stands in the way of a switchover, in both directions; nothing is changed on either server.

An *error* is what would make the switchover or its way back fail, or lose a write; a *warning* what applications may
miss on the other side. Each kind is one obstacle with the statements to paste. The subscription that leads back is
checked as ``create --no-copy-data`` would check it, with the servers' roles exchanged.
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
#: Those that ask what is subscribed.
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
#: Of both kinds, those that look for what may come into the way after the first search.
_AGAIN: tuple[tuple[_Search, ...], tuple[_Search, ...]] = (
    (unfenced_writers.find,),
    (forward_publications.find, way_back_publication.find),
)


def find(
    giving: psycopg.Connection, taking: psycopg.Connection, sub: Subscription, back: Way, *, again: bool = False
) -> list[Obstacle]:
    """Look for everything that stands in the way, errors first.

    :param giving: a session on the publisher, of the role that the way back will write as.
    :param taking: one on the target whose ledger has the subscription, of its role. Both are outside a transaction.
    :param sub: the subscription that ends.
    :param back: the one that leads back.
    :param again: look for what may have come into the way since; the way back may exist by now.
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
