"""The ledger's copy of a definition, and which state store a subscription belongs to.

The state store has the definition; the copy is what another one is made of when that is lost (``run --from-target``).
It holds no connection string, so no secret. The launcher that serves the subscription keeps it up to date.

NOTES
A subscription that was rebuilt elsewhere must not be served by the old state store again: workers that ask for an
older list of publications would pass changes that the new one asked for. So each rebuild raises ``moves`` first, and
who has a lower number is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import psycopg

from pgsub.common.errors import StateForbids
from pgsub.common.query import row, scalar
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.target.session.transactions import durable

_RECORD = """
INSERT INTO pgsub.definition AS d (subid, options) VALUES (%s, %s::json) ON CONFLICT (subid)
 DO UPDATE SET options = excluded.options WHERE d.options::text IS DISTINCT FROM excluded.options::text
"""
_MOVE = """
INSERT INTO pgsub.definition AS d (subid, moves) VALUES (%s, 1) ON CONFLICT (subid) DO UPDATE SET moves = d.moves + 1
 RETURNING moves
"""


def record(connection: psycopg.Connection, subid: int, options: Mapping[str, Any]) -> None:
    """Store the options of a definition; where nothing differs nothing is written."""
    with durable(connection):
        connection.execute(_RECORD.encode(), (subid, json.dumps(dict(options))))


def recorded(connection: psycopg.Connection, subid: int) -> dict[str, Any] | None:
    """Return the options that were stored last; None where the creation was interrupted before it did."""
    found = scalar(connection, "SELECT options::text FROM pgsub.definition WHERE subid = %s", (subid,))
    return None if found is None else json.loads(found)


def move(connection: psycopg.Connection, subid: int, state_store: str) -> int:
    """Make a subscription that of another state store.

    :param state_store: the name of that one.
    :return: the number to know it by: any lower one is out of date.
    """
    with durable(connection):
        connection.execute("UPDATE pgsub.subscription SET state_store = %s WHERE subid = %s", (state_store, subid))
        return int(scalar(connection, _MOVE, (subid,)))


def moved_to(connection: psycopg.Connection, sub: Subscription) -> str | None:
    """Return the state store that a subscription was moved to, None where it belongs to the one that asks."""
    query = "SELECT state_store FROM pgsub.subscription JOIN pgsub.definition USING (subid) WHERE subid = %s"
    found = row(connection, f"{query} AND moves > %s", (sub.subid, sub.moves))
    return None if found is None else str(found[0])


def check_not_moved(connection: psycopg.Connection, sub: Subscription) -> None:
    """Refuse to go on from a definition that was left behind.

    :raises StateForbids: another state store was made of the ledger since.
    """
    place = moved_to(connection, sub)
    # guard: an outdated state store serves nothing
    if place is not None:
        raise StateForbids(
            f'subscription "{sub.name}" was moved to another state store',
            detail=f'It was rebuilt from the ledger in "{place}"; its definition here is out of date.',
            hint="Use that one. To remove the definition here, which leaves both servers as they are:\n"
            f"pgsub drop {word(sub.name)} --yes",
        )
