"""The state of two_phase in the ledger: pending until every table is ``r``, then enabled for good.

Mirrors the tri-state of worker.c (run_apply_worker, AllTablesyncsReady) and twophase.c (LookupGXactBySubid). ``e`` is
an intent: it is durable before the publisher is asked for a two-phase slot, so the ledger knows of every two-phase
slot. A command that adds a table to copy and one that changes the state take the same lock (:func:`state`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg

from pgsub.common import quoting
from pgsub.common.errors import PermissionMissing, StateForbids
from pgsub.common.query import scalar
from pgsub.protocol.lsn import parse_lsn
from pgsub.target.ledger import events, prepared_xacts, subscriptions, worker_takeover
from pgsub.target.ledger.prepared_xacts import Prepared
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session import transactions

DISABLED, PENDING, ENABLED = "d", "p", "e"
#: Names of the commands in the server's refusals (:func:`refuse_copy`).
REFRESH, ALTER = "ALTER SUBSCRIPTION ... REFRESH PUBLICATION with", "ALTER SUBSCRIPTION with refresh and"
_NAMED = 20

# A table becomes r only when apply has passed its srsublsn. So once every table is r, everything before is applied.
_BEHIND = """
SELECT greatest(p.remote_lsn,
                (SELECT max(r.srsublsn) FROM pgsub.subscription_rel r WHERE r.subid = p.subid))::text
  FROM pgsub.progress p WHERE p.subid = %s AND p.worker = 0
