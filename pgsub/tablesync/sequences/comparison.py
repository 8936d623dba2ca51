"""The sequences of both servers compared: what can be synchronized, and what stands in the way, with what to paste.

Mirrors the checks of sequencesync.c (validate_seqsync_state, report_sequence_errors).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from pgsub.common import quoting
from pgsub.tablesync.sequences import reading
from pgsub.tablesync.sequences.definition import Definition, LocalSequence, Name, Position, create


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A sequence that cannot be synchronized, in the server's words, and what to run where."""

    key: Name
    message: str
    side: str  #: publisher or target: where ``statements`` are to be run
    statements: tuple[str, ...]
    oid: int | None = None  #: on the target; None where it is not there


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sequence of the target and the value that it has on the publisher.

    :ivar seen: where it was on the target before the publisher's value was read; None where that cannot be read.
    """

    local: LocalSequence
    definition: Definition
    position: Position
    seen: Position | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """The sequences that can be synchronized, and those that cannot."""

    wanted: tuple[Wanted, ...]
    obstacles: tuple[Obstacle, ...]


def compare(
    source: psycopg.Connection[Any],
    target: psycopg.Connection[Any],
    tables: Mapping[Name, Name],
    publications: Sequence[str],
    *,
    run_as_owner: bool,
) -> Compared:
    """Read the sequences on both servers; nothing is changed.

    A publisher moves no sequence of the target that has nothing to do with the subscription: its tables own or use it
    there too, or it is published itself.

    :param tables: subscribed tables, as the publisher names them, and their names on the target.
    :param run_as_owner: the subscription's option: the user of the target's session writes all by itself.
    """
    uses, published = reading.of_tables(source, tables), reading.published(source, publications)
    names = sorted({*uses, *published})
    remote = {name: one for name, one in reading.describe(source, names).items() if one.definition is not None}
    local = reading.describe(target, names)
    free = {*published, *reading.of_tables(target, tables.values())}
    apart = {name: use.again(name, tables.get(use.table, use.table)) for name, use in uses.items() if name not in free}
    checked = {
        name: _obstacle(one, local.get(name), target, run_as_owner, apart.get(name)) for name, one in remote.items()
    }
    clear = [name for name, obstacle in checked.items() if obstacle is None]
    seen = _seen(target, [local[name].key for name in clear if local[name].usable and local[name].readable])
    values = reading.positions(source, clear)
    return Compared(
        tuple(_wanted(name, remote, local, values, seen) for name in clear),
        tuple(obstacle for obstacle in checked.values() if obstacle is not None),
    )


def _wanted(
    name: Name,
    remote: Mapping[Name, LocalSequence],
    local: Mapping[Name, LocalSequence],
    values: Mapping[Name, Position],
    seen: Mapping[Name, Position],
) -> Wanted:
    definition = remote[name].definition
    assert definition is not None
    return Wanted(local[name], definition, values[name], seen.get(name))


def _seen(target: psycopg.Connection[Any], names: Sequence[Name]) -> dict[Name, Position]:
    try:
        return reading.positions(target, names)
    except psycopg.errors.LockNotAvailable:  # one is being truncated
        return {}


def _obstacle(
    remote: LocalSequence,
    local: LocalSequence | None,
    target: psycopg.Connection[Any],
    run_as_owner: bool,
    use: str | None,
) -> Obstacle | None:
    assert remote.definition is not None
    found = _hindrance(remote, remote.definition, local, target, run_as_owner, use)
    return None if found is None else Obstacle(remote.key, *found, None if local is None else local.oid)


def _hindrance(
    remote: LocalSequence,
    wanted: Definition,
    local: LocalSequence | None,
    target: psycopg.Connection[Any],
    run_as_owner: bool,
    use: str | None,
) -> tuple[str, str, tuple[str, ...]] | None:
    """Return message, side and statements of an obstacle.

    :param use: what makes a subscribed table of the target use the sequence, where none does.
    """
    if not (remote.usable and remote.readable):
        message = f'insufficient privileges on publisher sequence ("{remote.shown}")'
        return message, "publisher", _grants(remote, "SELECT", remote.usable, remote.readable)
    if local is None:
        statements = (create(remote.key, wanted), *([use] if use is not None else []))
        return f'missing sequence on subscriber ("{remote.shown}")', "target", statements
    if local.definition is None:
        return f'relation "{local.shown}" is not a sequence on subscriber', "target", ()
    if not local.replicable:
        return f'cannot use relation "{local.shown}" as logical replication target', "target", ()
    # guard: the publisher alone does not decide which sequences of the target are set
    if use is not None:
        return f'no subscribed table on subscriber uses sequence "{local.shown}"', "target", (use,)
    if not may_write(local, run_as_owner):
        message = f'insufficient privileges on subscriber sequence ("{local.shown}")'
        return message, "target", _grants(local, "SELECT, UPDATE", local.usable, local.writable)
    if local.definition != wanted:
        message = f'mismatched or renamed sequence on subscriber ("{local.shown}")'
        return message, "target", (local.alter(wanted, _position(target, local)),)
    return None


def may_write(local: LocalSequence, run_as_owner: bool) -> bool:
    """Return whether the session may write the value, as the sequence's owner or as itself.

    A user that may become the owner does so, as SwitchToUntrustedUser; others need privileges of their own.
    """
    return acts_as_owner(local, run_as_owner) or local.access == "own" or (local.usable and local.writable)


def acts_as_owner(local: LocalSequence, run_as_owner: bool) -> bool:
    """Return whether the session assumes the role of the sequence's owner."""
    return local.access == "set" and not run_as_owner


def _position(target: psycopg.Connection[Any], local: LocalSequence) -> Position | None:
    if not (local.usable and local.readable):
        return None
    return reading.positions(target, [local.key])[local.key]


def _grants(one: LocalSequence, privileges: str, usable: bool, granted: bool) -> tuple[str, ...]:
    user = quoting.name(one.user)
    schema = f"GRANT USAGE ON SCHEMA {quoting.name(one.schema)} TO {user};"
    sequence = f"GRANT {privileges} ON SEQUENCE {quoting.name(one.schema, one.name)} TO {user};"
    return tuple(text for text, there in ((schema, usable), (sequence, granted)) if not there)
