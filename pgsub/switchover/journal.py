"""The journal of a switchover: one row on the giving server and one on the taking server.

NOTES

The right to write is a token. A commit on the giving side gives it away, and a later commit on the taking side takes
it. The phases of a row are changed by compare-and-set, in the transaction that puts up or lifts the fence of that
server. This ensures, after any failure and with any number of runs:

* *given* and *releasing* exclude each other: a given right is not released, and a released one is not given.
* *taken* follows only *given*. A given right is released only after *declined*, which excludes *taken*.

A giving side that has lost its phase, by a restore or a failover, after the right was taken is *given* again
(:mod:`pgsub.commands.switchover.transfer.giving_fence`).

tests/models/switchover_model.py checks every order of these steps.

giving: open, fenced, given; or releasing, released. taking: planned, prepared (fenced), taken, promoted, done; or
declined.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import psycopg
from psycopg import sql

from pgsub.common import quoting
from pgsub.common.errors import StateForbids
from pgsub.common.query import row, scalar
from pgsub.common.quoting import word
from pgsub.common.subscription import BACK_SUFFIX, Subscription
from pgsub.protocol.lsn import lsn_or_none

GIVING, TAKING = "giving", "taking"
OPEN, FENCED, GIVEN, RELEASING, RELEASED = "open", "fenced", "given", "releasing", "released"
PLANNED, PREPARED, TAKEN, PROMOTED, DONE, DECLINED = "planned", "prepared", "taken", "promoted", "done", "declined"

#: Phase of a taking side that has lost its row, or the later phases of it, because it was restored. No row has it.
LOST = "lost"
#: Phases of the taking side in which clients may write there.
HAS_TAKEN = (TAKEN, PROMOTED, DONE)
#: Phases of an unfinished switchover on each side, except one that is being undone.
UNFINISHED = {GIVING: (OPEN, FENCED), TAKING: (PLANNED, PREPARED, TAKEN, PROMOTED)}

# A clock that was set back must not make a pause longer.
_COLUMNS = """id::text, side, subid, subname, back_name, back_subid, phase, fence, saved, definition, position::text,
 CASE WHEN fenced_at IS NOT NULL THEN
 greatest(extract(epoch FROM pg_catalog.clock_timestamp() - fenced_at)::float8, 0) END"""
#: The time of a change. It is later than all times in the journal, even if the clock was set back, because the newest
#: row determines who has the right to write.
_NOW = """
greatest(pg_catalog.clock_timestamp(),
         (SELECT max(greatest(began_at, changed_at)) + interval '1 microsecond' FROM pgsub.switchover))"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the journal.

    :ivar id: ID of the switchover, the same on both sides.
    :ivar subid: the subscription in this ledger: the ending one, or on the giving side the reverse one.
    :ivar subname: name of the ending subscription.
    :ivar back_name: name of the reverse subscription. ``back_subid`` is its number once it is created.
    :ivar fence: how clients are prevented from writing, see :mod:`pgsub.switchover.fence`.
    :ivar saved: the settings that the fence replaced.
    :ivar definition: options of the ending subscription, on the taking side.
    :ivar position: start of the reverse subscription's slot, on the taking side.
    :ivar fenced_for: seconds since the fence was put up, by this server's clock; None without a fence.
    """

    id: str
    side: str
    subid: int
    subname: str
    back_name: str
    back_subid: int | None
    phase: str
    fence: str
    saved: Mapping[str, Any] | None = None
    definition: Mapping[str, Any] | None = None
    position: int | None = None
    fenced_for: float | None = None

    @property
    def command(self) -> str:
        """The command of the switchover, without options."""
        back = self.back_name != f"{self.subname}{BACK_SUFFIX}"
        return f"pgsub switchover {word(self.back_name if back else self.subname)}{' --back' if back else ''}"

    @property
    def back_slot(self) -> str:
        """The replication slot of the reverse subscription, on the taking side."""
        return slot_name(self.back_name)


def slot_name(back_name: str) -> str:
    """Return the name of the replication slot of a reverse subscription."""
    return re.sub("[^a-z0-9_]", "_", back_name.lower())[:63]


_FIELDS = [one.name for one in fields(Entry)]


def add(connection: psycopg.Connection, entry: Entry) -> None:
    """Write the first row of a side, unless it exists."""
    definition = None if entry.definition is None else json.dumps(dict(entry.definition))
    connection.execute(
        "INSERT INTO pgsub.switchover (id, side, subid, subname, back_name, back_subid, phase, fence, definition,"
        f" began_at, changed_at) SELECT %s::uuid, %s, %s::integer, %s, %s, %s::integer, %s, %s, %s::json, now, now"
        f" FROM (SELECT {_NOW}) AS t(now) ON CONFLICT (id) DO NOTHING".encode(),
        (
            *(entry.id, entry.side, entry.subid, entry.subname, entry.back_name, entry.back_subid),
            *(entry.phase, entry.fence, definition),
        ),
    )


def latest(connection: psycopg.Connection, side: str, subname: str) -> Entry | None:
    """Return the newest row of a side for a subscription name."""
    return _found(connection, "side = %s AND subname = %s ORDER BY began_at DESC LIMIT 1", side, subname)


def of_subscription(connection: psycopg.Connection, side: str, subid: int) -> Entry | None:
    """Return the newest row of a side for a subscription, whatever its name was."""
    found = "side = %s AND subid = %s::integer ORDER BY began_at DESC LIMIT 1"
    return _found(connection, found, side, str(subid))


def others(connection: psycopg.Connection, id: str) -> list[Entry]:
    """Return the rows of other switchovers of this database, last changed first."""
    query = f"SELECT {_COLUMNS} FROM pgsub.switchover WHERE id <> %s ORDER BY changed_at DESC"
    return [_entry(found) for found in connection.execute(query.encode(), (id,)).fetchall()]


def _place(connection: psycopg.Connection) -> str:
    info = connection.info
    return f'database "{info.dbname}" on host "{info.host}", port {info.port}'


def check_alone(connection: psycopg.Connection, id: str) -> None:
    """Check that no other switchover of this database is under way, because it would use the same fence."""
    for one in others(connection, id):
        # guard: a database takes part in one switchover at a time
        if one.phase in UNFINISHED[one.side]:
            raise StateForbids(
                f'a switchover of subscription "{one.subname}" of the same database is under way',
                hint=f"Let it finish, or abort it:\n{one.command} --status\n{one.command} --abort\n"
                f"If its subscriptions are gone for good, run this in {_place(connection)}:\n"
                f"BEGIN READ WRITE; DELETE FROM pgsub.switchover WHERE id = {quoting.literal(one.id)}; COMMIT;",
            )


def check_right(connection: psycopg.Connection, id: str) -> None:
    """Check that this database has the right to write, and has not given it away before."""
    gone = given_away(connection, id)
    # guard: a database gives the right to write away only once
    if gone is not None:
        raise StateForbids(
            f'this database has given the right to write away, with a switchover of "{gone.subname}"',
            detail=f'Subscription "{gone.back_name}" leads back.',
            hint="Clients write on the other server. To move the writes back here, switch over --back. If that was"
            f" given up for good, run this in {_place(connection)}:\n"
            f"DELETE FROM pgsub.switchover WHERE id = {quoting.literal(gone.id)};",
        )


def given_away(connection: psycopg.Connection, id: str) -> Entry | None:
    """Return the row with which this database gave the right away, None if it has it. Names are ignored."""
    moved = [one for one in others(connection, id) if one.phase in (GIVEN, *HAS_TAKEN)]
    return moved[0] if moved and moved[0].phase == GIVEN else None


def of(connection: psycopg.Connection, id: str) -> Entry | None:
    """Return this server's row of a switchover."""
    return _found(connection, "id = %s", id)