"""
_ALL_READY = """
SELECT count(*) > 0 AND pg_catalog.bool_and(srsubstate = 'r') FROM pgsub.subscription_rel WHERE subid = %s
"""
_PENDING = """
SELECT gid, xid, prepare_lsn::text,
       pg_catalog.to_char(prepared_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
  FROM pgsub.prepared_pending WHERE subid = %s
"""


@dataclass(frozen=True, slots=True)
class Pending:
    """A row of pgsub.prepared_pending. ``prepared_at`` is RFC 3339 text."""

    gid: str
    xid: int
    prepare_lsn: int
    prepared_at: str


def state(connection: psycopg.Connection, subid: int, *, lock: bool = False) -> str:
    """Read the state: ``d``, ``p`` or ``e``.

    :param lock: keeps the state until the caller's transaction ends. The lock is not FOR UPDATE: if foreign keys are
        checked for this role, the marker of a prepared transaction holds the row's key as long as it is prepared.
    """
    query = "SELECT two_phase::text FROM pgsub.subscription WHERE subid = %s"
    found = scalar(connection, f"{query} FOR NO KEY UPDATE" if lock else query, (subid,))
    if found is None:
        raise subscriptions.unknown(subid)
    return str(found)


def enable_if_ready(connection: psycopg.Connection, claim: Claim) -> tuple[bool, int]:
    """Set ``p`` → ``e`` if there is a table and all tables are ``r``, before START_REPLICATION asks for two_phase.

    It is an event: once ``replay_lsn`` is reached, log and ``state.db`` show the new state, as with the server.

    :param claim: apply's claim.
    :return: whether it is ``e``, and the start position in that case. The slot keeps the position as ``two_phase_at``.
        It must not lie below the srsublsn of any table. Otherwise a transaction prepared between the two would be sent
        as prepared before srsublsn, and taken for a change that the copy contains.
    """
    subid = claim.subid
    with transactions.durable(connection):
        transactions.lock_timeout(connection)
        now = state(connection, subid, lock=True)
        worker_takeover.fence(connection, claim)
        # a separate statement: it must see what was committed while it waited for the lock
        # guard: two_phase is enabled once every table is ready, without " and scalar(connection, _ALL_READY, (subid,))"
        if now == PENDING and scalar(connection, _ALL_READY, (subid,)):
            _set(connection, subid, ENABLED)
            # guard: feedback does not pass a change of two_phase that is not shown
            events.add(connection, subid, {"kind": "two_phase"})
            now = ENABLED
        position = behind(connection, subid)
    return now == ENABLED, position


def behind(connection: psycopg.Connection, subid: int) -> int:
    """Return the furthest end of a transaction in the ledger: that of apply or of a hand-over.

    A reported position without a transaction may be of a history that the publisher has left.

    :raises Fenced: the subscription is gone.
    """
    return parse_lsn(worker_takeover.present(scalar(connection, _BEHIND, (subid,))))


def _set(connection: psycopg.Connection, subid: int, to: str) -> None:
    connection.execute("UPDATE pgsub.subscription SET two_phase = %s WHERE subid = %s", (to, subid))


def refuse_copy(connection: psycopg.Connection, subid: int, words: str = REFRESH) -> None:
    """Refuse to add a table to copy while the state is ``e``.

    A table that is not ``r`` would lose transactions that are prepared before its snapshot and committed after its
    hand-over: COMMIT PREPARED carries no rows. The caller must call it again in the transaction that adds the table.

    :param words: the server's name of the command.
    :raises StateForbids: the state is ``e``; in the server's words.
    """
    if state(connection, subid, lock=True) == ENABLED:
        name = quoting.word(subscriptions.identity(connection, subid).subname)
        raise StateForbids(
            f"{words} copy_data is not allowed when two_phase is enabled",
            detail="What is prepared before a table's copy and committed after it would be lost.",
            hint="Add --no-copy-data, or disable two_phase, refresh, and enable it again:\n"
            f"pgsub disable {name}\npgsub alter {name} --no-two-phase",
            sqlstate="55000",
        )


def pending(connection: psycopg.Connection, subid: int) -> list[Pending]:
    """Return the transactions that the ledger has as prepared and undecided."""
    return [Pending(gid, xid, parse_lsn(lsn), at) for gid, xid, lsn, at in connection.execute(_PENDING, (subid,))]


def prepared(connection: psycopg.Connection, subid: int) -> list[Prepared]:
    """Return the subscription's prepared transactions on the target, oldest first."""
    return [one for one in prepared_xacts.all_prepared(connection, subid) if one.genuine]


def check_finishable(found: Sequence[Prepared]) -> None:
    """Check that this role may roll all of them back.

    :raises PermissionMissing: only their owners and superusers may finish prepared transactions.
    """
    others = [one for one in found if not one.ours]
    if others:
        owners = ", ".join(sorted({f'"{one.owner}"' for one in others}))
        statements = [f"{quoting.statement(prepared_xacts.ROLLBACK.format(one.gid))};" for one in others]
        raise PermissionMissing(
            "permission denied to finish prepared transactions on the target",
            detail=f"They were prepared by role {owners}; only that role or a superuser may finish them.",
            hint="\n".join(["Let one of them run this on the target, then try again:", *statements]),
            sqlstate="42501",
        )


def roll_back(connection: psycopg.Connection, found: Sequence[Prepared]) -> None:
    """Roll back prepared transactions for good: the publisher will not send them again. Missing ones are ignored.

    :param connection: in autocommit mode.
    """
    for one in found:
        with contextlib.suppress(psycopg.errors.UndefinedObject):
            connection.execute(prepared_xacts.ROLLBACK.format(one.gid))


def ask_for(connection: psycopg.Connection, subid: int) -> None:
    """Set ``d`` → ``p``. The next start of apply enables it if every table is ``r``. ``e`` stays."""
    with transactions.durable(connection):
        if state(connection, subid, lock=True) == DISABLED:
            _set(connection, subid, PENDING)


def check_disable(connection: psycopg.Connection, subid: int) -> None:
    """Refuse to disable two_phase while a transaction is prepared (``LookupGXactBySubid``). Call it in a transaction.

    :raises StateForbids: one is prepared; in the server's words, with its name.
    """
    state(connection, subid, lock=True)
    listed = {one.gid for one in pending(connection, subid)}
    gids = sorted(listed | {one.gid for one in prepared(connection, subid)})
    # guard: two_phase is not disabled while something is prepared
    if gids:
        raise StateForbids(
            'cannot disable "two_phase" when prepared transactions exist',
            detail="\n".join(["Prepared on the target:", *gids[:_NAMED], *(["…"] if len(gids) > _NAMED else [])]),
            hint="Let them be committed or rolled back on the publisher, and let the subscription catch up.",
            sqlstate="55000",
        )


def disable(connection: psycopg.Connection, subid: int) -> None:
    """Set ``d`` once the slot is no longer two-phase."""
    with transactions.durable(connection):
        check_disable(connection, subid)
        _set(connection, subid, DISABLED)
