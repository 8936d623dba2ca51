"""``pgsub create``: CREATE SUBSCRIPTION. Mirrors CreateSubscription (subscriptioncmds.c)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.preflight import databases, findings, servers, tables
from pgsub.commands.preflight.findings import Preflight
from pgsub.commands.reporter import Reporter
from pgsub.commands.serve import sequences
from pgsub.commands.serve.synchronize import Service, report_adopted
from pgsub.commands.sessions import connect_publisher, connect_target, target_facts
from pgsub.commands.signals import undone_by_signals
from pgsub.commands.subscription import definition, passfiles, password_required, registration, slot_owner
from pgsub.commands.subscription.definition import CreateOptions, Definition
from pgsub.commands.subscription.registration import InterruptedCreate
from pgsub.commands.target_wait import TargetWait
from pgsub.common.errors import SubscriptionExists
from pgsub.common.quoting import word
from pgsub.publisher import connect as publisher
from pgsub.publisher import slots
from pgsub.target.ledger import two_phase_state
from pgsub.target.session import connect as target
from pgsub.target.session import ledger_privileges
from pgsub.target.session.connect import must_use_password

#: The findings, a replication connection if there is one, and the remains of interrupted creations.
_Found = tuple[Preflight, publisher.Connection | None, list[InterruptedCreate]]


def create(options: CreateOptions, *, reporter: Reporter) -> Preflight | None:
    """Check everything, register, create the slot, and synchronize unless that is left to ``pgsub run``.

    An error before the end of the registration leaves nothing behind: no slot, no ledger row, no definition.

    :return: the findings of a dry run, else None.
    :raises SubscriptionExists: the subscription exists, and ``if_not_exists`` is not set.
    :raises PgsubError: see :mod:`pgsub.commands.preflight`. Later it is the error that ended the first synchronization.
    """
    made = definition.resolve(options)
    with undone_by_signals(), StateStore.open(options.state_dir) as store:
        if store.find(options.name) is not None:
            if not options.if_not_exists:
                raise SubscriptionExists(
                    f'subscription "{options.name}" already exists',
                    hint=f"Use another name, or see what it does:\npgsub status {word(options.name)}",
                    sqlstate="42710",
                )
            reporter.notice(f'subscription "{options.name}" already exists, skipping')
            return None
        with Service(store, options.state_dir, made.sub, reporter) as service:
            with passfiles.written(made) as written:
                found = _register(options, made, store, reporter)
                if options.dry_run:
                    _announce_two_phase(found, reporter)
                    return found
                written.clear()
            if made.sub.enabled:
                _serve(service, options, store, reporter)
    return None


def _serve(service: Service, options: CreateOptions, store: StateStore, reporter: Reporter) -> None:
    """Synchronize sequences and tables, or leave the tables to a launcher, which also keeps sequences synchronized."""
    sub = store.subscription(options.name)
    if sub.sequences:  # the pre-flight check has warned of obstacles
        sequences.report(sub, sequences.synchronize(store, sub), reporter)
    if not options.wait:
        service.leave()
        return
    service.synchronize(options, follow=options.follow)
    service.report_two_phase()
    if options.adopt:
        report_adopted(store, sub, reporter)


def _announce_two_phase(found: Preflight, reporter: Reporter) -> None:
    if found.two_phase != two_phase_state.DISABLED:
        when = "from the start" if found.two_phase == two_phase_state.ENABLED else "once every table is synchronized"
        reporter.notice(f"two_phase would be enabled {when}")


def _register(options: CreateOptions, made: Definition, store: StateStore, reporter: Reporter) -> Preflight:
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(connect_target(made.sub))
        stack.enter_context(TargetWait(session, made.sub, reporter, options.deadline))
        try:
            known = {one.subid for one in store.subscriptions()}
            found, replication, leftovers = _Checks(stack, session, options, made, reporter, known).run()
            if not options.dry_run:
                unavailable = tuple(w.unavailable for w in found.warnings if w.unavailable)
                sub = replace(made.sub, **target_facts(session), unavailable=unavailable, two_phase=found.two_phase)
                registration.register(
                    session,
                    replication,
                    made,
                    sub,
                    found.tables,
                    store,
                    reporter,
                    leftovers=leftovers,
                    deadline=options.deadline,
                )
        except psycopg.Error as error:
            raise target.translate(error, "prepare the target") from None
        return found


@dataclass(frozen=True, slots=True)
class _Checks:
    """The checks before anything is created.

    :ivar stack: closes the sessions that the checks open.
    :ivar known: subids in the state store.
    """

    stack: contextlib.ExitStack
    session: psycopg.Connection
    options: CreateOptions
    made: Definition
    reporter: Reporter
    known: set[int]

    def run(self) -> _Found:
        """Check everything, beginning with the identity of both servers."""
        session, made = self.session, self.made
        holds = any(path.suffix == ".publisher" for path in made.passwords)
        password_required.check(session, made.sub, given=self.options.password_required, holds_password=holds)
        if not made.connect:
            return self._both(None)
        opened = connect_publisher(made.sub, must_use_password=must_use_password(session, made.sub))
        source = self.stack.enter_context(opened)
        databases.check_other_database(source, session)
        with databases.exchange_named(source, session, made.sub.publications):
            return self._both(source)

    def _both(self, source: publisher.Connection | None) -> _Found:
        session, options, made = self.session, self.options, self.made
        ledger_privileges.check(session)
        if not options.dry_run:
            ledger_privileges.give(session)
        warnings = servers.check_target(session)
        servers.check_conflict_rules(session, made.sub.on_conflict)
        leftovers = registration.find_interrupted(
            session, options.name, options.state_dir, connect=made.connect, known=self.known
        )
        found, replication = Preflight(), None
        if source is not None:
            ours = {left.slot_name for left in leftovers if registration.may_have_slot(left, options.state_dir)}
            found, replication = self._publisher(source, creates=made.sub.slot_name not in ours)
        if made.sub.two_phase != two_phase_state.DISABLED:
            warnings += servers.check_two_phase(session, source)
            warnings += servers.times_of_prepared(made.sub.on_conflict, enabled=True)
            warnings += servers.prepared_at_failover(source) if source is not None and made.sub.failover else []
        found.two_phase = _first_state(made, found)
        found.warnings[:0] = warnings
        if made.connect:
            found.warnings += servers.tables_of_rules(made.sub.on_conflict, {table.name for table in found.tables})
        findings.report(found.warnings, self.reporter, strict=options.strict)
        if not made.connect:
            self.reporter.warning(
                "subscription was created, but is not connected",
                hint="To initiate replication, you must manually create the replication slot,"
                " enable the subscription, and refresh the subscription.",
            )
        return found, replication, leftovers

    def _publisher(self, source: publisher.Connection, *, creates: bool) -> tuple[Preflight, publisher.Connection]:
        session, made, sub = self.session, self.made, self.made.sub
        must = must_use_password(session, sub)
        with slot_owner.naming_user(session, source, sub.slot_name):
            servers.check_publisher(source, sub, create_slot=made.create_slot and creates)
        # before the next connection, because free walsenders are counted
        found = tables.check_tables(source, session, sub, copy_data=made.copy_data, adopt=made.adopt)
        found.warnings[:0] = databases.exchanged(source, session, sub.publications)
        replication = self.stack.enter_context(connect_publisher(sub, replication=True, must_use_password=must))
        given = slots.slot_state(source, sub.slot_name) if sub.slot_name is not None and not made.create_slot else None
        if given is not None:
            servers.check_given_slot(given, sub, ready=bool(found.tables) and not made.copy_data)
        return found, replication


def _first_state(made: Definition, found: Preflight) -> str:
    """Return the first two_phase state. As in the server, it is enabled at once if there is nothing to copy."""
    asked = made.sub.two_phase
    at_once = made.create_slot and not made.copy_data and bool(found.tables)
    return two_phase_state.ENABLED if asked == two_phase_state.PENDING and at_once else asked