def _found(connection: psycopg.Connection, condition: str, *values: str) -> Entry | None:
    found = row(connection, f"SELECT {_COLUMNS} FROM pgsub.switchover WHERE {condition}", values)
    return None if found is None else _entry(found)


def _entry(found: tuple[Any, ...]) -> Entry:
    *kept, position, seconds = found
    named: dict[str, Any] = dict(zip(_FIELDS, kept, strict=False))
    return Entry(**named, position=lsn_or_none(position), fenced_for=seconds)


def move(connection: psycopg.Connection, id: str, expected: tuple[str, ...], phase: str, **columns: object) -> None:
    """Change the phase of this server's row, in the caller's transaction.

    :param expected: phases that it may have.
    :raises StateForbids: the row has another phase, because another run of the command continued.
    """
    assignments = sql.SQL("").join(sql.SQL(", {} = %s").format(sql.Identifier(name)) for name in columns)
    query = sql.SQL(
        f"UPDATE pgsub.switchover SET phase = %s, changed_at = {_NOW}, fenced_at = CASE"
        " WHEN %s = 'fenced' AND phase <> 'fenced' THEN pg_catalog.clock_timestamp() ELSE fenced_at END{}"
        " WHERE id = %s AND phase = ANY(%s)"
    ).format(assignments)
    # guard: a phase follows only a phase that allows it
    if connection.execute(query, (phase, phase, *columns.values(), id, list(expected))).rowcount != 1:
        raise moved(connection, id, expected)


