"""Prepared transactions of a subscription on the target, and what the ledger knows of them.

COMMIT PREPARED cannot share a transaction with the ledger. A prepared transaction that held a lock on the progress row
would block apply for ever. So it holds the data and one marker row of its own, and the ledger follows in a commit of
its own. Gid, marker and ledger row show at which step an earlier attempt ended:

====================  ======  ==========  =====================================================
in pg_prepared_xacts  marker  ledger row  what happened
====================  ======  ==========  =====================================================
yes                   (no)    no          prepared, and the ledger's commit was lost
yes                   (no)    yes         prepared
no                    yes     yes         committed, and the ledger's commit was lost
no                    no      yes         another session rolled it back
no                    no      no          never prepared here, or all done
====================  ======  ==========  =====================================================

Mirrors TwoPhaseTransactionGid and apply_handle_prepare_internal (worker.c).
"""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
from psycopg import sql

from pgsub.common.query import scalar
from pgsub.protocol.lsn import format_lsn

PREPARE, COMMIT, ROLLBACK = map(sql.SQL, ("PREPARE TRANSACTION {}", "COMMIT PREPARED {}", "ROLLBACK PREPARED {}"))
#: For a target whose max_prepared_transactions is 0.
ENABLE = "Run this on the target, and restart it; apply goes on by itself:\n" + (
    "ALTER SYSTEM SET max_prepared_transactions = 20;"
)

# Anyone may prepare a transaction of any name, also this role for another purpose, and also a name that the ledger has
# once its transaction was ended by hand. But pgsub's have written a marker: until they end they hold the lock of that
# (AtPrepare_Locks), and only who may write to the ledger can take it.
_GENUINE = """
EXISTS (SELECT FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_locks own USING (virtualtransaction)
         WHERE own.locktype = 'transactionid' AND own.transactionid = x.transaction AND own.granted
           AND own.pid IS NULL AND l.pid IS NULL AND l.granted
           AND l.locktype = 'relation' AND l.mode = 'RowExclusiveLock'
           AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
           AND l.relation = pg_catalog.to_regclass('pgsub.prepared_xact'))
"""
_HOLDER = "SELECT owner::text, database::text FROM pg_catalog.pg_prepared_xacts WHERE gid = %s"
_FIND = f"""
SELECT EXISTS (SELECT FROM pg_catalog.pg_prepared_xacts x
                WHERE x.gid = %(gid)s AND x.database = pg_catalog.current_database() AND ({_GENUINE})),
       EXISTS (SELECT FROM pgsub.prepared_xact WHERE subid = %(subid)s AND gid = %(gid)s),
       EXISTS (SELECT FROM pgsub.prepared_pending WHERE subid = %(subid)s AND gid = %(gid)s)
"""
_PREPARED = """
SELECT x.gid, x.owner::text, x.owner = current_user OR r.rolsuper, {}
  FROM pg_catalog.pg_prepared_xacts x, pg_catalog.pg_roles r
 WHERE x.database = pg_catalog.current_database() AND pg_catalog.starts_with(x.gid, %(prefix)s)
   AND r.rolname = current_user
 ORDER BY x.prepared, x.gid
"""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A transaction on the target that is prepared under a name of the subscription.

    :ivar ours: whether this session's role may finish it.
    :ivar genuine: whether it can have been prepared for the subscription.
    """

    gid: str
    owner: str
    ours: bool
    genuine: bool


@dataclass(frozen=True, slots=True)
class Found:
    """The traces of one prepared transaction: see the table above."""

    prepared: bool
    marker: bool
    listed: bool


def gid_prefix(subid: int) -> str:
    """Return how identifiers of a subscription's prepared transactions begin (``TwoPhaseTransactionGid``)."""
    return f"pgsub_{subid}_"


class PreparedTransactions:
    """One subscription's prepared transactions, through one target session.

    :param connection: autocommit; :meth:`mark`, :meth:`list_` and :meth:`unlist` belong into the caller's transaction.
    """

    def __init__(self, connection: psycopg.Connection, subid: int) -> None:
        self._connection = connection
        self._subid = subid

    def gid(self, xid: int, prepare_lsn: int) -> str:
        """Name it on the target: of this subscription and no other, never used twice although xids come again."""
        return f"{gid_prefix(self._subid)}{xid}_{prepare_lsn:X}"

    def listed(self, xid: int) -> str | None:
        """Return the gid under which the ledger has the publisher's prepared transaction.

        Its xid is not used again before it ends.
        """
        query = "SELECT gid FROM pgsub.prepared_pending WHERE subid = %s AND xid = %s"
        found: str | None = scalar(self._connection, query, (self._subid, xid))
        return found

    def find(self, gid: str) -> Found:
        """Look up prepared transaction, marker and ledger row."""
        row = self._connection.execute(_FIND.encode(), {"gid": gid, "subid": self._subid}).fetchone()
        assert row is not None
        return Found(*row)

    def holder(self, gid: str) -> tuple[str, str] | None:
        """Return owner and database of the transaction that bears a name; names are those of the whole cluster."""
        row = self._connection.execute(_HOLDER, (gid,)).fetchone()
        return None if row is None else (str(row[0]), str(row[1]))

    def mark(self, connection: psycopg.Connection, gid: str) -> None:
        """Write the marker row, inside the transaction that is about to be prepared.

        :param connection: the session that holds the data.
        """
        connection.execute("INSERT INTO pgsub.prepared_xact (subid, gid) VALUES (%s, %s)", (self._subid, gid))

    def list_(self, gid: str, prepare_lsn: int, xid: int) -> None:
        """Write the ledger's row: from now on the prepared transaction must not vanish."""
        self._connection.execute(
            "INSERT INTO pgsub.prepared_pending (subid, gid, prepare_lsn, xid) VALUES (%s, %s, %s, %s)"
            " ON CONFLICT DO NOTHING",
            (self._subid, gid, format_lsn(prepare_lsn), xid),
        )

    def unlist(self, gid: str) -> None:
        """Remove what is known of a prepared transaction that has ended: it will not be sent again."""
        for table in ("prepared_pending", "prepared_xact"):
            self._connection.execute(
                sql.SQL("DELETE FROM {} WHERE subid = %s AND gid = %s").format(sql.Identifier("pgsub", table)),
                (self._subid, gid),
            )


def all_prepared(connection: psycopg.Connection, subid: int, *, ledger: bool = True) -> list[Prepared]:
    """Return the transactions that are prepared under names of the subscription, oldest first.

    :param ledger: whether there is one; without, only what this session's role prepared counts as genuine.
    """
    query = _PREPARED.format(_GENUINE if ledger else "x.owner = current_user")
    params = {"subid": subid, "prefix": gid_prefix(subid)}
    return [Prepared(*row) for row in connection.execute(query.encode(), params)]
