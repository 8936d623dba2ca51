"""Cleanup after a lost attempt of a chunked copy: exactly its rows are removed, and no others.

Every row of a chunk has the xid that the chunk recorded. Local rows stay. A row of the copy that was changed locally
has another xid: it is kept and reported, and the table stays in error instead of going on silently.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import psycopg
from psycopg import sql

from pgsub.common import quoting
from pgsub.common.errors import ApplyError
from pgsub.common.query import scalar
from pgsub.common.subscription import Subscription
from pgsub.tablesync.copy.plan import is_empty, lock_out_writers, rules_of
from pgsub.target.catalog.relation import TargetRelation
from pgsub.target.ledger import worker_takeover
from pgsub.target.ledger.tables import chunks
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session import roles, transactions
from pgsub.target.sql.statement_builder import only

_READABLE = "SELECT pg_catalog.has_table_privilege(%s, 'SELECT') AND NOT pg_catalog.row_security_active(%s)"


def begun_before(connection: psycopg.Connection, subid: int, relids: Collection[int]) -> set[int]:
    """Return the tables for which an earlier attempt has planned chunks. Only these may have rows of it."""
    rows = connection.execute(
        "SELECT DISTINCT srrelid::bigint FROM pgsub.copy_chunk WHERE subid = %s AND srrelid = ANY (%s)",
        (subid, list(relids)),
    )
    return {relid for (relid,) in rows}


def may_go_on(connection: psycopg.Connection, sub: Subscription, claim: Claim, target: TargetRelation) -> bool:
    """Return whether the rows of earlier attempts can be compared, so that the copy need not begin again.

    They cannot if the session must not read the table, if a conflict rule may have changed a row, or if the table is
    empty on the target.
    """
    done = chunks.brought(connection, claim)
    if not done or any(one.part is None and one.rows for one in done) or sub.copy_atomic or rules_of(sub, target):
        return False
    if _was_caught_up(connection, claim) or not scalar(connection, _READABLE, (target.oid,) * 2):
        return False
    return not is_empty(connection, target)


def keep_rows(connection: psycopg.Connection, claim: Claim) -> None:
    """Remove the chunks of earlier attempts at an adopted table. Their rows are compared."""
    with transactions.durable(connection):
        worker_takeover.fence(connection, claim)
        _forget(connection, claim)


def _forget(connection: psycopg.Connection, claim: Claim) -> None:
    query = "DELETE FROM pgsub.copy_chunk WHERE subid = %s AND srrelid = %s"
    connection.execute(query, (claim.subid, claim.worker))


def remove_rows(connection: psycopg.Connection, claim: Claim, target: TargetRelation) -> None:
    """Remove the rows that earlier attempts committed, and their chunks in the ledger.

    The attempt's sessions were terminated before, so no late chunk commits afterwards. If another synchronization has
    taken over, this one removes nothing of what that one copies.

    :raises psycopg.errors.LockNotAvailable: a local transaction locks the table; try again later.
    :raises ApplyError: rows of the copy were changed locally; nothing is removed.
    """
    subid = claim.subid
    with transactions.durable(connection):
        worker_takeover.fence(connection, claim)
        copied = connection.execute(
            "SELECT xid::text::numeric %% 4294967296, rows_done FROM pgsub.copy_chunk"
            " WHERE subid = %s AND srrelid = %s AND xid IS NOT NULL",
            (subid, target.oid),
        ).fetchall()
        if copied:
            lock_out_writers(connection, target)
            removed = delete_rows(connection, target, [row[0] for row in copied])
            expected = sum(row[1] for row in copied)
            streamed = _was_caught_up(connection, claim)
            if (removed != expected or streamed) and not is_empty(connection, target):
                meanwhile = "by the catch-up that followed" if streamed else "locally meanwhile"
                fault = ApplyError(
                    f'could not remove the rows of an interrupted copy from "{target.schema}.{target.name}"',
                    detail=f"{expected} rows were copied, {removed} are unchanged; the others were changed or deleted"
                    f" {meanwhile}{', and rows may have been added' if streamed else ''}.",
                    hint=f"Empty the table, then the copy starts again:\nTRUNCATE {quoting.statement(only(target))};",
                )
                fault.relation = f"{target.schema}.{target.name}"
                raise fault
        _forget(connection, claim)


def delete_rows(connection: psycopg.Connection, target: TargetRelation, xids: Sequence[int]) -> int:
    """Delete the rows of some transactions of a copy; return their number."""
    texts = [str(xid) for xid in xids]
    with roles.using(connection, target):
        # guard: a failed copy removes only its own rows, without " WHERE xmin::text = ANY ({})"
        return connection.execute(
            sql.SQL("DELETE FROM {} WHERE xmin::text = ANY ({})").format(only(target), sql.Literal(texts))
        ).rowcount


def _was_caught_up(connection: psycopg.Connection, claim: Claim) -> bool:
    """Return whether transactions were applied to the table after its copy. Their rows look like local rows."""
    query = "SELECT remote_commit_ts IS NOT NULL FROM pgsub.progress WHERE subid = %s AND worker = %s"
    return scalar(connection, query, (claim.subid, claim.worker)) is True
