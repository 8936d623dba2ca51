"""Registers a new subscription: ledger, slot and state store, in this order, or nothing.

NOTES: The ledger durably contains the slot's name before the slot exists, so no slot is ever orphaned. The next
creation with the same name and state store undoes a killed one. The ledger alone is not trusted for this, because its
owner may have written the name of any slot: a file in the state folder must contain the same name. After an error,
everything is undone in reverse order, the slot before the ledger row that names it. Others' slots stay.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psycopg

from pgsub.catalog.locks import lock_held, subscription_lock
from pgsub.catalog.rows import RelationRow
from pgsub.catalog.store import StateStore
from pgsub.catalog.subscriptions import options
from pgsub.commands.preflight.findings import Table
from pgsub.commands.reporter import Reporter
from pgsub.commands.subscription import creation_note, passfiles, slot_owner
from pgsub.commands.subscription.definition import Definition
from pgsub.common import failpoints, quoting
from pgsub.common.errors import PgsubError, StateForbids, StateStoreError
from pgsub.common.query import number
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher import identity, slots
from pgsub.publisher.slot_creation import SlotWatch
from pgsub.target.ledger import definitions, subscriptions, two_phase_state
from pgsub.target.ledger.schema import installation
from pgsub.target.ledger.subscriptions import Publisher, RelationState

_LEFTOVER = """
SELECT subid, slot_name, slot_intent,
       EXISTS (SELECT FROM pgsub.control c WHERE c.subid = s.subid AND c.epoch > 0)
  FROM pgsub.subscription s WHERE subname = %s AND (state_store = %s OR subid = ANY (%s))
