"""The moment in which a subscription comes to be: ledger, slot, state store, in this order, or nothing.

The slot's name is durable in the ledger before the slot exists; a creation that was killed half-way is undone by the
next one of the same name.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import psycopg

from pgsub import conninfo as ci
from pgsub import failpoints
from pgsub.catalog.rows import RelationRow
from pgsub.catalog.store import StateStore
from pgsub.commands.definition import Definition
from pgsub.commands.preflight import Table
from pgsub.commands.reporter import Reporter
from pgsub.errors import PgsubError, StateForbids
from pgsub.publisher import connect as publisher
from pgsub.publisher import identity, slots
from pgsub.subscription import Subscription
from pgsub.target import connect as target
from pgsub.target import ledger, ledger_schema
from pgsub.target.ledger import RelationState


@contextlib.contextmanager
def passfiles(made: Definition) -> Iterator[list[Path]]:
    """Passwords in their files for the length of the block; who empties the list keeps them."""
    written: list[Path] = []
    try:
        for path, params in made.passwords.items():
            ci.store_password(params, path)
            written.append(path)
        yield written
    finally:
        for path in written:
            path.unlink(missing_ok=True)


def store_id(folder: Path) -> str:
    """Names a state store in the ledger: whose half-made subscriptions may be undone."""
    return f"{socket.gethostname()}:{folder.resolve()}"


def register(
    session: psycopg.Connection,
    replication: publisher.Connection | None,
    made: Definition,
    sub: Subscription,
    tables: Sequence[Table],
    store: StateStore,
    reporter: Reporter,
) -> None:
    """Create everything; undo what was created if any of it fails.

    :param replication: a replication connection, None with ``--no-connect``.
    :param sub: the definition with what was learnt about the target.
    """
    state = "i" if made.copy_data else "r"
    relations = [RelationState(t.target.oid, t.target.schema, t.target.name, state) for t in tables]
    creates = made.create_slot and sub.slot_name is not None
    ledger_schema.install(session)
    _undo_half_made(session, replication, sub, store.path.parent)
    with contextlib.ExitStack() as undo:
        undo.callback(_forget, session, sub.subid)
        ledger.register(
            session, sub.subid, sub.name, store_id(store.path.parent), sub.slot_name, relations, slot_intent=creates
        )
        failpoints.point("create.after_ledger")
        if replication is not None:
            position = _position(replication, sub, undo, creates=creates)
            failpoints.point("create.after_slot")
            who = identity.identify(replication)
            ledger.slot_created(
                session,
                sub.subid,
                system_identifier=who.system_identifier,
                dbname=who.dbname,
                dboid=who.database_oid,
                timeline=who.timeline,
                position=position,
            )
        with store.batch():
            store.add_subscription(sub)
            store.put_relations(
                sub.subid, [RelationRow(r.srrelid, state, None, r.schemaname, r.relname) for r in relations]
            )
            store.put_origin(sub.subid, 0, None)
            store.journal("create", sub.subid, sub.name, {"publications": list(sub.publications)})
        undo.pop_all()
    if creates and replication is not None:
        reporter.notice(f'created replication slot "{sub.slot_name}" on publisher')


def _position(
    replication: publisher.Connection, sub: Subscription, undo: contextlib.ExitStack, *, creates: bool
) -> int:
    """Where the subscription starts: the new slot's consistent point, or what a given slot has confirmed."""
    if creates:
        assert sub.slot_name is not None
        undo.callback(_drop_slot, replication, sub.slot_name)
        return slots.create_slot(replication, sub.slot_name, failover=sub.failover)
    state = slots.slot_state(replication, sub.slot_name) if sub.slot_name is not None else None
    return (state.confirmed_flush_lsn or 0) if state is not None else 0


def _drop_slot(replication: publisher.Connection, slot: str) -> None:
    with contextlib.suppress(PgsubError):  # what failed before is what the user must see
        slots.drop_slot(replication, slot)


def _forget(session: psycopg.Connection, subid: int) -> None:
    with contextlib.suppress(psycopg.Error):
        ledger.forget(session, subid)


def _undo_half_made(
    session: psycopg.Connection, replication: publisher.Connection | None, sub: Subscription, folder: Path
) -> None:
    """A ``create`` of this name and this state store was killed: drop the slot that it names, and its rows."""
    rows = session.execute(
        "SELECT subid, slot_name, slot_intent FROM pgsub.subscription WHERE subname = %s AND state_store = %s",
        (sub.name, store_id(folder)),
    ).fetchall()
    for subid, slot_name, intent in rows:
        if replication is None and intent:
            raise StateForbids(
                f'an interrupted creation of "{sub.name}" may have left replication slot "{slot_name}"',
                hint="Create the subscription with a connection to the publisher.",
            )
        if replication is not None and slot_name is not None:
            slots.drop_slot(replication, slot_name)
        ledger.forget(session, subid)


def check_no_leftover(session: psycopg.Connection, name: str, folder: Path) -> str | None:
    """The slot of an interrupted creation of this name, which must not count as somebody else's."""
    if ledger_schema.installed_version(session) == 0:
        return None
    row = session.execute(
        "SELECT slot_name FROM pgsub.subscription WHERE subname = %s AND state_store = %s", (name, store_id(folder))
    ).fetchone()
    return row[0] if row else None


def target_session(sub: Subscription) -> psycopg.Connection:
    """The launcher's session on the target."""
    return target.connect(sub.target, target.SessionName(sub.subid, "launcher", 0))
