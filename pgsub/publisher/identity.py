"""Checks at every connect that the publisher and the slot are still those that the subscription was created for.

Mirrors ``libpqrcv_identify_system``. The server's own subscriber does not check the rest, so it loses changes silently
after a restore or a fail-over. Nothing is re-created or skipped here: a mismatch ends with a diagnosis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pgsub.common import quoting
from pgsub.common.errors import PublisherUnavailable, ReplicationBroken, SlotLost, StateForbids, WrongSystem
from pgsub.common.query import number, scalar
from pgsub.protocol.lsn import MAX_LSN, format_lsn, parse_lsn
from pgsub.publisher import slots
from pgsub.publisher.connect import Connection, answer
from pgsub.publisher.database import OID, Database, check_database
from pgsub.publisher.server_errors import (
    PROMOTE_HINT,
    RECREATE_HINT,
    standby_lacks_slot,
    standby_lags,
    translating,
)
from pgsub.publisher.slots import SlotState


@dataclass(frozen=True, slots=True)
class PublisherIdentity:
    """The answer to IDENTIFY_SYSTEM, and the database's OID."""

    system_identifier: str
    dbname: str
    database_oid: int
    timeline: int
    server_version: int
    flush_lsn: int
    in_recovery: bool = False  #: a standby that has not been promoted

    @property
    def database(self) -> Database:
        """The database, whatever its history."""
        return Database(self.system_identifier, self.database_oid, self.dbname)


class TimelineSwitch(NamedTuple):
    """A line of a timeline history file: the history left ``timeline`` at ``switch_lsn``."""

    timeline: int
    switch_lsn: int
    reason: str


def identify(connection: Connection) -> PublisherIdentity:
    """Query the publisher's identity, and whether it is a standby.

    :param connection: a replication connection.
    """
    with translating(connection, "receive database system identifier and timeline ID from the publisher"):
        identifier, timeline, flush_lsn, dbname, *_ = answer(connection, "IDENTIFY_SYSTEM", 4)
        oid = number(scalar(connection, OID), "OID of the database")
    version, standby = connection.info.server_version, slots.in_recovery(connection)
    known = identifier, dbname, oid, number(timeline, "timeline")
    return PublisherIdentity(*known, version, parse_lsn(flush_lsn), standby)


def timeline_history(connection: Connection, timeline: int) -> list[TimelineSwitch]:
    """Fetch and parse a timeline's history, oldest first. The first timeline has none.

    :param connection: a replication connection.
    """
    if timeline <= 1:
        return []
    with translating(connection, f"receive timeline history of timeline {timeline} from the publisher"):
        _, content, *_ = answer(connection, f"TIMELINE_HISTORY {timeline}", 2)
    return parse_history(content)


def parse_history(content: bytes | str) -> list[TimelineSwitch]:
    """Parse a history file as readTimeLineHistory (timeline.c) does. Comments and empty lines are ignored.

    :raises ReplicationBroken: a line has another form.
    """
    text = content if isinstance(content, str) else bytes(content).decode("utf-8", "replace")
    switches = []
    for line in map(str.strip, text.splitlines()):
        if not line or line.startswith("#"):
            continue
        try:
            number, lsn, *reason = line.split(None, 2)
            switches.append(TimelineSwitch(int(number), parse_lsn(lsn), "".join(reason)))
        except ValueError:
            raise ReplicationBroken("syntax error in the publisher's timeline history", detail=line) from None
    return switches


def check_identity(
    expected: PublisherIdentity,
    actual: PublisherIdentity,
    *,
    remote_lsn: int,
    history: Sequence[TimelineSwitch] = (),
) -> None:
    """Compare the publisher with the recorded one, except ``expected.flush_lsn`` and the version.

    :param remote_lsn: the furthest position that the target contains or has reported.
    :param history: history of ``actual.timeline``, needed if the timelines differ.
    :raises WrongSystem: they do not match; ``diverged`` is set if only the history differs.
    :raises PublisherUnavailable: it is a standby that lags.
    """
    check_database(expected.database, actual.database)
    _check_timeline(expected, actual, remote_lsn, history)
    check_not_behind(actual.flush_lsn, remote_lsn, in_recovery=actual.in_recovery)