"""


@dataclass(frozen=True, slots=True)
class InterruptedCreate:
    """The remains of a killed ``create``: in the ledger, and perhaps on the publisher."""

    subid: int
    slot_name: str | None
    slot_intent: bool


def store_id(folder: Path) -> str:
    """Return the name of a state store in the ledger. It tells whose incomplete subscriptions may be undone.

    A container that is started again has another host name; then the note of the creation tells it.
    """
    return f"{socket.gethostname()}:{folder.resolve()}"


def register(
    session: psycopg.Connection,
    replication: publisher.Connection | None,
    made: Definition,
    sub: Subscription,
    tables: Sequence[Table],
    store: StateStore,
    reporter: Reporter,
    *,
    leftovers: Sequence[InterruptedCreate] = (),
    deadline: float | None = None,
) -> None:
    """Create everything. Undo it if a step fails.

    :param replication: a replication connection, None with ``--no-connect``.
    :param sub: the definition, completed with facts about the target.
    :param leftovers: the result of :func:`find_interrupted`, undone first.
    :param deadline: time of ``time.monotonic()`` until which the publisher must create the slot.
    :raises TimeoutExpired: the publisher needed longer.
    """
    relations = [table.relation("i" if made.copy_data else "r", adopt=made.adopt, keep=made.keep) for table in tables]
    creates = made.create_slot and replication is not None
    folder = store.path.parent
    installation.install(session)
    for leftover in leftovers:
        _undo_leftover(session, replication, sub.name, leftover, folder)
    note = creation_note.path(folder, sub.subid)
    if creates:
        creation_note.write(note, sub.slot_name or "", asked=False)
    row = (sub.subid, sub.name, store_id(folder), sub.slot_name, relations)
    subscriptions.register(session, *row, slot_intent=creates, two_phase=sub.two_phase)
    try:
        failpoints.point("create.after_ledger")
        if replication is not None:
            _connect_slot(session, replication, sub, deadline, reporter, note=note if creates else None)
        _store(store, sub, relations)
    except BaseException:
        # guard: a slot that an interrupted creation never asked for stays, without " and creation_note.asked(note)"
        may_exist = creates and creation_note.asked(note)
        _undo(session, replication if may_exist else None, sub, store, reporter, creates=creates)
        raise
    note.unlink(missing_ok=True)
    with contextlib.suppress(psycopg.Error, StateStoreError):  # matters only if the state store does not know it
        subscriptions.registered(session, sub.subid)
        definitions.record(session, sub, options(sub), partial(store.note_recorded, sub.subid))
    if creates:
        reporter.notice(f'created replication slot "{sub.slot_name}" on publisher')


def _connect_slot(
    session: psycopg.Connection,
    replication: publisher.Connection,
    sub: Subscription,
    deadline: float | None,
    reporter: Reporter,
    *,
    note: Path | None,
) -> None:
    """Create the slot or use the existing one. Record its position and the publisher's identity.

    :param note: the note of the slot's creation, None to use an existing slot.
    """
    who = identity.identify(replication)
    state = None if note is not None or sub.slot_name is None else slots.slot_state(replication, sub.slot_name)
    position = (state.confirmed_flush_lsn or 0) if state is not None else 0  # 0 if the slot will be made later
    if note is not None and sub.slot_name is not None:
        position = _create_slot(replication, sub, sub.slot_name, note, deadline, reporter)
    failpoints.point("create.after_slot")
    known = Publisher(who.system_identifier, who.dbname, who.database_oid, who.timeline)
    subscriptions.slot_created(session, sub.subid, known, position)


def _create_slot(
    replication: publisher.Connection,
    sub: Subscription,
    name: str,
    note: Path,
    deadline: float | None,
    reporter: Reporter,
) -> int:
    """Create the slot. The publisher first waits for every transaction that is writing now.

    :return: the slot's consistent point.
    """
    two_phase_slot = sub.two_phase == two_phase_state.ENABLED
    creation_note.write(note, name, asked=True)
    try:
        with SlotWatch(replication, sub.connection, name, reporter.warning, deadline=deadline):
            return slots.create_slot(replication, name, two_phase=two_phase_slot, failover=sub.failover)
    except PgsubError as error:
        if error.sqlstate == slot_owner.DUPLICATE_OBJECT:
            creation_note.write(note, name, asked=False)  # it is somebody else's, whatever happens to the undo
        raise


def _store(store: StateStore, sub: Subscription, relations: Sequence[RelationState]) -> None:
    with store.batch():
        store.add_subscription(sub)
        store.put_relations(
            sub.subid, [RelationRow(r.srrelid, r.srsubstate, None, r.schemaname, r.relname) for r in relations]
        )
        store.put_origin(sub.subid, 0, None)
        store.journal("create", sub.subid, sub.name, {"publications": list(sub.publications)})


def _undo(
    session: psycopg.Connection,
    replication: publisher.Connection | None,
    sub: Subscription,
    store: StateStore,
    reporter: Reporter,
    *,
    creates: bool,
) -> None:
    """Drop the slot, then forget it. The ledger must contain its name as long as it may exist.

    Nothing is raised, because the user must see the original error.

    :param replication: None to keep the slot.
    """
    with contextlib.suppress(StateStoreError):  # it could not be written before, either
        store.remove_subscription(sub.subid)
    with contextlib.suppress(PgsubError, psycopg.Error):
        if replication is not None and sub.slot_name is not None:
            slots.drop_slot(replication, sub.slot_name)
        subscriptions.forget(session, sub.subid)
        creation_note.path(store.path.parent, sub.subid).unlink(missing_ok=True)
        return
    if creates:
        reporter.warning(
            f'replication slot "{sub.slot_name}" may have been left on the publisher',
            "It retains WAL there.",
            "Create the subscription again: that removes what was left first.",
        )


def may_have_slot(leftover: InterruptedCreate, folder: Path) -> bool:
    """Return whether a slot of the leftover's name may be the one that it created."""
    note = creation_note.path(folder, leftover.subid)
    # guard: a slot that an interrupted creation never asked for stays, without " and creation_note.asked(note)"
    return leftover.slot_intent and creation_note.asked(note)


