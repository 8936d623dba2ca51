"""The ledger's copy of a subscription's definition, and which state store has the newest one.

The state store has the definition. If it is lost, ``run --from-target`` rebuilds it from the copy. The copy holds no
connection string, so no secret. The launcher that serves the subscription keeps it up to date.

NOTES
A worker that streams other publications than those that the tables follow would skip changes for ever. So (1) the
ledger's copy names the publications that its tables follow. It changes in the commit that changes the tables, or if no
table has to follow; until then nobody streams the new publications. (2) Each change of the publications has a number,
the ``generation``. A worker with a lower one is refused. (3) Each change of the copy has a number, too, ``recorded``.
The state store notes it before the ledger has it. So a state store with a lower one comes from an older backup, or
another one took its place, and it is refused. Later changes of it do not make it newer. (4) The old state store must
not serve a subscription that was rebuilt elsewhere. So each rebuild first raises ``moves``, and a state store with a
lower number is refused. (5) A state store may be older than its whole subscription, which was dropped and created again
with the same slot. (6) The target may come back as it was before a change of the tables, from a backup or a standby
that lagged. So each set of tables has a number, ``table_set``, in the commit that changes them. The state store notes
it only after that commit. A ledger with a lower one has lost the change, and nobody streams until a refresh.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import psycopg

from pgsub.common.errors import StateForbids, SwitchedOver
from pgsub.common.query import row, scalar
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.target.ledger import right_to_write
from pgsub.target.session.transactions import durable

#: Reads a definition from the state store, None if it was dropped there.
Read = Callable[[], Subscription | None]

#: Numbers are below it, unless the ledger's owner writes others.
_LIMIT = 2**31
_RECORD = """
INSERT INTO pgsub.definition AS d (subid, options) VALUES (%s, %s::json) ON CONFLICT (subid)
 DO UPDATE SET options = excluded.options WHERE d.options::text IS DISTINCT FROM excluded.options::text
"""
_RECORDED = "SELECT options::text FROM pgsub.definition WHERE subid = %s"
_NUMBERS = """
SELECT s.state_store, coalesce(d.moves, 0), coalesce((d.options ->> 'generation')::int, 0),
       coalesce((d.options ->> 'recorded')::int, 0)
  FROM pgsub.subscription AS s LEFT JOIN pgsub.definition AS d USING (subid) WHERE s.subid = %s
"""
_OF_SLOT = """
SELECT subid, subname, created_at < %s::timestamptz FROM pgsub.subscription WHERE slot_name = %s ORDER BY subid LIMIT 1
"""
_MOVE = """
INSERT INTO pgsub.definition AS d (subid, moves) VALUES (%s, 1) ON CONFLICT (subid) DO UPDATE SET moves = d.moves + 1
 RETURNING moves
"""


def record(
    connection: psycopg.Connection, sub: Subscription, options: Mapping[str, Any], note: Callable[[int, int], None]
) -> bool:
    """Store the options of a definition. Nothing is written if nothing differs.

    The publications remain those that the tables follow.

    :param note: writes the number of the copy to the state store, before the ledger has it, and that of its tables.
    :return: False if the options are older than the copy, and so were not stored.
    """
    with durable(connection):
        stored = _options(scalar(connection, f"{_RECORDED} FOR UPDATE", (sub.subid,))) or {}
        number = number_of(stored)
        # while another command writes newer ones
        if number > sub.recorded or stored.get("generation", 0) > options["generation"]:
            return False
        tables = table_set_of(stored)
        kept = ("publications", "generation") if options["unrefreshed"] or tables < sub.table_set else ()
        wanted = _copy(sub, {**options, **{name: stored[name] for name in kept if name in stored}}, tables)
        differs = wanted != {name: value for name, value in stored.items() if name != "recorded"}
        # or a command was killed before it noted the set
        if differs or tables > sub.table_set:
            note(sub.recorded + 1, tables)
            _write(connection, sub.subid, wanted, sub.recorded + 1)
        return True


def tables_follow(
    connection: psycopg.Connection, sub: Subscription, options: Mapping[str, Any], *, changed: bool
) -> None:
    """Store the options of a definition in the transaction that makes the tables follow its publications.

    :param changed: whether a table was added or removed. The set then has a new number.
    """
    stored = recorded(connection, sub.subid)
    # of both, so that a ledger that had lost changes is no longer behind
    tables = max(table_set_of(stored), sub.table_set) + changed
    _write(connection, sub.subid, _copy(sub, options, tables), number_of(stored))


def _copy(sub: Subscription, options: Mapping[str, Any], tables: int) -> dict[str, Any]:
    """Return what the ledger has of a definition. The slot is there only to see that it changed.

    :param tables: number of the set of tables. It is left out as long as no command has changed the set.
    """
    numbers = {"table_set": tables} if tables else {}
    return dict(json.loads(json.dumps({**options, "unrefreshed": False, "slot_name": sub.slot_name, **numbers})))


def _write(connection: psycopg.Connection, subid: int, options: Mapping[str, Any], number: int) -> None:
    connection.execute(_RECORD.encode(), (subid, json.dumps({**options, "recorded": number})))


def number_of(stored: Mapping[str, Any] | None) -> int:
    """Return the number of the ledger's copy, 0 if there is none."""
    return _number(stored, "recorded")


