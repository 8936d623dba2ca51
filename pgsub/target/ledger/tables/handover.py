"""The hand-over of a table from its sync worker to apply: claims of a position, and state ``f`` → ``s``.

Mirrors process_syncing_tables_for_sync and wait_for_worker_state_change (``tablesync.c``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import psycopg

from pgsub.common.errors import Fenced
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
    """The outcome of a hand-over attempt.

    :ivar done: the tables for which ``s`` was committed.
    :ivar handover_lsn: the claim of the other tables, as returned by :func:`standing`.
    """

    done: set[int]
    handover_lsn: int | None


def try_syncdone(connection: psycopg.Connection, claims: Sequence[Claim], sync_lsn: int) -> HandOver:
    """Set ``f`` → ``s`` for those tables of one sync worker that :func:`may_hand_over`, and return what was found.

    From then on apply takes a transaction if its finish LSN is not below ``srsublsn``. What apply decided before, under
    its lock, was already covered by ``srsublsn``.

    :raises Fenced: an epoch was raised, or no table is in ``f``.
    """
    with changing(connection, claims[0].subid) as apply_lsn:
        worker_takeover.fence(connection, *claims)
        found = _claimed(connection, claims)
        done = set(found)
        # guard: a table is handed over only at a position that apply has not passed
        done -= {relid for relid, at in found.items() if not may_hand_over(apply_lsn, sync_lsn, at)}
        if not done:
            raise psycopg.Rollback()  # apply need not read the states again
        _set_syncdone(connection, claims[0].subid, sorted(done), sync_lsn)
    return HandOver(done, _first(at for relid, at in found.items() if relid not in done))


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


def claim_handover(connection: psycopg.Connection, claims: Sequence[Claim], sync_lsn: int) -> int:
    """Fix the position of the hand-over, H = max(apply, sync), unless there is a claim already.

    :return: H, or the existing claim.
    """
    with changing(connection, claims[0].subid) as apply_lsn:
        worker_takeover.fence(connection, *claims)
        found = _claimed(connection, claims)
        handover = _first(found.values())
        if handover is None:
            handover = max(apply_lsn, sync_lsn)
            connection.execute(
                f"UPDATE pgsub.subscription_rel SET handover_lsn = %s WHERE {TABLES}".encode(),
                (format_lsn(handover), claims[0].subid, list(found)),
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


def standing(connection: psycopg.Connection, claims: Sequence[Claim]) -> int | None:
    """Return the lowest position at which a table of these in ``f`` is claimed; None if none is."""
    return _first(_positions(connection, claims).values())


def _claimed(connection: psycopg.Connection, claims: Sequence[Claim]) -> dict[int, int | None]:
    """Read the positions at which tables in ``f`` are claimed, and lock their rows."""
    found = _positions(connection, claims, "FOR UPDATE")
    if not found:
        raise Fenced("the table is not waiting for a hand-over")
    return found


def _positions(connection: psycopg.Connection, claims: Sequence[Claim], lock: str = "") -> dict[int, int | None]:
    query = (
        f"SELECT srrelid::bigint, handover_lsn::text FROM pgsub.subscription_rel WHERE {TABLES}"
        f" AND srsubstate = 'f' ORDER BY srrelid {lock}"
    )
    rows = connection.execute(query.encode(), (claims[0].subid, worker_takeover.numbers(claims)))
    return {relid: lsn_or_none(text) for relid, text in rows}


def _first(positions: Iterable[int | None]) -> int | None:
    return min((one for one in positions if one is not None), default=None)
