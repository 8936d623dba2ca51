"""The hand-over of a table from its sync worker to apply: claims of a position, and state ``f`` → ``s``.

Mirrors process_syncing_tables_for_sync and wait_for_worker_state_change (``tablesync.c``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import psycopg

from pgsub.common.errors import Fenced
from pgsub.common.query import row
from pgsub.protocol.lsn import format_lsn, lsn_or_none
from pgsub.target.ledger import worker_takeover
from pgsub.target.ledger.tables.states import TABLES, changing, lock_tables
from pgsub.target.ledger.worker_takeover import Claim


def may_hand_over(apply_lsn: int, sync_lsn: int, handover_lsn: int | None) -> bool:
    """Return whether ``f`` may become ``s``.

    It may if apply has not passed the sync worker, or, with a claim, if the sync worker has reached the claim.

    :param sync_lsn: the sync worker has applied everything before it. With a claim, it has applied nothing beyond,
        except what came with the copy itself.
    """
    return apply_lsn <= sync_lsn if handover_lsn is None else sync_lsn >= handover_lsn


@dataclass(frozen=True, slots=True)
class HandOver:
    """The outcome of a hand-over attempt: apply's position, the claim if any, and whether ``s`` was committed."""

    apply_lsn: int
    handover_lsn: int | None
    done: bool


def try_syncdone(connection: psycopg.Connection, claim: Claim, sync_lsn: int) -> HandOver:
    """Set ``f`` → ``s`` if :func:`may_hand_over`, and return what was found.

    From then on apply takes a transaction if its finish LSN is not below ``srsublsn``. What apply decided before, under
    its lock, was already covered by ``srsublsn``.

    :raises Fenced: the epoch was raised, or the table is in another state.
    """
    with changing(connection, claim.subid) as apply_lsn:
        worker_takeover.fence(connection, claim)
        handover = _handover(connection, claim)
        ready = may_hand_over(apply_lsn, sync_lsn, handover)
        # guard: a table is handed over only at a position that apply has not passed, always
        if ready:
            _set_syncdone(connection, claim.subid, [claim.worker], sync_lsn)
        else:
            raise psycopg.Rollback()  # apply need not read the states again
    return HandOver(apply_lsn, handover, ready)


def try_syncdone_many(connection: psycopg.Connection, claims: Sequence[Claim], sync_lsn: int) -> set[int]:
    """Set ``f`` → ``s``, as :func:`try_syncdone`, for tables that were copied at one position and not streamed since.

    :return: the tables that are ``s`` now.
    """
    subid = claims[0].subid
    with changing(connection, subid) as apply_lsn:
        worker_takeover.fence(connection, *claims)
        rows = connection.execute(
            f"SELECT srrelid::bigint, handover_lsn::text FROM pgsub.subscription_rel WHERE {TABLES}"
            " AND srsubstate = 'f' ORDER BY srrelid FOR UPDATE".encode(),
            (subid, worker_takeover.numbers(claims)),
        )
        done = {relid for relid, text in rows if may_hand_over(apply_lsn, sync_lsn, lsn_or_none(text))}
        if not done:
            raise psycopg.Rollback()
        _set_syncdone(connection, subid, sorted(done), sync_lsn)
    return done


def _set_syncdone(connection: psycopg.Connection, subid: int, relids: list[int], at: int) -> None:
    connection.execute(
        "UPDATE pgsub.subscription_rel SET srsubstate = 's', srsublsn = %s, handover_lsn = NULL"
        f" WHERE {TABLES} AND srsubstate = 'f'".encode(),
        (format_lsn(at), subid, relids),
    )


def claim_before_copy(connection: psycopg.Connection, claims: Sequence[Claim]) -> None:
    """Claim tables (``d``) at apply's position, before their slot exists. Apply leaves out their changes beyond it.

    The copy contains everything between this position and the slot's consistent point. So unless apply withdraws the
    claims, the tables are handed over at the consistent point without any streaming.
    """
    with changing(connection, claims[0].subid) as apply_lsn:
        _move_claims(connection, claims, apply_lsn, standing=False)


def move_claims(connection: psycopg.Connection, claims: Sequence[Claim], position: int) -> None:
    """Move claims to the new slot's position; the copy contains what lies before. Withdrawn claims stay withdrawn."""
    with changing(connection, claims[0].subid):
        _move_claims(connection, claims, position, standing=True)


def _move_claims(connection: psycopg.Connection, claims: Sequence[Claim], position: int, *, standing: bool) -> None:
    worker_takeover.fence(connection, *claims)
    subid, relids = claims[0].subid, worker_takeover.numbers(claims)
    lock_tables(connection, subid, relids)
    connection.execute(
        f"UPDATE pgsub.subscription_rel SET handover_lsn = %s WHERE {TABLES}"
        " AND srsubstate = 'd' AND (handover_lsn IS NOT NULL) = %s".encode(),
        (format_lsn(position), subid, relids, standing),
    )


def claim_handover(connection: psycopg.Connection, claim: Claim, sync_lsn: int) -> int:
    """Fix the position of the hand-over, H = max(apply, sync), unless there is a claim already.

    :return: H, or the existing claim.
    """
    with changing(connection, claim.subid) as apply_lsn:
        worker_takeover.fence(connection, claim)
        handover = _handover(connection, claim)
        if handover is None:
            handover = max(apply_lsn, sync_lsn)
            connection.execute(
                "UPDATE pgsub.subscription_rel SET handover_lsn = %s WHERE subid = %s AND srrelid = %s",
                (format_lsn(handover), claim.subid, claim.worker),
            )
    return handover


def withdraw_claims(connection: psycopg.Connection, subid: int, relids: Collection[int]) -> None:
    """Withdraw claims: apply waited long enough, or the sync worker failed. An error in one table stops no other."""
    with changing(connection, subid):
        clear_claims(connection, subid, relids)


def clear_claims(connection: psycopg.Connection, subid: int, relids: Collection[int] | None) -> None:
    """Withdraw claims in the caller's transaction, which holds apply's row.

    :param relids: None: every table.
    """
    if relids is None:
        rows = connection.execute("SELECT srrelid::bigint FROM pgsub.subscription_rel WHERE subid = %s", (subid,))
        relids = [relid for (relid,) in rows]
    lock_tables(connection, subid, relids)
    connection.execute(
        f"UPDATE pgsub.subscription_rel SET handover_lsn = NULL WHERE {TABLES} AND srsubstate IN ('d', 'f')".encode(),
        (subid, list(relids)),
    )


def _handover(connection: psycopg.Connection, claim: Claim) -> int | None:
    """Read the claim of a table in ``f``, and lock its row."""
    found = row(
        connection,
        "SELECT handover_lsn::text FROM pgsub.subscription_rel WHERE subid = %s AND srrelid = %s"
        " AND srsubstate = 'f' FOR UPDATE",
        (claim.subid, claim.worker),
    )
    if found is None:
        raise Fenced("the table is not waiting for a hand-over")
    return lsn_or_none(found[0])
