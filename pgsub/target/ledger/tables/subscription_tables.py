"""The set of a subscription's tables: what REFRESH and ALTER change in the ledger.

Mirrors AddSubscriptionRelState and RemoveSubscriptionRel (pg_subscription.c). All changes of a refresh commit together,
under the lock of apply's row, and raise ``states_version``. So apply decides by the old set or by the new one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psycopg

from pgsub.common.errors import Fenced
from pgsub.target.ledger import subscriptions, two_phase_state, worker_takeover
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.ledger.tables import chunks, held_tables, states
from pgsub.target.ledger.tables.states import TABLES
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session import advisory_locks

_LOCK_CLASS = 0x7067736D  #: "pgsm", different from the launcher's key
_REL = "subid = %s AND srrelid = %s"


@dataclass(frozen=True, slots=True)
class Renamed:
    """A table that was renamed on the target and on the publisher since it was subscribed."""

    srrelid: int
    schemaname: str
    relname: str


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the set of tables by one refresh.

    :ivar claims: fence the sync workers of all tables in ``drop`` and ``again`` that had one.
    """

    add: Sequence[RelationState] = ()
    drop: Sequence[int] = ()
    rename: Sequence[Renamed] = ()
    again: Sequence[int] = ()  #: tables to truncate in the same transaction and to copy again
    adopt: bool = False  #: tables in ``again`` are not truncated, and only differences are transferred
    claims: Sequence[Claim] = ()
    keep: int = 0  #: with ``adopt``: maximum of replaced or deleted rows that are kept, for each table

    @property
    def copies(self) -> bool:
        """Whether it copies a table."""
        return bool(self.again) or any(relation.srsubstate == "i" for relation in self.add)


@contextlib.contextmanager
def maintenance(connection: psycopg.Connection, subid: int, name: str) -> Iterator[None]:
    """Protect the subscription from other commands that change it, on any host and with any state store.

    A launcher that serves it meanwhile goes on.

    :raises LockHeld: another command is changing it.
    """
    key = (_LOCK_CLASS, subid)
    with advisory_locks.holding(connection, key) as taken:
        if not taken:
            raise advisory_locks.held(connection, key, _changed(name), "Wait until it ends, then try again.")
        yield


def hold_still(connection: psycopg.Connection, subid: int, name: str) -> None:
    """Wait in the open transaction until other commands that change the subscription have ended.

    :raises LockHeld: one does not end.
    """
    advisory_locks.take_for_transaction(connection, (_LOCK_CLASS, subid), _changed(name))


def _changed(name: str) -> str:
    return f'subscription "{name}" is being changed by another command'


def reset_to_datasync(connection: psycopg.Connection, claims: Sequence[Claim]) -> None:
    """Set ``f`` → ``d`` for tables that are about to lose their sync slot: no crash leaves an ``f`` without one.

    A synchronization from ``d`` begins again, and removes the rows of this copy first.
    """
    if not claims:
        return
    subid, relids = claims[0].subid, worker_takeover.numbers(claims)
    with states.changing(connection, subid):
        worker_takeover.fence(connection, *claims)
        states.lock_tables(connection, subid, relids)
        connection.execute(
            f"UPDATE pgsub.subscription_rel SET srsubstate = 'd', handover_lsn = NULL WHERE {TABLES}"
            " AND srsubstate = 'f'".encode(),
            (subid, relids),
        )


def change(connection: psycopg.Connection, subid: int, wanted: Change) -> None:
    """Make the change in the caller's transaction, which holds apply's row (:func:`states.changing`).

    :raises Fenced: a sync worker was started again, or created a slot that nobody would drop; repeat the refresh.
    :raises StateForbids: a table would be copied, but two_phase was enabled meanwhile.
    """
    if wanted.copies:
        two_phase_state.refuse_copy(connection, subid)
    worker_takeover.fence(connection, *wanted.claims)
    rows = connection.execute(
        "SELECT srrelid::bigint, coalesce(sync_slot, spare_slot) FROM pgsub.subscription_rel"
        f" WHERE {TABLES} ORDER BY srrelid FOR UPDATE".encode(),
        (subid, [*wanted.drop, *wanted.again]),
    ).fetchall()
    if {relid for relid, _ in rows} != {*wanted.drop, *wanted.again}:
        raise Fenced("the subscription's tables changed meanwhile")
    if any(slot is not None and relid in wanted.drop for relid, slot in rows):
        raise Fenced("a table that is removed still has a slot")
    held_tables.forget(connection, subid, [*wanted.drop, *wanted.again])  # the copy contains the kept changes
    chunks.forget(connection, subid, [*wanted.drop, *wanted.again])
    # control rows stay: if a table comes back, its epochs continue, and older sessions are still recognized as older
    connection.execute(f"DELETE FROM pgsub.subscription_rel WHERE {TABLES}".encode(), (subid, list(wanted.drop)))
    _rename(connection, subid, wanted.rename)
    # any state → i; sync_slot stays recorded: the slot is dropped afterwards, or by the next synchronization
    connection.execute(
        "UPDATE pgsub.subscription_rel SET srsubstate = 'i', srsublsn = NULL, handover_lsn = NULL, copy_mode = NULL,"
        f" adopt = %s, adopted = NULL, keep = %s, kept = 0 WHERE {TABLES}".encode(),
        (wanted.adopt, wanted.keep, subid, list(wanted.again)),
    )
    subscriptions.add_relations(connection, subid, wanted.add)


def _rename(connection: psycopg.Connection, subid: int, renamed: Sequence[Renamed]) -> None:
    """Record new names in two steps, because two tables may have exchanged theirs."""
    for one in renamed:
        connection.execute(
            f"UPDATE pgsub.subscription_rel SET schemaname = '', relname = srrelid::text WHERE {_REL}".encode(),
            (subid, one.srrelid),
        )
    for one in renamed:
        connection.execute(
            f"UPDATE pgsub.subscription_rel SET schemaname = %s, relname = %s WHERE {_REL}".encode(),
            (one.schemaname, one.relname, subid, one.srrelid),
        )
