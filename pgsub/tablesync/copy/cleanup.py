"""After a lost attempt of a chunked copy: exactly its rows are removed, nobody else's.

Every row of a chunk carries the xid that the chunk recorded. Local rows stay; a row that was changed locally
meanwhile carries another xid, is kept and reported, and the table stays in error rather than silently go on.
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
from pgsub.target.sql.statement_builder import table_name

_READABLE = "SELECT pg_catalog.has_table_privilege(%s, 'SELECT') AND NOT pg_catalog.row_security_active(%s)"


def begun_before(connection: psycopg.Connection, subid: int, relids: Collection[int]) -> set[int]:
    """Return the tables of which an earlier attempt has planned chunks: only these may have rows of it."""
    rows = connection.execute(
        "SELECT DISTINCT srrelid::bigint FROM pgsub.copy_chunk WHERE subid = %s AND srrelid = ANY (%s)",
        (subid, list(relids)),
    )
    return {relid for (relid,) in rows}


def may_go_on(connection: psycopg.Connection, sub: Subscription, claim: Claim, target: TargetRelation) -> bool:
    """Return whether what earlier attempts brought can be compared, so that the copy need not begin again.

    The session must be able to read it; a rule may have made something else of a row; and a table that was emptied
    here has nothing to compare.
    """
    done = chunks.brought(connection, claim)
    if not done or any(one.part is None and one.rows for one in done) or sub.copy_atomic or rules_of(sub, target):
        return False
    if _was_caught_up(connection, claim) or not scalar(connection, _READABLE, (target.oid,) * 2):
        return False
    return not is_empty(connection, target)


def keep_rows(connection: psycopg.Connection, claim: Claim) -> None:
    """Forget the chunks of earlier attempts of a table that is adopted: what they brought is compared."""
    with transactions.durable(connection):
        worker_takeover.fence(connection, claim)
        _forget(connection, claim)


def _forget(connection: psycopg.Connection, claim: Claim) -> None:
    query = "DELETE FROM pgsub.copy_chunk WHERE subid = %s AND srrelid = %s"
    connection.execute(query, (claim.subid, claim.worker))


def remove_rows(connection: psycopg.Connection, claim: Claim, target: TargetRelation) -> None:
    """Remove what the chunks of earlier attempts committed, and their ledger rows.

    The attempt's sessions were evicted before, so no late chunk commits after this; and a synchronization that
    another one took over removes nothing of what that one copies.

    :raises psycopg.errors.LockNotAvailable: a local transaction holds the table; trying again later helps.
    :raises ApplyError: rows of the copy were changed locally; nothing is removed then.
    """
    table = table_name(target)
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
                    hint=f"Empty the table, then the copy starts again:\nTRUNCATE {quoting.statement(table)};",
                )
                fault.relation = f"{target.schema}.{target.name}"
                raise fault
        _forget(connection, claim)


def delete_rows(connection: psycopg.Connection, target: TargetRelation, xids: Sequence[int]) -> int:
    """Delete the rows of some transactions of a copy; return how many there were."""
    texts = [str(xid) for xid in xids]
    with roles.using(connection, target):
        # guard: a failed copy removes only its own rows, without " WHERE xmin::text = ANY ({})"
        return connection.execute(
            sql.SQL("DELETE FROM {} WHERE xmin::text = ANY ({})").format(table_name(target), sql.Literal(texts))
        ).rowcount


def _was_caught_up(connection: psycopg.Connection, claim: Claim) -> bool:
    """Return whether transactions were applied to the table after its copy: their rows pass for local ones."""
    query = "SELECT remote_commit_ts IS NOT NULL FROM pgsub.progress WHERE subid = %s AND worker = %s"
    return scalar(connection, query, (claim.subid, claim.worker)) is True
