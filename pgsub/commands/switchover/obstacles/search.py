"""Searches for obstacles to a switchover, in both directions. Nothing is changed on either server.

An *error* would make the switchover or its way back fail, or lose a write. A *warning* is about what applications may
miss on the other side. Each kind is one obstacle with the statements to paste. The reverse subscription is checked like
``create --no-copy-data``, with the servers exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import psycopg

from pgsub.commands.switchover.obstacles import (
    access,
    forward_publications,
    sequences,
    table_definitions,
    unfenced_writers,
    unreplicated_objects,
    way_back,
    way_back_publication,
)
from pgsub.commands.switchover.obstacles.obstacle import BOTH, ERROR, TAKING, Obstacle, Sides, Way, several
from pgsub.common.plural import counted
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.target.ledger import skipped_changes, subscriptions
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.ledger.tables import held_tables

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
    found = list(_of_subscription(sides, relations))
    searches, of_tables = _AGAIN if again else (_SEARCHES, _OF_TABLES)
    for search in (*searches, *(of_tables if relations else ())):
        found += search(sides)
    return sorted(dict.fromkeys(found), key=lambda one: one.severity != ERROR)


def _of_subscription(sides: Sides, relations: Sequence[RelationState]) -> Iterator[Obstacle]:
    """Yield obstacles in the ending subscription: everything must be replicated, and nothing held back."""
    name = word(sides.sub.name)
    if not sides.sub.enabled:
        message = f'subscription "{sides.sub.name}" is disabled'
        yield Obstacle(BOTH, ERROR, message, None, f"Enable it:\npgsub enable {name}")
    if not relations:
        message = f'subscription "{sides.sub.name}" has no tables'
        yield Obstacle(BOTH, ERROR, message, None, f"Publish some, and then:\npgsub refresh {name}")
    yield from several(
        [f"{one.schemaname}.{one.relname}" for one in relations if one.srsubstate != "r"],
        ("table", "tables"),
        "{} [is|are] not synchronized yet",
        "",
        f"Wait for it:\npgsub wait {name} --for synced",
        server=TAKING,
        severity=ERROR,
    )
    waiting = skipped_changes.usage(sides.taking, sides.sub.subid).waiting
    if waiting:
        yield Obstacle(
            TAKING,
            ERROR,
            f"{counted(waiting, 'skipped change', ('was', 'were'))} not replayed",
            "The subscription ends with the switchover, and nothing can replay them afterwards.",
            f"See them, and replay each, or give them up:\npgsub conflicts list {name}\n"
            f"pgsub conflicts replay {name} ID\npgsub conflicts prune {name} --older-than 0s",
        )
    held = held_tables.held(sides.taking, sides.sub.subid)
    names = [f"{one.schemaname}.{one.relname}" for one in relations if one.srrelid in held]
    options = " ".join(f"--release {word(one)}" for one in names)
    yield from several(
        names,
        ("table", "tables"),
        "changes of {} are held",
        "",
        f"Release them:\npgsub alter {name} {options}",
        server=TAKING,
        severity=ERROR,
    )