def check_not_behind(flush_lsn: int, remote_lsn: int, *, in_recovery: bool) -> None:
    """Compare where the publisher's WAL ends with the furthest position that the target contains or has reported.

    :param in_recovery: it is a standby, which may still receive what it lacks.
    :raises WrongSystem: the publisher went back in time.
    :raises PublisherUnavailable: the standby lags.
    """
    known = f"The target contains the publisher's changes up to {format_lsn(remote_lsn)}, "
    # guard: a restored publisher is rejected
    if flush_lsn < remote_lsn:
        # guard: a standby that lags is no publisher that went back in time
        if in_recovery:
            detail = f"{known}the standby's WAL ends at {format_lsn(flush_lsn)}."
            raise standby_lags("the publisher is a standby that lacks changes of the subscription", detail)
        raise _diverged(
            "the publisher is behind the subscription", f"{known}the publisher's WAL ends at {format_lsn(flush_lsn)}."
        )


def _check_timeline(
    expected: PublisherIdentity, actual: PublisherIdentity, remote_lsn: int, history: Sequence[TimelineSwitch]
) -> None:
    if actual.timeline == expected.timeline:
        return
    changed = f"The subscription followed timeline {expected.timeline}, the publisher is on timeline {actual.timeline}"
    switch = next((s for s in history if s.timeline == expected.timeline), None)
    if actual.timeline < expected.timeline or switch is None:
        raise _diverged(
            "the publisher's timeline does not continue the subscription's",
            f"{changed}, whose history does not contain the former.",
            elsewhere=True,
        )
    # guard: a timeline that branched off before a position of the subscription is rejected
    if switch.switch_lsn < remote_lsn:
        raise _diverged(
            "the publisher's timeline branched off before the subscription's position",
            f"{changed}, which branched off at {format_lsn(switch.switch_lsn)}; "
            f"the target contains changes up to {format_lsn(remote_lsn)}.",
        )


def _diverged(message: str, detail: str, *, elsewhere: bool = False) -> WrongSystem:
    """Make the error for a publisher that went back in time."""
    first = "Connect to the server that was promoted last. " if elsewhere else ""
    error = WrongSystem(message, detail=detail, hint=first + _DIVERGED)
    error.diverged, error.elsewhere = True, elsewhere
    return error


_DIVERGED = (
    "The publisher went back in time (fail-over to a standby that lagged, or a restore), so the target has changes "
    "that the publisher lost. Set synchronized_standby_slots on the publisher, so that a standby is never behind a "
    "subscriber. To make the tables what they are on this publisher, row by row:\npgsub reconcile NAME"
)


def replaced_history(remote_lsn: int) -> WrongSystem:
    """Make the error for a publisher whose WAL took another way to its present end."""
    return _diverged(
        "the publisher's WAL does not have the subscription's last transaction",
        f"The target contains the publisher's changes up to {format_lsn(remote_lsn)}, where a transaction ended. The "
        "publisher's WAL is further than that, and there none of that time ended: it has another history.",
    )


_ANEW = (
    "Where it is another publisher, drop the subscription (pgsub drop), and create it again with --adopt (pgsub "
    "create): every table is compared with the publisher's then, and only rows that differ are sent."
)


def verify_publisher(connection: Connection, expected: PublisherIdentity, *, remote_lsn: int) -> PublisherIdentity:
    """Identify the publisher and check it, with its history if the timeline changed.

    :param connection: a replication connection.
    :return: the present publisher, whose timeline is to be recorded.
    :raises WrongSystem: see :func:`check_identity`.
    """
    actual = identify(connection)
    same = actual.system_identifier == expected.system_identifier and actual.timeline != expected.timeline
    history = timeline_history(connection, actual.timeline) if same else ()
    check_identity(expected, actual, remote_lsn=remote_lsn, history=history)
    return actual


def check_upgraded(actual: PublisherIdentity, slot: SlotState | None, database_oid: int, done: int, name: str) -> int:
    """Check what can be verified about a cluster that pg_upgrade made of the publisher, and about the migrated slot.

    :param database_oid: the recorded OID, which pg_upgrade preserves (from 15 on).
    :param done: the furthest position of the old publisher that the target contains or has reported.
    :param name: name of the slot.
    :return: the position from which the slot goes on.
    :raises WrongSystem: it is no upgrade of the publisher.
    :raises SlotLost: the slot was not migrated.
    """
    if actual.database_oid != database_oid:
        raise WrongSystem(
            "this is not an upgrade of the publisher",
            detail=f'pg_upgrade keeps the OID of a database: "{actual.dbname}" has OID {actual.database_oid}, the '
            f"subscription follows the one with OID {database_oid}.",
            hint="Check dbname in the subscription's connection. " + _ANEW,
        )
    check_slot(slot, MAX_LSN, name, actual.dbname, in_recovery=actual.in_recovery)
    position = (slot.confirmed_flush_lsn if slot is not None else None) or 0
    if position < done:
        raise WrongSystem(
            "this is not an upgrade of the publisher",
            detail="The WAL of a cluster that pg_upgrade made begins behind the old one's: the slot's "
            f"confirmed_flush_lsn is {format_lsn(position)}, the target has changes up to {format_lsn(done)}.",
            hint=_ANEW,
        )
    return position