def table_set_of(stored: Mapping[str, Any] | None) -> int:
    """Return the number of the ledger's set of tables, 0 if no command has changed it."""
    return _number(stored, "table_set")


def _number(stored: Mapping[str, Any] | None, name: str) -> int:
    number = (stored or {}).get(name)
    return number if isinstance(number, int) and 0 <= number < _LIMIT else 0


def table_set(connection: psycopg.Connection, subid: int) -> int:
    """Return the number of the ledger's set of tables, as committed."""
    return table_set_of(recorded(connection, subid))


def tables_are_behind(connection: psycopg.Connection, sub: Subscription) -> bool:
    """Return whether the tables still follow the previous publications, or follow them again.

    :param sub: as the state store has it now, read before the ledger.
    """
    stored = recorded(connection, sub.subid) or {}
    # guard: nothing is streamed to a target that has lost a change of its tables
    if table_set_of(stored) < sub.table_set:
        return True
    return sub.unrefreshed and int(stored.get("generation", 0)) < sub.generation


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


def check_newest(connection: psycopg.Connection, sub: Subscription, read: Read | None = None) -> None:
    """Check that a definition is the newest one.

    :raises StateForbids: see :func:`outdated`.
    """
    error = outdated(connection, sub, read)
    # guard: an outdated state store serves nothing
    if error is not None:
        raise error


def outdated(connection: psycopg.Connection, sub: Subscription, read: Read | None = None) -> StateForbids | None:
    """Return why the state store does not have the newest definition, None if it has.

    :param read: reads the definition in the state store, which is written before the ledger and so is read after it.
        None for a worker, because options that restart no worker may have changed since it got its definition.
    """
    found = row(connection, _NUMBERS, (sub.subid,))
    if found is None:
        return _switched_over(connection, sub) or _created_again(connection, sub)
    place, moves, generation, number = found
    if moves > sub.moves:
        return StateForbids(
            f'subscription "{sub.name}" was moved to another state store',
            detail=f'It was rebuilt from the ledger in "{place}"; its definition here is out of date.',
            hint=f"Use that one. {_remove(sub.name)}",
        )
    now = None if read is None else read()
    # guard: a state store from before a change is refused, without " or (now is not None and number > now.recorded)"
    if generation > sub.generation or (now is not None and number > now.recorded):
        return StateForbids(
            f'the state store is older than the ledger of subscription "{sub.name}"',
            detail=f"The definition was changed since. {_WHENCE}",
            hint=_anew(sub.name, sub.name),
        )
    return None


def _switched_over(connection: psycopg.Connection, sub: Subscription) -> StateForbids | None:
    """Return the error if a switchover has ended a subscription that the ledger does not know."""
    back = right_to_write.way_back(connection, sub.subid)
    if back is None:
        return None
    # guard: nobody is told to make a subscription again that a switchover has ended
    return SwitchedOver(
        f'subscription "{sub.name}" was switched over, and the state store is older',
        detail=f'Clients write on its target, and subscription "{back}" leads back to its publisher. {_WHENCE}',
        hint=_anew(sub.name, back),
    )


def _created_again(connection: psycopg.Connection, sub: Subscription) -> StateForbids | None:
    """Return the error if another subscription of the ledger has the slot of one that the ledger does not know.

    If the other one was there before this one was known here, the ledger is older: the target was restored.
    """
    found = None if sub.slot_name is None else row(connection, _OF_SLOT, (sub.known_since, sub.slot_name))
    # guard: a target that is older than the state store is not taken for a newer one, without " or found[2]"
    if found is None or found[2]:
        return None
    subid, name, _ = found
    # guard: a state store that is older than its subscription does nothing to it
    return StateForbids(
        f'the state store is older than the ledger, where slot "{sub.slot_name}" belongs to another subscription',
        detail=f'The ledger does not know subscription number {sub.subid}, and has "{name}", number {subid}. {_WHENCE}',
        hint=_anew(sub.name, name),
    )


_WHENCE = "The state folder may be a restored backup, or another machine's."


def _anew(here: str, there: str) -> str:
    return (
        f"Use the newer one, or recreate the definition from the ledger. {_remove(here)}\n"
        f"pgsub run {word(there)} --from-target --connection CONNINFO --target CONNINFO"
    )


def _remove(name: str) -> str:
    return f"To remove the definition here, which leaves both servers as they are:\npgsub drop {word(name)} --yes"
