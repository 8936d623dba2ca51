"""``pgsub alter --two-phase`` and ``--no-two-phase``: change two_phase of a disabled subscription.

Mirrors the two_phase part of AlterSubscription (subscriptioncmds.c, 18). To enable it, only the ledger changes: the
slot becomes two-phase when apply starts. To disable it, the slot changes before the ledger. State ``e`` in the ledger
means that the slot may be two-phase, so after an interrupted command the next command or start can continue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

from pgsub.apply.verified_publisher import recorded_database
from pgsub.catalog.locks import subscription_lock
from pgsub.commands.preflight import findings, servers
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import connect_publisher
from pgsub.common import failpoints
from pgsub.common.errors import StateForbids
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.publisher import slots
from pgsub.target.ledger import two_phase_state, worker_takeover
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session import transactions

#: Seconds within which the workers of a just disabled subscription must end.
LET_GO_SECONDS = 45.0


@contextlib.contextmanager
def exclusive_claim(
    session: psycopg.Connection, sub: Subscription, folder: Path, doing: str = 'alter "two_phase"'
) -> Iterator[Claim]:
    """Take the subscription's lock after its workers have ended, and fence off any that still runs elsewhere.

    :param doing: completes "cannot …".
    :return: apply's claim with the new epoch.
    :raises StateForbids: the server's error for a worker that does not end.
    """
    lock = subscription_lock(folder, sub.subid)
    if not lock.acquire(LET_GO_SECONDS):
        raise StateForbids(
            f"cannot {doing} when logical replication worker is still running",
            hint="Try again after some time.",
            sqlstate="55000",
        )
    try:
        yield worker_takeover.take_over(session, sub.subid, worker_takeover.APPLY)
    finally:
        lock.release()


def alter(
    session: psycopg.Connection, sub: Subscription, connection: str, enable: bool, reporter: Reporter, *, strict: bool
) -> dict[str, Any]:
    """Change two_phase in the ledger and, to disable it, in the slot.

    :param session: a session on the target in autocommit mode.
    :param connection: the publisher's connection string with its password.
    :param strict: whether to refuse instead of warn.
    :return: the changed fields of the definition.
    :raises StateForbids: there are prepared transactions, or a server does not support it.
    """
    if enable:
        _enable(session, sub, connection, reporter, strict=strict)
    else:
        _disable(session, sub, connection)
    return {"two_phase": two_phase_state.state(session, sub.subid)}


def _enable(
    session: psycopg.Connection, sub: Subscription, connection: str, reporter: Reporter, *, strict: bool
) -> None:
    with connect_publisher(sub, connection) as source:
        warnings = servers.check_two_phase(session, source)
    findings.report(warnings, reporter, strict=strict)
    two_phase_state.ask_for(session, sub.subid)


def _disable(session: psycopg.Connection, sub: Subscription, connection: str) -> None:
    state = two_phase_state.state(session, sub.subid)
    if state == two_phase_state.DISABLED:
        return
    with transactions.durable(session):
        two_phase_state.check_disable(session, sub.subid)
    if state == two_phase_state.ENABLED and sub.slot_name is not None:
        _alter_slot(session, sub, connection)
    failpoints.point("alter.after_slot")
    two_phase_state.disable(session, sub.subid)


def _alter_slot(session: psycopg.Connection, sub: Subscription, connection: str) -> None:
    assert sub.slot_name is not None
    expected = recorded_database(session, sub.subid)
    with connect_publisher(sub, connection, expected=expected, replication=True) as replication:
        found = slots.slot_state(replication, sub.slot_name)
        if found is None or not found.two_phase:
            return  # enabled in the ledger, but apply has not started since
        if replication.info.server_version < slots.ALTER_TWO_PHASE_VERSION:
            raise StateForbids(
                f'two_phase of replication slot "{sub.slot_name}" cannot be disabled by this publisher',
                detail=f"It runs PostgreSQL {replication.info.server_version // 10000}; a slot that is two-phase can be"
                " altered from 18 on.",
                hint=f"Drop the subscription and create it without --two-phase:\npgsub drop {word(sub.name)}",
                sqlstate="0A000",
            )
        slots.alter_slot(replication, sub.slot_name, two_phase=False)
