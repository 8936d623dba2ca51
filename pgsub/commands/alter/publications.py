"""A change of publications together with the tables: ALTER SUBSCRIPTION … SET PUBLICATION with refresh.

Tables are changed only after the workers of the old definition have ended, because those would copy new tables by the
old publications. Mirrors AlterSubscription_refresh (subscriptioncmds.c).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.alter import publication_backlog
from pgsub.commands.alter.connections import NewConnections
from pgsub.commands.alter.options import AlterOptions
from pgsub.commands.alter.redefinition import await_old_workers, redefined
from pgsub.commands.preflight import findings
from pgsub.commands.refresh import diff, table_changes
from pgsub.commands.refresh.refresh import finish, record
from pgsub.commands.reporter import Reporter
from pgsub.commands.serve.synchronize import Service
from pgsub.commands.sessions import verified_publisher
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription, same_service
from pgsub.target.ledger import subscriptions, two_phase_state
from pgsub.target.ledger.subscriptions import RelationState


def alter_and_refresh(
    options: AlterOptions,
    session: psycopg.Connection,
    store: StateStore,
    sub: Subscription,
    fields: dict[str, Any],
    conns: NewConnections,
    reporter: Reporter,
) -> None:
    """Write the definition, wait for the end of the old workers, and change the tables."""
    new, copies = replace(sub, **fields), options.copy_data is not False
    connection = conns.secret("publisher", sub.connection)
    if copies:
        two_phase_state.refuse_copy(session, sub.subid, two_phase_state.ALTER)
    with verified_publisher(session, new, connection) as source:

        def staying() -> list[RelationState]:
            plan = diff.plan(session, source, new, copy_data=copies, named=options.named)
            leaving = {one.srrelid for one in plan.drop}
            return [one for one in subscriptions.relations(session, sub.subid) if one.srrelid not in leaving]

        backlog = publication_backlog.find(source, sub, new, staying)
    if backlog is not None:
        publication_backlog.apply_first(backlog, store, sub, options, reporter)
    with Service(store, options.state_dir, sub, reporter, shared=True) as service:
        with verified_publisher(session, new, connection) as source:
            wanted = diff.plan(session, source, new, copy_data=copies, named=options.named)
        findings.report(wanted.found.warnings, reporter, strict=options.strict)
        served = store.server(sub.subid)
        with redefined(session, store, sub, fields, conns):
            wanted = replace(wanted, sub=store.subscription(fields.get("name", sub.name)))
            if not service.alone and not same_service(sub, wanted.sub):
                await_old_workers(store, options.state_dir, sub, served)
            try:
                table_changes.carry_out(session, wanted, options.deadline)
            except (psycopg.Error, KeyboardInterrupt):
                reporter.warning(
                    "the publications are changed, but perhaps not the tables",
                    "It is not known whether the target has committed the change.",
                    f"Refresh the subscription:\npgsub refresh {word(wanted.sub.name)}",
                )
                raise
        record(session, wanted, store)
        table_changes.report_done(wanted, reporter)
        service.redefined(wanted.sub)
        session.close()
        finish(service, wanted, options)
