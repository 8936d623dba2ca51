"""A change of publications together with the tables: ALTER SUBSCRIPTION … SET PUBLICATION with refresh.

Tables are changed only after the workers of the old definition have ended, because those would copy new tables by the
old publications. Mirrors AlterSubscription_refresh (subscriptioncmds.c).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.alter.connections import NewConnections
from pgsub.commands.alter.options import AlterOptions
from pgsub.commands.alter.redefinition import await_old_workers, redefined
from pgsub.commands.preflight import findings
from pgsub.commands.refresh import diff, table_changes
from pgsub.commands.refresh.refresh import finish, record
from pgsub.commands.reporter import Reporter
from pgsub.commands.serve.synchronize import Service
from pgsub.commands.sessions import verified_publisher
from pgsub.commands.status.wait import WaitOptions, wait
from pgsub.common.errors import TimeoutExpired
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription, same_service
from pgsub.protocol.lsn import format_lsn
from pgsub.publisher import connect as publisher
from pgsub.publisher import slots
from pgsub.target.ledger import two_phase_state

#: Seconds within which apply must pass the creation of a new publication.
CONFIRM_SECONDS = 30.0


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
    with Service(store, options.state_dir, sub, reporter, shared=True) as service:
        if copies:
            two_phase_state.refuse_copy(session, sub.subid, two_phase_state.ALTER)
        with verified_publisher(session, new, conns.secret("publisher", sub.connection)) as source:
            wanted = diff.plan(session, source, new, copy_data=copies, named=options.named)
            unconfirmed = _unconfirmed(source, sub, new)
        findings.report(wanted.found.warnings, reporter, strict=options.strict)
        if unconfirmed:
            _pass_creation(service, sub, options, unconfirmed, reporter)
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


def _unconfirmed(source: publisher.Connection, before: Subscription, after: Subscription) -> int:
    """Return the position that apply must pass before new publications are used, 0 if there is none.

    Before 18, the publisher raises an error when it decodes a change from before a publication was created. The error
    is permanent if the slot has not been confirmed past that change.
    """
    added = set(after.publications) - set(before.publications)
    if source.info.server_version >= 180000 or not added or before.slot_name is None:
        return 0
    state = slots.slot_state(source, before.slot_name)
    return state.current_lsn if state and (state.confirmed_flush_lsn or 0) < state.current_lsn else 0


def _pass_creation(
    service: Service, sub: Subscription, options: AlterOptions, position: int, reporter: Reporter
) -> None:
    """Wait until a launcher has passed the position. Its workers confirm their positions when they end."""
    with contextlib.suppress(TimeoutExpired):
        if not service.alone:
            wait(WaitOptions(sub.name, options.state_dir, "lsn", lsn=position, timeout=CONFIRM_SECONDS))
            return
    reporter.warning(
        "the publisher may refuse a publication that is newer than changes still to be applied",
        f"Apply is not known to be past {format_lsn(position)}, and before version 18 such a publication does not exist"
        " for the publisher at older changes.",
        f"If workers end with that error, take the publication away, catch up, and add it again:\n"
        f"pgsub run {word(sub.name)} --until-caught-up",
    )
