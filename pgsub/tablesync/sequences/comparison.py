"""The comparison of sequences on both servers: which can be synchronized, and statements that help the others.

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
    """A sequence that cannot be synchronized: the server's message, and statements that help."""

    key: Name
    message: str
    side: str  #: publisher or target: where to run ``statements``
    statements: tuple[str, ...]
    oid: int | None = None  #: OID on the target; None: it does not exist there


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sequence of the target and its value on the publisher.

    :ivar seen: value on the target before the publisher's was read; None: it cannot be read.
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
    """Read the sequences on both servers without changing anything.

    The publisher may set a sequence of the target only if the subscription involves it: a subscribed table owns or uses
    it on the target too, or a publication contains it.

    :param tables: subscribed tables: the publisher's names, with the names on the target.
    :param run_as_owner: the subscription's option: the target session's own user makes all changes.
    """
    uses, published = reading.of_tables(source, tables), reading.published(source, publications)
    names = sorted({*uses, *published})
    remote = reading.describe(source, names)
    definitions = {name: one.definition for name, one in remote.items() if one.definition is not None}
    local = reading.describe(target, names)
    free = {*published, *reading.of_tables(target, tables.values())}
    apart = {name: use.again(name, tables.get(use.table, use.table)) for name, use in uses.items() if name not in free}
    clear: list[Name] = []
    obstacles: list[Obstacle] = []
    for name, wanted in definitions.items():
        there, here = remote[name], local.get(name)
        found = _hindrance(there, wanted, here, target, run_as_owner, apart.get(name))
        if found is None:
            clear.append(name)
        else:
            obstacles.append(Obstacle(there.key, *found, None if here is None else here.oid))
    seen = _seen(target, [local[name].key for name in clear if local[name].usable and local[name].readable])
    values = reading.positions(source, clear)
    matching = (Wanted(local[name], definitions[name], values[name], seen.get(name)) for name in clear)
    return Compared(tuple(matching), tuple(obstacles))


def _seen(target: psycopg.Connection[Any], names: Sequence[Name]) -> dict[Name, Position]:
    try:
        return reading.positions(target, names)
    except psycopg.errors.LockNotAvailable:  # one is being truncated
        return {}


def _hindrance(
    remote: LocalSequence,
    wanted: Definition,
    local: LocalSequence | None,
    target: psycopg.Connection[Any],
    run_as_owner: bool,
    use: str | None,
) -> tuple[str, str, tuple[str, ...]] | None:
    """Return message, side and statements of an obstacle.

    :param use: statement that makes a subscribed table of the target use the sequence; None: one does already.
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
    """Return whether the session may set the value, as the sequence's owner or as itself.

    A user that may become the owner does (SwitchToUntrustedUser). Others need privileges of their own.
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
