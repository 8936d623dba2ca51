"""``pgsub alter --publisher-upgraded``: switches to the publisher that pg_upgrade made.

Since 17, pg_upgrade migrates logical slots (``create_logical_replication_slots``, pg_upgrade.c), if they have consumed
all WAL. The new cluster has another system identifier, and its WAL begins after the old one's. The server's own
subscriber checks neither and continues. Here the operator must confirm the upgrade, because a slot that was made by
hand on a restored copy looks the same.
"""

from __future__ import annotations

from pathlib import Path

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.alter.two_phase import exclusive_claim
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import connect_publisher
from pgsub.commands.subscription.enable_disable import require_disabled
from pgsub.common.errors import StateForbids
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.protocol.lsn import format_lsn
from pgsub.publisher import identity, slots
from pgsub.target.ledger import subscriptions, two_phase_state
from pgsub.target.session.connect import must_use_password


def check_allowed(sub: Subscription) -> None:
    """Check that the subscription may switch.

    :raises StateForbids: the subscription is enabled, or has no slot that pg_upgrade could have migrated.
    """
    require_disabled(sub, "cannot switch to an upgraded publisher while the subscription is enabled")
    if sub.slot_name is None:
        raise StateForbids(
            "cannot switch to an upgraded publisher with a subscription that does not have a slot name",
            sqlstate="55000",
        )


def adopt(
    session: psycopg.Connection, store: StateStore, sub: Subscription, connection: str, folder: Path, reporter: Reporter
) -> None:
    """Record the upgraded publisher and the position of its migrated slot, in one commit under a new epoch.

    Does nothing if that publisher is already recorded, so an interrupted command can be repeated.

    :param connection: the publisher's connection string with its password.
    :raises PgsubError: the server is not an upgrade of the subscription's publisher.
    """
    known = subscriptions.identity(session, sub.subid)
    with exclusive_claim(session, sub, folder, "switch to an upgraded publisher") as claim:
        must = must_use_password(session, sub)
        with connect_publisher(sub, connection, replication=True, must_use_password=must) as replication:
            who, state = identity.identify(replication), slots.slot_state(replication, sub.slot_name or "")
        if known.system_identifier in (None, who.system_identifier):
            reporter.notice("the publisher is the one that the subscription follows")
            return
        done = two_phase_state.behind(session, sub.subid)
        position = identity.check_upgraded(who, state, known.publisher_dboid or 0, done, sub.slot_name or "")
        subscriptions.replace_publisher(session, claim, who.system_identifier, who.timeline, position)
    store.journal(
        "publisher-upgraded",
        sub.subid,
        sub.name,
        {"from": known.system_identifier, "to": who.system_identifier, "lsn": format_lsn(position)},
    )
    _warn(session, sub, reporter)
    reporter.notice(f"apply continues from {format_lsn(position)} of the upgraded publisher")


def _warn(session: psycopg.Connection, sub: Subscription, reporter: Reporter) -> None:
    """Warn of tables whose copy had ended, because the positions of their slots refer to the old WAL."""
    for one in subscriptions.relations(session, sub.subid):
        if one.srsubstate == "f":
            reporter.warning(
                f'table "{one.schemaname}.{one.relname}" was being synchronized and must be copied again',
                None,
                f"Once the subscription is enabled:\npgsub refresh {word(sub.name)}"
                f" --resync {word(f'{one.schemaname}.{one.relname}')}",
            )
