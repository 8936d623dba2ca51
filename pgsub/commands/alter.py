"""``pgsub alter``: ALTER SUBSCRIPTION. Mirrors AlterSubscription and RenameSubscription (subscriptioncmds.c).

Servers are asked only about what concerns them. The definition is one write of the state store, which a launcher
notices at once; where the tables follow, they do so once the workers of the old definition have ended, for those would
copy new tables by the old publications.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg

from pgsub import conninfo as ci
from pgsub import failpoints
from pgsub.catalog.locks import lock_held, subscription_lock
from pgsub.catalog.rows import ServerRow
from pgsub.catalog.store import StateStore
from pgsub.commands import alteration, definition, passwords, preflight, refreshing, two_phase_change
from pgsub.commands.alteration import AlterOptions
from pgsub.commands.refresh import asked, conclude, opened, record, shown_before
from pgsub.commands.refreshing import Plan
from pgsub.commands.reporter import Reporter
from pgsub.commands.serve import Service
from pgsub.commands.wait import WaitOptions, wait
from pgsub.errors import PgsubError, StateForbids, SubscriptionExists, TimeoutExpired
from pgsub.protocol.lsn import format_lsn
from pgsub.publisher import connect as publisher
from pgsub.publisher import slots
from pgsub.subscription import Subscription
from pgsub.target import ledger, membership, two_phase

__all__ = ["AlterOptions", "alter"]

_DUPLICATE = "42710"
#: How long a launcher may take to end the workers of the old definition.
LET_GO_SECONDS = 45.0
#: Within this time a launcher that is just starting its workers has noticed a change.
NOTICE_SECONDS = 1.0
#: How long apply may take to get past the creation of a new publication.
CONFIRM_SECONDS = 30.0


@dataclass(slots=True)
class _Ends:
    """New connection strings: with their passwords, for this command, and as they will be stored."""

    params: dict[str, dict[str, str]] = field(default_factory=dict, repr=False)
    files: dict[str, Path] = field(default_factory=dict)

    def secret(self, side: str, stored: str) -> str:
        """The connection string to use now; ``stored`` where it does not change."""
        from pgsub import conninfo as ci

        return ci.join(self.params[side]) if side in self.params else stored


def alter(options: AlterOptions, *, reporter: Reporter) -> None:
    """Change a subscription: everything that was asked for, or nothing.

    :raises SubscriptionNotFound: there is none of that name.
    :raises StateForbids: the server would refuse it too, or the new target does not know the subscription.
    :raises WrongSystem: the new connection leads to another publisher.
    """
    deadline = None if options.timeout is None else time.monotonic() + options.timeout
    with StateStore.open(options.state_dir) as store:
        sub = store.subscription(options.name)
        fields = alteration.resolve(options, sub)
        if "name" in fields and any(one.name == fields["name"] for one in store.subscriptions()):
            raise SubscriptionExists(f'subscription "{fields["name"]}" already exists', sqlstate=_DUPLICATE)
        asks = options.connection is not None or options.target is not None or options.refreshes
        asks = asks or alteration.asks_two_phase(options, sub)
        if not asks and not fields.keys() & {"name", "slot_name", "failover", "password_enforced", "password_required"}:
            _store(store, sub, fields)
            return
        _alter_with_servers(options, store, sub, fields, reporter, deadline)


def _store(store: StateStore, sub: Subscription, fields: Mapping[str, Any]) -> None:
    shown = {name: value for name, value in fields.items() if name not in ("connection", "target")}
    shown |= dict.fromkeys(fields.keys() & {"connection", "target"}, "changed")
    with store.batch():
        store.alter(sub.subid, **fields)
        if fields.get("slot_name", "") is None:
            store.put_slot(sub.subid, None)
        store.journal("alter", sub.subid, fields.get("name", sub.name), shown)


def _alter_with_servers(
    options: AlterOptions,
    store: StateStore,
    sub: Subscription,
    fields: dict[str, Any],
    reporter: Reporter,
    deadline: float | None,
) -> None:

    ends = _ends(options, sub)
    with contextlib.ExitStack() as stack:
        reached = replace(sub, target=ends.secret("target", sub.target))
        connection = ends.secret("publisher", sub.connection)
        session = stack.enter_context(opened(reached))
        stack.enter_context(membership.maintenance(session, sub.subid, sub.name))
        _ends_and_slot(options, session, sub, fields, ends, reporter)
        if options.two_phase is not None and alteration.asks_two_phase(options, sub):
            stack.enter_context(two_phase_change.alone(session, sub, options.state_dir))
            new = replace(sub, **fields)
            fields |= two_phase_change.alter(session, new, connection, options.two_phase, reporter)
        service = wanted = None
        if options.refreshes:
            service = stack.enter_context(Service(store, options.state_dir, sub, reporter, shared=True))
            new = replace(sub, **fields)
            if options.copy_data is not False:
                two_phase.refuse_copy(session, sub.subid, two_phase.ALTER)
            with asked(session, new, connection) as source:
                wanted = refreshing.plan(session, source, new, copy_data=options.copy_data is not False)
                unconfirmed = _unconfirmed(source, sub, new)
            refreshing.announce(wanted, reporter, strict=options.strict)
            if unconfirmed:
                _pass_creation(service, sub, options, unconfirmed, reporter)
        served = store.server(sub.subid)
        with _redefined(session, store, sub, fields, ends):
            if service is None or wanted is None:
                return
            wanted = replace(wanted, sub=store.subscription(fields.get("name", sub.name)))
            before = shown_before(wanted, store)
            if not service.alone:
                _let_go(store, options.state_dir, sub, served)
            _carry_out(session, wanted, deadline, reporter)
        record(session, wanted, store, service)
        refreshing.tell(wanted, reporter)
        service.redefined(wanted.sub)
        session.close()
        conclude(service, wanted, before, options, deadline)


def _ends_and_slot(
    options: AlterOptions,
    session: psycopg.Connection,
    sub: Subscription,
    fields: dict[str, Any],
    ends: _Ends,
    reporter: Reporter,
) -> None:
    """Whether both ends may be what they will be; then the slot, which follows ``failover`` at once."""
    if options.target is not None:
        fields |= _new_target(session, sub, reporter)
    connection = ends.secret("publisher", sub.connection)
    stored = options.connection is None and passwords.stored(sub, options.state_dir)
    passwords.check(
        session,
        replace(sub, **fields),
        given=options.settings.get("password_required"),
        holds_password=stored or "publisher" in ends.files,
    )
    if options.connection is not None:
        _new_publisher(session, replace(sub, **fields), connection, reporter)
    if "failover" in fields:
        _alter_slot(connection, sub, fields["failover"])


def _carry_out(session: psycopg.Connection, wanted: Plan, deadline: float | None, reporter: Reporter) -> None:
    try:
        refreshing.carry_out(session, wanted, deadline)
    except (psycopg.Error, KeyboardInterrupt):
        reporter.warning(
            "the publications are changed, but perhaps not the tables",
            "The answer of the target is not known.",
            f"Refresh the subscription:\npgsub refresh {wanted.sub.name}",
        )
        raise


def _unconfirmed(source: publisher.Connection, before: Subscription, after: Subscription) -> int:
    """Where apply must have been before it may name new publications; 0 where it may at once.

    Before 18 the publisher refuses a publication that did not exist yet at a change that it decodes: for ever, if the
    slot has not been confirmed past that change.
    """
    added = set(after.publications) - set(before.publications)
    if source.info.server_version >= 180000 or not added or before.slot_name is None:
        return 0
    state = slots.slot_state(source, before.slot_name)
    return state.current_lsn if state and (state.confirmed_flush_lsn or 0) < state.current_lsn else 0


def _pass_creation(
    service: Service, sub: Subscription, options: AlterOptions, position: int, reporter: Reporter
) -> None:
    """Let a launcher get there first: its workers confirm where they were when they end for the new definition."""
    with contextlib.suppress(TimeoutExpired):
        if not service.alone:
            wait(WaitOptions(sub.name, options.state_dir, "lsn", lsn=position, timeout=CONFIRM_SECONDS))
            return
    reporter.warning(
        "the publisher may refuse a publication that is newer than changes still to be applied",
        f"Apply is not known to be past {format_lsn(position)}, and before version 18 such a publication does not exist"
        " for the publisher at older changes.",
        f"If workers end with that error, take the publication away, catch up, and add it again:\n"
        f"pgsub run {sub.name} --until-caught-up",
    )


def _ends(options: AlterOptions, sub: Subscription) -> _Ends:

    ends, token = _Ends(), secrets.token_hex(4)
    if options.connection is not None:
        ends.params["publisher"] = definition.publisher_parameters(options.connection)
    if options.target is not None:
        ends.params["target"] = definition.target_parameters(options.target, options.environment)
    for side, params in ends.params.items():
        if ci.split_password(params)[1] is not None:
            # never the file in use: workers of the old definition may read it until they have ended
            ends.files[side] = options.state_dir / "passfiles" / f"{sub.subid}.{token}.{side}"
    return ends


def _new_target(session: psycopg.Connection, sub: Subscription, reporter: Reporter) -> dict[str, Any]:
    """Another way to the same database: the one whose ledger knows the subscription.

    :return: the fields that depend on the role.
    """

    warnings = preflight.check_target(session)
    ledger.identity(session, sub.subid)
    row = session.execute(
        "SELECT current_user::text, oid::bigint FROM pg_catalog.pg_database WHERE datname = current_database()"
    ).fetchone()
    assert row is not None
    if sub.dboid and row[1] != sub.dboid:
        raise StateForbids(
            "the new target is another database",
            detail=f"The subscription replicates into the database with OID {sub.dboid}, this one has OID {row[1]}.",
            hint="A subscription stays with its database. Create another one for another target.",
        )
    _check_prepared(session, sub)
    for warned in warnings:
        reporter.warning(warned.message, warned.detail, warned.hint)
    return {"owner": row[0], "unavailable": tuple(w.unavailable for w in warnings if w.unavailable)}


def _check_prepared(session: psycopg.Connection, sub: Subscription) -> None:
    """What the old role prepared the new one must be able to commit."""
    others = sorted({one.owner for one in two_phase.prepared(session, sub.subid) if not one.ours})
    if others:
        raise StateForbids(
            "the new target's role cannot finish the subscription's prepared transactions",
            detail=f"They were prepared by role {', '.join(others)}; only that role or a superuser may commit them.",
            hint="Let them be committed or rolled back on the publisher, and let the subscription catch up.",
            sqlstate="42501",
        )


def _new_publisher(session: psycopg.Connection, sub: Subscription, connection: str, reporter: Reporter) -> None:
    """Another way to the same publisher, or to the standby that took its place."""

    if ledger.identity(session, sub.subid).system_identifier is None:
        return  # as in the server: what was never connected is not connected now
    refreshing.verify_publisher(session, sub, connection)
    if sub.slot_name is None:
        return
    with contextlib.closing(publisher.connect(connection, application_name=sub.name)) as source:
        state = slots.slot_state(source, sub.slot_name)
    if state is None or state.wal_status == "lost":
        reporter.warning(
            f'replication slot "{sub.slot_name}" {"does not exist" if state is None else "is lost"} on the publisher',
            "Workers will end with an error until there is one that goes back far enough.",
        )


def _alter_slot(connection: str, sub: Subscription, failover: bool) -> None:

    assert sub.slot_name is not None
    with contextlib.closing(publisher.connect(connection, application_name=sub.name, replication=True)) as replication:
        if replication.info.server_version < slots.FAILOVER_VERSION:
            raise StateForbids(
                "the publisher has no failover slots",
                detail="They came with PostgreSQL 17.",
                sqlstate="0A000",
            )
        slots.alter_slot(replication, sub.slot_name, failover=failover)


@contextlib.contextmanager
def _redefined(
    session: psycopg.Connection, store: StateStore, sub: Subscription, fields: dict[str, Any], ends: _Ends
) -> Iterator[None]:
    """Write the definition, ledger first; taken back if what follows is refused."""

    present = sub
    try:
        for side, params in ends.params.items():
            if side in ends.files:
                ci.store_password(params, ends.files[side])
            name = "connection" if side == "publisher" else "target"
            fields[name] = definition.public(params, ends.files.get(side, Path()))
        _follow(session, sub, replace(sub, **fields))
        failpoints.point("alter.after_ledger")
        _store(store, sub, fields)
        present = replace(sub, **fields)
        failpoints.point("alter.after_definition")
        yield
    except PgsubError:  # of others it is not known how far they got: the new definition is right either way
        with contextlib.suppress(PgsubError, psycopg.Error):  # what failed before is what the user must see
            store.alter(sub.subid, **{name: getattr(sub, name) for name in fields})
            present = sub
            _follow(session, replace(sub, **fields), sub)
        raise
    finally:
        _remove_passfiles(store.path.parent, sub.subid, present)


def _follow(session: psycopg.Connection, before: Subscription, after: Subscription) -> None:

    if (before.name, before.slot_name) != (after.name, after.slot_name):
        membership.redefine(session, after.subid, after.name, after.slot_name)


def _remove_passfiles(folder: Path, subid: int, sub: Subscription) -> None:
    """Those that no connection string names any more."""
    for file in (folder / "passfiles").glob(f"{subid}.*"):
        if not any(file.name in text for text in (sub.connection, sub.target)):
            file.unlink(missing_ok=True)


def _let_go(store: StateStore, folder: Path, sub: Subscription, before: ServerRow | None) -> None:
    """Until the launcher has ended the workers of the old definition, or nobody serves the subscription.

    :param before: who said that he serves it, before the definition changed; each start of workers says it anew.
    """
    lock = subscription_lock(folder, sub.subid)
    began = time.monotonic()
    while lock.holder() is not None:
        now, waited = store.server(sub.subid), time.monotonic() - began
        if now != before and (before is not None or waited > NOTICE_SECONDS):
            return
        if now is None and waited > NOTICE_SECONDS:
            return
        if waited > LET_GO_SECONDS:
            raise lock_held(lock, f'subscription "{sub.name}"')
        time.sleep(0.05)