def check_slot(slot: SlotState | None, reported_lsn: int, name: str, database: str, *, in_recovery: bool) -> None:
    """Check that the slot still has everything after the last reported position.

    :param slot: from :func:`~pgsub.publisher.slots.slot_state`.
    :param reported_lsn: flush position that the ledger recorded before it was sent.
    :param name: name of the slot, used if it does not exist.
    :param in_recovery: the server is a standby that has not been promoted.
    :raises SlotLost: missing or invalidated.
    :raises ReplicationBroken: not a slot of pgoutput, of another database, or advanced by another client.
    :raises PublisherUnavailable: a standby that lacks the slot or has a copy of it, as long as it is not promoted.
    """
    check_not_standby(slot, name, in_recovery=in_recovery)
    if slot is None:
        raise SlotLost(
            f'replication slot "{name}" does not exist',
            detail="It was dropped, or the publisher failed over to a standby that does not have it.",
            hint=RECREATE_HINT,
            sqlstate="42704",
        )
    if slot.invalidation_reason is not None or slot.wal_status == "lost":
        reason = slot.invalidation_reason or "wal_removed"
        raise SlotLost(
            f'can no longer access replication slot "{name}"',
            detail=f'This replication slot has been invalidated due to "{reason}".',
            hint=RECREATE_HINT,
            sqlstate="55000",
        )
    if slot.plugin != "pgoutput":
        used = "is a physical slot" if slot.plugin is None else f'uses output plugin "{slot.plugin}"'
        raise ReplicationBroken(f'replication slot "{name}" cannot be used', detail=f"The slot {used}.")
    if slot.database != database:
        raise ReplicationBroken(
            f'replication slot "{name}" was not created in this database',
            detail=f'It belongs to database "{slot.database}", the subscription to "{database}".',
        )
    check_gap(slot, reported_lsn)


def check_not_standby(slot: SlotState | None, name: str, *, in_recovery: bool) -> None:
    """Refuse a standby that answers for the primary that has the slot. A slot may have been made on a standby, too.

    :raises PublisherUnavailable: the standby lacks the slot, or has a copy of it.
    """
    if not in_recovery:
        return
    # guard: a standby without the slot is no lost slot
    if slot is None:
        raise standby_lacks_slot(name)
    if slot.synced:
        raise PublisherUnavailable(
            f'replication slot "{name}" is still synchronized from the primary',
            detail="The publisher is a standby that has not been promoted.",
            hint=PROMOTE_HINT,
            sqlstate="55000",
        )


def check_not_two_phase(slot: SlotState | None, name: str, *, pending: bool = False) -> None:
    """Refuse a two-phase slot: it sends PREPARE TRANSACTION as such, whatever options its stream has.

    :param pending: two_phase was requested, but a table is not ready for it.
    """
    if slot is None or not slot.two_phase:
        return
    if pending:
        raise StateForbids(
            f'replication slot "{slot.name}" is two-phase before every table is ready',
            detail="Tables that are still copied would lose transactions that are prepared before and committed after.",
            hint="Drop the subscription, and create it with a slot that pgsub makes, or with --no-copy-data.",
            sqlstate="55000",
        )
    raise StateForbids(
        f'replication slot "{slot.name}" is two-phase, but the subscription is not',
        detail="Another client made or changed the slot; it sends prepared transactions as such.",
        hint=f"Disable the subscription, and let it have two_phase:\npgsub alter {quoting.word(name)} --two-phase",
        sqlstate="55000",
    )


def check_gap(slot: SlotState, reported_lsn: int) -> None:
    """Check for a gap: START_REPLICATION begins at confirmed_flush_lsn if that is later, and only the log tells.

    :raises ReplicationBroken: the slot does not have everything after the last reported position.
    """
    # guard: a slot with a gap is not followed, always
    if slot.confirmed_flush_lsn is None or slot.confirmed_flush_lsn <= reported_lsn:
        return
    raise ReplicationBroken(
        f'replication slot "{slot.name}" is past the subscription\'s position',
        detail=f"The slot's confirmed_flush_lsn is {format_lsn(slot.confirmed_flush_lsn)}, the subscription last "
        f"reported {format_lsn(reported_lsn)}; changes between the two will not be sent again.",
        hint="The target was restored from a backup or is a promoted standby that lagged, or another client advanced, "
        "used or re-created the slot. " + RECREATE_HINT,
    )