def note(connection: psycopg.Connection, id: str, saved_now: Mapping[str, Any]) -> None:
    """Change what this server's row has saved. It does not become newer than others, as by a change of the phase."""
    connection.execute("UPDATE pgsub.switchover SET saved = %s::json WHERE id = %s", (saved(saved_now), id))


def hold(connection: psycopg.Connection, id: str, phase: str) -> None:
    """Keep this server in a phase until the open transaction ends."""
    query = "SELECT true FROM pgsub.switchover WHERE id = %s AND phase = %s FOR UPDATE"
    if scalar(connection, query, (id, phase)) is not True:
        raise moved(connection, id, (phase,))


def moved(connection: psycopg.Connection, id: str, expected: tuple[str, ...]) -> StateForbids:
    """Make the error for a row that does not have one of the expected phases."""
    found = of(connection, id)
    return StateForbids(
        f'the switchover is not "{" or ".join(expected)}" any more, but "{found.phase if found else "unknown"}"',
        detail="Another run of the command continued it.",
        hint="See where it stands with --status.",
    )


def needing(connection: psycopg.Connection, subid: int, *, enabled: bool) -> Entry | None:
    """Return the row of the running switchover that needs a subscription, None if none does.

    :param enabled: whether the subscription is enabled. The reverse one is enabled at the end. If one is disabled, the
        switchover that created it may have ended.
    """
    entry = _found(connection, "subid = %s::integer ORDER BY changed_at DESC LIMIT 1", str(subid))
    if entry is None:
        return None
    return entry if entry.phase in UNFINISHED[entry.side] or (entry.phase == GIVEN and not enabled) else None


def check_not_needed(connection: psycopg.Connection, sub: Subscription, *, enabled: bool) -> None:
    """Check that no running switchover needs a subscription unchanged.

    :param enabled: see :func:`needing`.
    """
    # guard: subscriptions of a switchover in progress are neither dropped nor renamed
    if (entry := needing(connection, sub.subid, enabled=enabled)) is not None:
        raise takes_part(sub.name, entry.command)


def takes_part(name: str, command: str) -> StateForbids:
    """Make the error for a subscription that a running switchover needs.

    :param command: of the switchover.
    """
    return StateForbids(
        f'subscription "{name}" takes part in a switchover that is under way',
        hint=f"Let it finish, or abort it. To see its state:\n{command} --status",
    )


def keeps(connection: psycopg.Connection, subid: int) -> bool:
    """Return whether this server still needs a row: of any switchover that ended, or of one that is being undone."""
    query = "SELECT EXISTS (SELECT FROM pgsub.switchover WHERE phase = 'done' OR (subid = %s AND phase = 'releasing'))"
    return scalar(connection, query, (subid,)) is True


def saved(value: Mapping[str, Any]) -> str:
    """Return a value for the column ``saved``."""
    return json.dumps(dict(value))
