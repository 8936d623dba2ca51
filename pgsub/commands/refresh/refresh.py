"""``pgsub refresh``: ALTER SUBSCRIPTION … REFRESH PUBLICATION, and the copy of a table once again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psycopg

from pgsub.catalog.rows import RelationRow
from pgsub.catalog.store import StateStore
from pgsub.commands import preflight
from pgsub.commands.refresh import diff, table_changes
from pgsub.commands.refresh.diff import Plan
from pgsub.commands.reporter import Reporter
from pgsub.commands.serve.synchronize import Service
from pgsub.common.errors import StateForbids
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.launcher.error_reporting import sync_name
from pgsub.publisher import connect as publisher
from pgsub.target.ledger import owner, schema, subscription_tables, subscriptions, two_phase
from pgsub.target.session import connect as target
from pgsub.target.session.connect import SessionName
from pgsub.target.session.owner import must_use_password
from pgsub.target.sql.truncate import TruncatedTable

#: Asked before tables are emptied; raises where the answer is no.
Confirm = Callable[[Sequence[TruncatedTable]], None]


@dataclass(frozen=True, slots=True)
class RefreshOptions:
    """What the command line says."""

    name: str
    state_dir: Path
    copy_data: bool = True
    resync: tuple[str, ...] = ()
    dry_run: bool = False
    strict: bool = False
    wait: bool = True
    timeout: float | None = None
    master: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)


def refresh(options: RefreshOptions, *, reporter: Reporter, confirm: Confirm) -> Plan:
    """Add published tables, remove those that are published no more, empty and copy again what was named.

    :return: what was done, or with ``dry_run`` what would be.
    :raises StateForbids: the subscription is disabled; or see :mod:`pgsub.commands.refresh.table_changes`.
    """
    deadline = None if options.timeout is None else time.monotonic() + options.timeout
    with StateStore.open(options.state_dir, create=False) as store:
        sub = store.subscription(options.name)
        if not sub.enabled:
            raise StateForbids(
                "ALTER SUBSCRIPTION ... REFRESH PUBLICATION is not allowed for disabled subscriptions",
                hint=f"Enable it first:\npgsub enable {word(sub.name)}",
                sqlstate="55000",
            )
        if options.dry_run:
            with opened(sub) as session, asked(session, sub, sub.connection) as source:
                wanted = _plan(session, source, sub, options)
                preflight.report(wanted.found.warnings, reporter, strict=options.strict)
                table_changes.show(wanted, reporter)
                return wanted
        with Service(store, options.state_dir, sub, reporter, shared=True) as service:
            with opened(sub) as session, subscription_tables.maintenance(session, sub.subid, sub.name):
                with asked(session, sub, sub.connection) as source:
                    wanted = _plan(session, source, sub, options)
                preflight.report(wanted.found.warnings, reporter, strict=options.strict)
                if wanted.emptied:
                    confirm(wanted.emptied)
                if wanted.changes:
                    table_changes.carry_out(session, wanted, deadline)
                    record(session, wanted, store)
            table_changes.tell(wanted, reporter)
            conclude(service, wanted, options, deadline)
    return wanted


def _plan(
    session: psycopg.Connection, source: publisher.Connection, sub: Subscription, options: RefreshOptions
) -> Plan:
    if options.copy_data or options.resync:
        two_phase.refuse_copy(session, sub.subid)  # and again when the tables change
    return diff.plan(session, source, sub, copy_data=options.copy_data, resync=options.resync)


@contextlib.contextmanager
def opened(sub: Subscription) -> Iterator[psycopg.Connection]:
    """A session on the target, its ledger up to date; errors of psycopg become pgsub's own."""
    with contextlib.closing(target.connect(sub.target, SessionName(sub.subid, "launcher", 0))) as session:
        try:
            _upgrade_ledger(session, sub)
            yield session
        except psycopg.Error as error:
            raise target.translate(error, "change the subscription on the target") from None


def _upgrade_ledger(session: psycopg.Connection, sub: Subscription) -> None:
    """Never a new ledger: a target that has none is not this subscription's."""
    if session.execute("SELECT pg_catalog.to_regnamespace('pgsub') IS NULL").fetchone() == (True,):
        raise subscriptions.unknown(sub.subid)
    owner.check(session)
    owner.give(session)
    schema.check(session)
    schema.install(session)
    subscriptions.identity(session, sub.subid)


@contextlib.contextmanager
def asked(session: psycopg.Connection, sub: Subscription, connection: str) -> Iterator[publisher.Connection]:
    """A session on the publisher, once it is known to be the right one.

    :param connection: its connection string, a password included where there is no passfile yet.
    """
    table_changes.verify_publisher(session, sub, connection)
    must = must_use_password(session, sub)
    with contextlib.closing(publisher.connect(connection, application_name=sub.name, must_use_password=must)) as source:
        yield source


def record(session: psycopg.Connection, wanted: Plan, store: StateStore) -> None:
    """Show and journal what was done: whoever looks next, or waits for the tables, must not miss a new one."""
    sub = wanted.sub
    if not wanted.changes:
        return
    rows = subscriptions.relations(session, sub.subid)
    with store.batch():
        for rel in (*wanted.drop, *wanted.again):
            store.clear_error(sub.subid, sync_name(rel.srrelid))
        store.put_relations(
            sub.subid, [RelationRow(r.srrelid, r.srsubstate, r.srsublsn, r.schemaname, r.relname) for r in rows]
        )
        store.journal("refresh", sub.subid, sub.name, _entry(wanted))


def _entry(wanted: Plan) -> dict[str, list[str]]:
    return {
        "added": [f"{r.schemaname}.{r.relname}" for r in wanted.add],
        "removed": [f"{r.schemaname}.{r.relname}" for r in wanted.drop],
        "copied again": [f"{r.schemaname}.{r.relname}" for r in wanted.again],
    }


class Waiting(Protocol):
    """The options that say what follows a refresh."""

    @property
    def wait(self) -> bool:
        """Whether to stay until the tables are synchronized."""

    @property
    def master(self) -> str | None:
        """The Spark master."""

    @property
    def conf(self) -> Mapping[str, str]:
        """Spark settings."""


def conclude(service: Service, wanted: Plan, options: Waiting, deadline: float | None) -> None:
    """Synchronize what is new, watch who does, or leave it."""
    if options.wait and wanted.unsynchronized:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        tables = frozenset(wanted.unsynchronized)
        service.synchronize(follow=False, timeout=timeout, master=options.master, conf=options.conf, tables=tables)
    elif wanted.changes:
        service.leave()
