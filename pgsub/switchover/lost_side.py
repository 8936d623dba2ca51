"""A switchover as the journals of both servers have it, and which of them has lost it.

NOTES

A restore, or a failover to a standby that lagged, takes a server back to an earlier time. The other server knows what
was committed before it committed itself:

* The taking side records a position before the right is given. If the right was given with another position, that row
  is of an earlier time. So is a missing row, unless somebody has dropped the ledger. It was not dropped if the server
  still has the subscription of the switchover, or if its WAL ends before that position.
* The reverse subscription has applied something after that position, or the other one is dropped, only once the right
  was taken. Whether they are enabled proves nothing, because a user, or an undoing, may have disabled them since.
* The commit that gives the right is behind the fence and behind all changes that were applied in the pause. A giving
  side that still has it when the right was taken has lost nothing of them, and one that lacks it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import psycopg

from pgsub.common import quoting
from pgsub.common.query import scalar
from pgsub.protocol.lsn import format_lsn
from pgsub.publisher.current_wal_lsn import flushed_position
from pgsub.switchover import journal
from pgsub.switchover.journal import Entry

#: Keys in ``saved`` of the giving side: whether it was fenced again, because it had lost its fence; and whether a user
#: has said that the ledger of the taking side was dropped.
LAGGED, LEDGER_DROPPED = "lagged", "ledger_dropped"
#: Whether the role may read what :func:`of_taking` reads.
MAY_READ = """
SELECT pg_catalog.has_schema_privilege('pgsub', 'USAGE') AND (
       SELECT bool_and(pg_catalog.has_table_privilege(c.oid, 'SELECT')) FROM pg_catalog.pg_class c
        WHERE c.relnamespace = 'pgsub'::pg_catalog.regnamespace AND c.relname IN ('switchover', 'subscription'))
"""
_NO_JOURNAL = "SELECT pg_catalog.to_regclass('pgsub.switchover') IS NULL"
#: Returns what :func:`of_taking` returns, for the giving side's row.
Look = Callable[[Entry], tuple[Entry | None, bool]]
_APPLIED = "SELECT remote_lsn > %s::pg_catalog.pg_lsn FROM pgsub.progress WHERE subid = %s AND worker = 0"
_KNOWN = "SELECT EXISTS (SELECT FROM pgsub.subscription WHERE subid = %s)"


class Found(NamedTuple):
    """A switchover, as both servers have it.

    :ivar there: the row of the giving side.
    :ivar lost: the side that has lost it, None if neither has.
    :ivar dropped: instead the taking side's ledger may have been dropped, which cannot be told apart.
    """

    there: Entry
    lost: str | None
    dropped: bool = False

    @property
    def undone(self) -> bool:
        """Whether it is being undone, or has been."""
        return self.there.phase in (journal.RELEASING, journal.RELEASED)


def lost_by(there: Entry | None, here: Entry | None, *, taken: bool = False) -> str | None:
    """Return the side that has lost a switchover, None if neither has.

    :param there: the giving side's row. ``here`` is the taking side's.
    :param taken: the right was taken for certain.
    """
    if here is not None and here.phase in journal.HAS_TAKEN:
        kept = there is not None and there.phase == journal.GIVEN and there.position == here.position
        return None if kept and LAGGED not in ((there and there.saved) or {}) else journal.GIVING
    if there is None or there.phase == journal.RELEASED:
        return None
    # guard: a target that is back at a time before it took the right has lost the switchover
    if here is None or taken or (there.phase == journal.GIVEN and here.position != there.position):
        return journal.TAKING
    return None


def read(giving: psycopg.Connection, subid: int, look: Look, *, ended: bool = False) -> Found | None:
    """Read the rows of the switchover that created a reverse subscription, None if the giving side has none.

    :param subid: the reverse subscription.
    :param look: returns what :func:`of_taking` returns. It is called only if necessary.
    :param ended: the other subscription is dropped.
    """
    there = journal.of_subscription(giving, journal.GIVING, subid)
    while there is not None:
        if there.phase in (journal.RELEASING, journal.RELEASED):
            return Found(there, None)
        if ended and there.phase in (journal.OPEN, journal.FENCED):
            return Found(there, journal.GIVING)
        taken = ended or has_applied(giving, subid, there)  # before the other server is asked, which may take it
        here, dropped = look(there)
        read, there = there, journal.of(giving, there.id)
        # Another run may have moved the right between the two looks.
        if there is not None and (there.phase, there.position) == (read.phase, read.position):
            if dropped and LEDGER_DROPPED in (there.saved or {}):
                return Found(there, None)
            lost = lost_by(there, here, taken=taken)
            # A giving side that has the commit by now was fenced again, and that was told.
            return Found(there, None if ended and lost == journal.GIVING else lost, dropped)
    return None


def has_applied(giving: psycopg.Connection, subid: int, there: Entry) -> bool:
    """Return whether a reverse subscription has applied what clients wrote on the taking side.

    :param there: the row of the giving side.
    """
    position = format_lsn(there.position or 0)
    return there.position is not None and scalar(giving, _APPLIED, (position, subid)) is True


def of_taking(taking: psycopg.Connection, subid: int, there: Entry) -> tuple[Entry | None, bool]:
    """Return the row of the taking side, and whether its ledger may have been dropped.

    :param subid: the ending subscription.
    :raises psycopg.errors.InsufficientPrivilege: the role may not read ``pgsub.switchover`` or ``pgsub.subscription``.
    """
    known = has_journal(taking)
    here = journal.of(taking, there.id) if known else None
    if here is not None or (known and knows(taking, subid)):
        return here, False
    # a right that was not given cannot be in use behind a dropped ledger
    return None, there.position is not None and flushed_position(taking) >= there.position


def has_journal(session: psycopg.Connection) -> bool:
    """Return whether the database has a ledger."""
    return scalar(session, _NO_JOURNAL) is not True


def knows(session: psycopg.Connection, subid: int) -> bool:
    """Return whether the ledger has a subscription."""
    return scalar(session, _KNOWN, (subid,)) is True


def grants(role: str) -> list[str]:
    """Return the statements that let a role read what :func:`of_taking` reads."""
    named = quoting.name(role)
    return [
        f"GRANT USAGE ON SCHEMA pgsub TO {named};",
        f"GRANT SELECT ON pgsub.switchover, pgsub.subscription TO {named};",
    ]
