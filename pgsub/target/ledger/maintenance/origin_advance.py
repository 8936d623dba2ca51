"""``pg_replication_origin_advance`` for pgsub: the position in the ledger moves without a transaction."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

from pgsub.common.errors import StateForbids, log_text
from pgsub.common.query import row
from pgsub.protocol.lsn import format_lsn, parse_lsn
from pgsub.target.ledger import events, subscriptions, worker_takeover
from pgsub.target.ledger.tables import handover, states
from pgsub.target.ledger.worker_takeover import Claim


@dataclass(frozen=True, slots=True)
class Position:
    """The position of apply.

    :ivar remote_lsn: end of the last transaction that was applied.
    :ivar reported_lsn: last position that was reported to the publisher as flushed.
    """

    remote_lsn: int
    reported_lsn: int

    @property
    def furthest(self) -> int:
        """The position before which nothing is sent again."""
        return max(self.remote_lsn, self.reported_lsn)


def position(connection: psycopg.Connection, subid: int) -> Position:
    """Read apply's position."""
    query = "SELECT remote_lsn::text, reported_lsn::text FROM pgsub.progress WHERE subid = %s AND worker = 0"
    found = row(connection, query, (subid,))
    if found is None:
        raise subscriptions.unknown(subid)
    return Position(*map(parse_lsn, found))


def move(connection: psycopg.Connection, subid: int, to: int) -> None:
    """Move apply's position to one at which no transaction ended, in the open transaction.

    Apply asks the publisher for what is behind it. The slot alone does not keep a position to which it was advanced: a
    crash of the publisher takes the slot back, because ``pg_replication_slot_advance`` does not save it.

    :raises StateForbids: the subscription is not in the ledger.
    """
    query = (
        "UPDATE pgsub.progress SET remote_lsn = %(to)s, reported_lsn = greatest(reported_lsn, %(to)s),"
        " remote_commit_ts = NULL WHERE subid = %(subid)s AND worker = 0"
    )
    if connection.execute(query, {"to": format_lsn(to), "subid": subid}).rowcount != 1:
        raise subscriptions.unknown(subid)


def advance(connection: psycopg.Connection, claim: Claim, old: Position, to: int) -> None:
    """Move apply's position durably, in one commit with its log record.

    Tables that wait for their hand-over lose their claims: each has to catch up beyond the new position, through the
    changes that apply is about to leave out.

    :param claim: apply's claim, raised after its worker had ended.
    :param old: the position when the operator decided.
    :raises StateForbids: the position has changed since.
    """
    with states.changing(connection, claim.subid):
        worker_takeover.fence(connection, claim)
        if position(connection, claim.subid) != old:
            raise StateForbids("the subscription's position moved meanwhile", hint="Check it, then try again.")
        handover.clear_claims(connection, claim.subid, None)
        move(connection, claim.subid, to)
        text = f"replication origin advanced from {format_lsn(old.furthest)} to {format_lsn(to)}"
        moved = {"kind": "advanced", "from": format_lsn(old.remote_lsn), "to": format_lsn(to)}
        events.add(connection, claim.subid, events.log_entry("LOG", log_text(text)), moved)
