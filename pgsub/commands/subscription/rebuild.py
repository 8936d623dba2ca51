"""``pgsub run --from-target``: rebuilds a subscription in a state store that lost it or never had it.

The ledger is the authority on what was applied, so a lost state store loses no rows. The rebuilt entries are those that
the launcher's mirror would write. First the subscription is moved in the ledger, so that its former state store can no
longer serve it. Then the state store is written in one transaction. A killed command can be repeated. Meanwhile the
command holds the launcher's lock on the target, so nobody serves the subscription.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import psycopg

from pgsub.catalog.locks import launcher_lock
from pgsub.catalog.rows import PreparedRow, RelationRow, SkippedRow
from pgsub.catalog.store import StateStore
from pgsub.commands.preflight import findings, servers, tables
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import connect_target, verified_publisher
from pgsub.commands.subscription import definition, ledger_definition, lost_switchover, passfiles, password_required
from pgsub.commands.subscription.definition import Definition
from pgsub.commands.subscription.registration import store_id
from pgsub.common import failpoints, quoting
from pgsub.common.connections import conninfo as ci
from pgsub.common.errors import (
    PermissionMissing,
    PgsubError,
    PublisherUnavailable,
    ReplicationBroken,
    SlotLost,
    StateForbids,
    UsageError,
)
from pgsub.common.plural import counted
from pgsub.common.quoting import named, word
from pgsub.common.subscription import Subscription
from pgsub.launcher.mirror import held_stats
from pgsub.publisher import connect as publisher
from pgsub.publisher import identity, slots
from pgsub.switchover import fence, journal
from pgsub.switchover.journal import Entry
from pgsub.target.ledger import definitions, skipped_changes, subscriptions, two_phase_state, worker_takeover
from pgsub.target.ledger.maintenance import origin_advance
from pgsub.target.ledger.schema import installation
from pgsub.target.ledger.tables import held_tables, subscription_tables
from pgsub.target.session import advisory_locks, ledger_privileges
from pgsub.target.session import connect as target


@dataclass(frozen=True, slots=True)
class RebuildOptions:
    """The options of ``run --from-target``.

    :ivar publication: publications of a subscription whose options are not in the ledger.
    :ivar environment: PG* variables, removed from the environment.
    """

    names: tuple[str, ...]
    state_dir: Path
    connection: str | None
    target: str | None
    publication: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def rebuild(options: RebuildOptions, *, reporter: Reporter) -> bool:
    """Write subscriptions of the ledger to the state store. Existing ones are not changed.

    :return: whether a launcher serves the whole state folder, and so these subscriptions.
    :raises UsageError: no name or no connection string is given.
    :raises StateForbids: the state store has another subscription of this name; or the ledger has none, several, an
        incomplete one, one without options, or one that a switchover needs.
    :raises LockHeld: another launcher serves it, or a command is changing it.
    :raises WrongSystem: the publisher is another one.
    """
    if not options.names:
        raise UsageError("--from-target needs the name of a subscription", hint="pgsub run NAME --from-target …")
    with StateStore.open(options.state_dir) as store:
        for name in options.names:
            _one(_given(name, options), store, reporter)
    return launcher_lock(options.state_dir).holder() is not None


def _one(given: Subscription, store: StateStore, reporter: Reporter) -> None:
    if _is_there(store, given, reporter):
        return
    with connect_target(given) as session:
        try:
            _rebuild(session, given, store, reporter)
        except psycopg.Error as error:
            raise target.translate(error, "read the ledger", user=session.info.user) from None


def _given(name: str, options: RebuildOptions) -> Subscription:
    """Return the subscription as given on the command line, with passwords in the connection strings."""
    connection, params = definition.both_parameters(options.connection, options.target, options.environment)
    return Subscription(0, name, ci.join(connection), ci.join(params), options.publication, None)


def _is_there(store: StateStore, given: Subscription, reporter: Reporter) -> bool:
    """Return whether the state store has the subscription with these connection strings.

    :raises StateForbids: the connection strings in the state store differ.
    """
    found = store.find(given.name)
    if found is None:
        return False
    if _servers(found) != _servers(given):
        raise StateForbids(
            f'the state store has a subscription "{given.name}" with other connection strings',
            detail="It was left as it is: only what is missing in the state store is rebuilt from the ledger.",
            hint="Leave out --from-target, change the connection strings, or name an empty state folder:\n"
            f"pgsub alter {word(given.name)} --connection CONNINFO --target CONNINFO",
        )
    reporter.notice(f'subscription "{given.name}" is in the state store already; nothing was rebuilt')
    return True


def _servers(sub: Subscription) -> list[dict[str, str]]:
    parsed = (ci.parse(sub.connection, "publisher"), ci.parse(sub.target, "target"))
    return [{k: v for k, v in ci.split_password(one)[0].items() if k != "passfile"} for one in parsed]


def _rebuild(session: psycopg.Connection, given: Subscription, store: StateStore, reporter: Reporter) -> None:
    if installation.installed_version(session) == 0:
        raise ledger_definition.not_found(given.name, [])
    ledger_privileges.give(session)
    subid, _ = ledger_definition.find(session, given.name)
    with _alone(session, subid, given.name), subscription_tables.maintenance(session, subid, given.name):
        subid, slot_name = ledger_definition.find(session, given.name)  # read again under the locks
        installation.install(session, lambda: worker_takeover.evict(session, subid))
        sub = ledger_definition.read(session, replace(given, subid=subid, slot_name=slot_name), store)
        _check_not_moving(session, sub)
        warnings = servers.check_target(session)
        unavailable = tuple(one.unavailable for one in warnings if one.unavailable)
        made = _with_passfiles(replace(sub, unavailable=unavailable), store)
        holds = any(path.suffix == ".publisher" for path in made.passwords)
        password_required.check(session, sub, given=None, holds_password=holds)
        warnings += _check_publisher(session, sub)
        findings.report(warnings, reporter)
        with passfiles.written(made) as written:
            moves = definitions.move(session, subid, store_id(store.path.parent))
            failpoints.point("rebuild.after_ledger")
            _record(session, store, replace(made.sub, moves=moves))
            written.clear()
        failpoints.point("rebuild.after_definition")
        _report(made.sub, len(store.relations(subid)), reporter, by_hand=bool(given.publications))


@contextlib.contextmanager
def _alone(session: psycopg.Connection, subid: int, name: str) -> Iterator[None]:
    """Hold the launcher's lock.

    :raises LockHeld: another launcher serves the subscription, on whatever host.
    """
    key = (advisory_locks.LAUNCHER, subid)
    with advisory_locks.holding(session, key) as taken:
        # guard: nothing is rebuilt under a running launcher
        if not taken:
            message = f'subscription "{name}" is served by another pgsub run'
            raise advisory_locks.held(session, key, message, "Stop it first where it runs.")
        yield


def _check_not_moving(session: psycopg.Connection, sub: Subscription) -> None:
    """Check that no switchover is under way, because only its state store knows the reverse subscription.

    The reverse subscription is needed, and can be rebuilt, once clients may write on the server that it leads from.

    :raises StateForbids: a switchover is under way.
    """
    entry = journal.needing(session, sub.subid, enabled=sub.enabled)
    taking = journal.of_subscription(session, journal.TAKING, sub.subid) if entry is None else None
    # guard: a subscription that a switchover has ended is not rebuilt before it is dropped
    if taking is not None and taking.phase == journal.DONE:
        raise _being_moved(sub, taking)
    # guard: a switchover keeps the state store that can end it
    if entry is not None and not (entry.phase == journal.GIVEN and _has_taken(session, sub, entry)):
        raise _being_moved(sub, entry)


def _has_taken(session: psycopg.Connection, sub: Subscription, there: Entry) -> bool:
    """Return whether the publisher of a reverse subscription is known to have taken the right to write.

    :raises PermissionMissing: the role may not read the journal there. The hint has the GRANT.
    """
    try:
        with verified_publisher(session, sub, sub.connection) as source:
            here, _ = lost_switchover.of_publisher(source, sub.way_back_of or 0, there)
    except PermissionMissing:
        raise
    except (PgsubError, psycopg.Error):
        return False
    return here is not None and here.phase in journal.HAS_TAKEN


def _being_moved(sub: Subscription, entry: Entry) -> StateForbids:
    hint = f"With the state folder where it was begun, let it end, or abort it:\n{entry.command} --status"
    id = quoting.literal(entry.id)
    if entry.side == journal.TAKING and entry.phase not in journal.HAS_TAKEN:
        slot = quoting.literal(entry.back_slot)
        hint += (
            f"\nIf that folder is lost, let clients write on the publisher.{_reopening(sub, entry)}\n"
            "Then drop the slot of the way back, run the rest on the target, too, and the command here again:\n"
            f"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = {slot};\n"
            f"BEGIN READ WRITE; UPDATE pgsub.switchover SET phase = '{journal.DECLINED}' WHERE id = {id}; COMMIT;"
        )
    elif entry.side == journal.TAKING:
        slot = "" if sub.slot_name is None else f"SELECT pg_drop_replication_slot({quoting.literal(sub.slot_name)});\n"
        hint += (
            "\nIf that folder is lost, rebuild the subscription that leads back, and enable it:\n"
            f"pgsub run {word(entry.back_name)} --from-target --connection CONNINFO --target CONNINFO\n"
            f"Then drop the slot of this one on the publisher, and the rest of it on the target:\n{slot}"
            f"BEGIN READ WRITE; UPDATE pgsub.switchover SET phase = '{journal.DONE}' WHERE id = {id};"
            f" DELETE FROM pgsub.subscription WHERE subid = {sub.subid}; COMMIT;"
        )
    else:
        hint += (
            "\nIf that folder is lost, the same command says what to run on both servers, for the subscription that the"
            f" switchover was to end:\npgsub run {word(entry.subname)} --from-target --connection CONNINFO"
            " --target CONNINFO"
        )
    return StateForbids(
        f'subscription "{sub.name}" takes part in a switchover that is under way',
        detail="A state store that is made now would not know the subscription that leads back.",
        hint=hint,
    )


def _reopening(sub: Subscription, entry: Entry) -> str:
    """Return the part of a hint that lifts the fence of the publisher."""
    database = ci.parse(sub.connection, "publisher").get("dbname")
    if entry.fence != fence.READ_ONLY or not isinstance(database, str):
        return ""
    return f" If they cannot, run this there:\n{fence.reopening(database)}"


def _with_passfiles(sub: Subscription, store: StateStore) -> Definition:
    """Return the definition as stored, and the passwords for its files."""
    folder = store.path.parent / "passfiles"
    sides = {"publisher": sub.connection, "target": sub.target}
    files = {folder / f"{sub.subid}.{side}": ci.parse(text, side) for side, text in sides.items()}
    (connection, to) = (definition.public(params, path) for path, params in files.items())
    passwords = {path: params for path, params in files.items() if ci.split_password(params)[1] is not None}
    stored = replace(sub, connection=connection, target=to)
    return Definition(stored, connect=True, create_slot=False, copy_data=False, passwords=passwords)


def _check_publisher(session: psycopg.Connection, sub: Subscription) -> list[findings.Caution]:
    """Check that the publisher is the one in the ledger. A lost slot is only a warning, so it can be dropped.

    So is a slot that is ahead of what was applied: workers refuse it, and ``reconcile`` needs the definition.

    :raises WrongSystem: the publisher is another one.
    :raises ReplicationBroken: the slot is another one.
    """
    if subscriptions.identity(session, sub.subid).system_identifier is None:
        return []  # created without a connection, so the first worker will record the publisher
    with verified_publisher(session, sub, sub.connection) as source:
        warnings = tables.missing_publications(source, sub.publications)
        if sub.slot_name is not None:
            warnings += _check_slot(session, source, sub, sub.slot_name)
    return warnings


def _check_slot(
    session: psycopg.Connection, source: publisher.Connection, sub: Subscription, name: str
) -> Iterator[findings.Caution]:
    # read first: a worker of a launcher that was lost may still apply, and move both
    slot = slots.slot_state(source, name)
    reported = origin_advance.position(session, sub.subid).reported_lsn
    try:
        standby, past = slots.in_recovery(source), (slot and slot.confirmed_flush_lsn) or 0
        identity.check_slot(slot, max(reported, past), name, source.info.dbname, in_recovery=standby)
    except (SlotLost, PublisherUnavailable) as error:
        if isinstance(error, PublisherUnavailable) and not error.standby:
            raise
        yield findings.Caution(error.message, error.detail, named(error.hint, sub.name))
        return
    if slot is not None:
        try:
            identity.check_gap(slot, reported)
        except ReplicationBroken as error:
            yield findings.Caution(error.message, error.detail, named(error.hint, sub.name))


def _record(session: psycopg.Connection, store: StateStore, sub: Subscription) -> None:
    """Read the ledger, then write the state store in one transaction."""
    relations = subscriptions.relations(session, sub.subid)
    held = held_stats.rows(relations, held_tables.overview(session, sub.subid))
    skipped = skipped_changes.usage(session, sub.subid)
    position = origin_advance.position(session, sub.subid)
    pending = two_phase_state.pending(session, sub.subid) if sub.two_phase != two_phase_state.DISABLED else []
    with store.batch():
        store.add_subscription(sub)
        store.put_relations(
            sub.subid, [RelationRow(r.srrelid, r.srsubstate, r.srsublsn, r.schemaname, r.relname) for r in relations]
        )
        durable = min(position.remote_lsn, position.reported_lsn)
        store.put_origin(sub.subid, durable, None, position.reported_lsn)
        store.put_prepared(
            sub.subid, [PreparedRow(one.gid, one.xid, one.prepare_lsn, one.prepared_at) for one in pending]
        )
        store.put_held(sub.subid, held)
        store.put_skipped(sub.subid, SkippedRow(*skipped))
        shown = {"publications": list(sub.publications), "slot_name": sub.slot_name, "enabled": sub.enabled}
        store.journal("run", sub.subid, sub.name, {"from_target": True, **shown})


def _report(sub: Subscription, relations: int, reporter: Reporter, *, by_hand: bool) -> None:
    listed = ", ".join(f'"{name}"' for name in sub.publications)
    slot = "no slot" if sub.slot_name is None else f'slot "{sub.slot_name}"'
    state = "" if sub.enabled else ", disabled"
    reporter.notice(
        f'subscription "{sub.name}" was rebuilt from the ledger: {slot}, {counted(relations, "table")}, publications'
        f" {listed}{state}"
    )
    if by_hand:
        reporter.warning(
            f'the options of subscription "{sub.name}" are the defaults',
            "The ledger does not have them, so it is disabled.",
            f"Alter what is to differ, then enable it:\npgsub alter {word(sub.name)} --help\n"
            f"pgsub enable {word(sub.name)}",
        )
