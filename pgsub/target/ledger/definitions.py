"""The ledger's copy of a subscription's definition, and which state store the subscription belongs to.

The state store has the definition. If it is lost, ``run --from-target`` rebuilds it from the copy. The copy holds no
connection string, so no secret. The launcher that serves the subscription keeps it up to date.

NOTES
A worker that streams other publications than those that the tables follow would skip changes for ever. So (1) the
ledger's copy names the publications that its tables follow. It changes in the commit that changes the tables, or if no
table has to follow; until then nobody streams the new publications. (2) Each change of the publications has a number,
the ``generation``. A state store with a lower one comes from an older backup, and is refused. (3) The old state store
must not serve a subscription that was rebuilt elsewhere. So each rebuild first raises ``moves``, and a state store with
a lower number is refused.
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
_RECORDED = "SELECT options::text FROM pgsub.definition WHERE subid = %s"
_NEWER = """
SELECT state_store, moves > %s FROM pgsub.subscription JOIN pgsub.definition USING (subid)
 WHERE subid = %s AND (moves > %s OR (options ->> 'generation')::int > %s)
"""
_MOVE = """
INSERT INTO pgsub.definition AS d (subid, moves) VALUES (%s, 1) ON CONFLICT (subid) DO UPDATE SET moves = d.moves + 1
 RETURNING moves
"""


def record(connection: psycopg.Connection, subid: int, options: Mapping[str, Any]) -> None:
    """Store the options of a definition. Nothing is written if nothing differs.

    The publications remain those that the tables follow. Options older than the copy are not stored.
    """
    with durable(connection):
        stored = _options(scalar(connection, f"{_RECORDED} FOR UPDATE", (subid,))) or {}
        if stored.get("generation", 0) > options["generation"]:
            return
        kept = ("publications", "generation") if options["unrefreshed"] else ()
        _write(connection, subid, {**options, **{name: stored[name] for name in kept if name in stored}})


def tables_follow(connection: psycopg.Connection, subid: int, options: Mapping[str, Any]) -> None:
    """Store the options of a definition in the transaction that makes the tables follow its publications."""
    _write(connection, subid, options)


def _write(connection: psycopg.Connection, subid: int, options: Mapping[str, Any]) -> None:
    connection.execute(_RECORD.encode(), (subid, json.dumps({**options, "unrefreshed": False})))


def tables_are_behind(connection: psycopg.Connection, sub: Subscription) -> bool:
    """Return whether the tables still follow the previous publications."""
    if not sub.unrefreshed:
        return False
    stored = recorded(connection, sub.subid) or {}
    return int(stored.get("generation", 0)) < sub.generation


def recorded(connection: psycopg.Connection, subid: int) -> dict[str, Any] | None:
    """Return the options that were stored last; None if the creation was interrupted before."""
    return _options(scalar(connection, _RECORDED, (subid,)))


def _options(found: str | None) -> dict[str, Any] | None:
    return None if found is None else json.loads(found)


def move(connection: psycopg.Connection, subid: int, state_store: str) -> int:
    """Assign a subscription to another state store.

    :param state_store: name of the new state store.
    :return: the new value of ``moves``. A definition with a lower one is out of date.
    """
    with durable(connection):
        connection.execute("UPDATE pgsub.subscription SET state_store = %s WHERE subid = %s", (state_store, subid))
        return int(scalar(connection, _MOVE, (subid,)))


def moved_to(connection: psycopg.Connection, sub: Subscription) -> str | None:
    """Return the state store that a subscription was moved to; None if the definition in ``sub`` is up to date."""
    found = _newer(connection, sub)
    return None if found is None else found[0]


def _newer(connection: psycopg.Connection, sub: Subscription) -> tuple[str, bool] | None:
    """Return the state store with a newer definition, and whether it was rebuilt from the ledger; None if none is."""
    found = row(connection, _NEWER, (sub.moves, sub.subid, sub.moves, sub.generation))
    return None if found is None else (str(found[0]), bool(found[1]))


def check_not_moved(connection: psycopg.Connection, sub: Subscription) -> None:
    """Check that the definition is up to date.

    :raises StateForbids: another state store was rebuilt from the ledger, or the publications were changed.
    """
    found = _newer(connection, sub)
    # guard: an outdated state store serves nothing
    if found is None:
        return
    place, moved = found
    remove = f"To remove the definition here, which leaves both servers as they are:\npgsub drop {word(sub.name)} --yes"
    if moved:
        raise StateForbids(
            f'subscription "{sub.name}" was moved to another state store',
            detail=f'It was rebuilt from the ledger in "{place}"; its definition here is out of date.',
            hint=f"Use that one. {remove}",
        )
    raise StateForbids(
        f'the state store is older than the ledger of subscription "{sub.name}"',
        detail="Its publications were changed since. The state folder may be a restored backup, or another machine's.",
        hint=f"Use the newer one, or recreate the definition from the ledger. {remove}\n"
        f"pgsub run {word(sub.name)} --from-target --connection CONNINFO --target CONNINFO",
    )