def find_interrupted(
    session: psycopg.Connection, name: str, folder: Path, *, connect: bool, known: Collection[int] = ()
) -> list[InterruptedCreate]:
    """Find what interrupted creations of this name by this state store left.

    :param known: subids in the state store. An interrupted rename may have left another name in the ledger.
    :param connect: whether the publisher will be asked to drop their slots.
    :raises StateForbids: a subscription has already replicated, or may have a slot and the publisher is not asked.
    """
    if installation.installed_version(session) == 0:
        return []
    found = []
    # guard: a killed creation is recognized by its note where the host has another name, without "creation_note.subids"
    mine = name, store_id(folder), creation_note.subids(folder)
    for sent, slot_name, intent, worked in session.execute(_LEFTOVER.encode(), mine).fetchall():
        subid = number(sent, "number of a subscription")
        if subid in known:
            continue
        if worked:
            raise _lost_definition(session, name, subid, slot_name)
        if intent and not connect:
            raise StateForbids(
                f'an interrupted creation of "{name}" may have left replication slot "{slot_name}"',
                hint="Create the subscription with a connection to the publisher.",
            )
        found.append(InterruptedCreate(subid, slot_name, intent))
    return found


def _lost_definition(session: psycopg.Connection, name: str, subid: int, slot_name: str | None) -> StateForbids:
    gids = [quoting.literal(one.gid) for one in two_phase_state.prepared(session, subid)]
    prepared = "".join(f"ROLLBACK PREPARED {gid};\n" for gid in gids)
    slot = f"SELECT pg_drop_replication_slot({quoting.literal(slot_name)});\n" if slot_name else ""
    return StateForbids(
        f'the target\'s ledger has a subscription "{name}" that this state store has lost',
        detail="It replicated already, and its replication slot keeps WAL. Was the state store removed or replaced?",
        hint="To go on with it, rebuild it from the ledger with the connection strings given here:\n"
        f"pgsub run {quoting.word(name)} --from-target --connection CONNINFO --target CONNINFO\n"
        "To give up the subscription, drop its slot on the publisher if nothing else uses it, then its rows on the"
        " target:\n"
        f"{slot}{prepared}DELETE FROM pgsub.subscription WHERE subid = {subid};",
    )


def _unknown_leftover(name: str, leftover: InterruptedCreate) -> StateForbids:
    slot = quoting.literal(leftover.slot_name)
    return StateForbids(
        f'the target\'s ledger has an interrupted creation of "{name}" that is unknown to this state store',
        detail=f'It may have left slot "{leftover.slot_name}" on the publisher. Was the state store removed?',
        hint="Drop that slot on the publisher if nothing else uses it, then the subscription's rows on the target:\n"
        f"SELECT pg_drop_replication_slot({slot});\nDELETE FROM pgsub.subscription WHERE subid = {leftover.subid};",
    )


def undo_interrupted(session: psycopg.Connection, source: publisher.Connection, name: str, store: StateStore) -> None:
    """Undo interrupted creations of a subscription that is not to be created again.

    :param session: a session on the target, whose ledger is trusted. ``source`` is a connection to the publisher.
    :raises StateForbids: see :func:`find_interrupted`, or this state store does not know a creation.
    """
    folder, known = store.path.parent, {one.subid for one in store.subscriptions()}
    for leftover in find_interrupted(session, name, folder, connect=True, known=known):
        _undo_leftover(session, source, name, leftover, folder)


def _undo_leftover(
    session: psycopg.Connection,
    replication: publisher.Connection | None,
    name: str,
    leftover: InterruptedCreate,
    folder: Path,
) -> None:
    lock, note = subscription_lock(folder, leftover.subid), creation_note.path(folder, leftover.subid)
    if leftover.slot_intent and creation_note.slot_name(note) != leftover.slot_name:
        raise _unknown_leftover(name, leftover)
    if not lock.acquire():
        raise lock_held(lock, f'subscription "{name}", which is being created,')
    try:
        if replication is not None and leftover.slot_name is not None and may_have_slot(leftover, folder):
            slots.drop_slot(replication, leftover.slot_name)
        subscriptions.forget(session, leftover.subid)
        note.unlink(missing_ok=True)
        passfiles.remove(folder, leftover.subid)
    finally:
        lock.release(unlink=True)
