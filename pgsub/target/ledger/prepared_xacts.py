"""Prepared transactions of a subscription on the target, and their rows in the ledger.

COMMIT PREPARED cannot share a transaction with the ledger. A prepared transaction that held a lock on the progress row
would block apply for ever. So it holds the data and a marker row of its own, and the ledger follows in a separate
commit. Gid, marker and ledger row show at which step an earlier attempt ended:

====================  ======  ==========  =====================================================
in pg_prepared_xacts  marker  ledger row  what happened
====================  ======  ==========  =====================================================
yes                   (no)    no          prepared, and the ledger's commit was lost
yes                   (no)    yes         prepared
no                    yes     yes         committed, and the ledger's commit was lost
no                    no      yes         another session rolled it back
no                    no      no          never prepared here, or finished
====================  ======  ==========  =====================================================

Mirrors TwoPhaseTransactionGid and apply_handle_prepare_internal (worker.c).
"""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
from psycopg import sql

from pgsub.common.query import scalar, shown
from pgsub.protocol.lsn import format_lsn

PREPARE, COMMIT, ROLLBACK = map(sql.SQL, ("PREPARE TRANSACTION {}", "COMMIT PREPARED {}", "ROLLBACK PREPARED {}"))
#: Hint for a target whose max_prepared_transactions is 0.
ENABLE = "Run this on the target, and restart it; apply continues by itself:\n" + (
    "ALTER SYSTEM SET max_prepared_transactions = 20;"
)

# Anyone may prepare a transaction under any name: this role too, for another purpose, or under a recorded name whose
# transaction was ended by hand. A transaction of pgsub has written a marker, so until it ends it holds a lock on the
# marker table (AtPrepare_Locks). Only roles that may write to the ledger can take that lock.
#: Condition for a transaction ``x`` of pg_prepared_xacts.
GENUINE = """
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
                WHERE x.gid = %(gid)s AND x.database = pg_catalog.current_database() AND ({GENUINE})),
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
    """A transaction that is prepared on the target under a name of the subscription.

    :ivar ours: this session's role may finish it.
    :ivar genuine: it can have been prepared for the subscription.
    """

    gid: str
    owner: str
    ours: bool
    genuine: bool


@dataclass(frozen=True, slots=True)
class Found:
    """The traces of one prepared transaction; see the table above."""

    prepared: bool
    marker: bool
    listed: bool


def gid_prefix(subid: int) -> str:
    """Return the prefix of the identifiers of a subscription's prepared transactions (``TwoPhaseTransactionGid``)."""
    return f"pgsub_{subid}_"


class PreparedTransactions:
    """The prepared transactions of one subscription, through one target session.

    :param connection: in autocommit mode. Call :meth:`mark`, :meth:`list_` and :meth:`unlist` inside a transaction.
    """

    def __init__(self, connection: psycopg.Connection, subid: int) -> None:
        self._connection = connection
        self._subid = subid

    def gid(self, xid: int, prepare_lsn: int) -> str:
        """Return the identifier on the target: of this subscription only, and never reused, although xids are."""
        return f"{gid_prefix(self._subid)}{xid}_{prepare_lsn:X}"

    def listed(self, xid: int) -> str | None:
        """Return the gid under which the ledger has the publisher's prepared transaction; None if it has none.

        The publisher does not reuse the xid before the transaction ends.
        """
        query = "SELECT gid FROM pgsub.prepared_pending WHERE subid = %s AND xid = %s"
        found: str | None = scalar(self._connection, query, (self._subid, xid))
        return found

    def find(self, gid: str) -> Found:
        """Look up the prepared transaction, its marker and its ledger row."""
        row = self._connection.execute(_FIND.encode(), {"gid": gid, "subid": self._subid}).fetchone()
        assert row is not None
        return Found(*row)

    def holder(self, gid: str) -> tuple[str, str] | None:
        """Return owner and database of the prepared transaction with this name. Names are unique in the cluster."""
        found = shown(self._connection, _HOLDER, (gid,))
        return (str(found[0][0]), str(found[0][1])) if found else None

    def mark(self, connection: psycopg.Connection, gid: str) -> None:
        """Write the marker row in the transaction that is about to be prepared.

        :param connection: the session that holds the data.
        """
        connection.execute("INSERT INTO pgsub.prepared_xact (subid, gid) VALUES (%s, %s)", (self._subid, gid))

    def list_(self, gid: str, prepare_lsn: int, xid: int) -> None:
        """Write the ledger's row. From now on the prepared transaction must not disappear."""
        self._connection.execute(
            "INSERT INTO pgsub.prepared_pending (subid, gid, prepare_lsn, xid) VALUES (%s, %s, %s, %s)"
            " ON CONFLICT DO NOTHING",
            (self._subid, gid, format_lsn(prepare_lsn), xid),
        )

    def unlist(self, gid: str) -> None:
        """Remove the rows of a prepared transaction that has ended. It will not be sent again."""
        for table in ("prepared_pending", "prepared_xact"):
            self._connection.execute(
                sql.SQL("DELETE FROM {} WHERE subid = %s AND gid = %s").format(sql.Identifier("pgsub", table)),
                (self._subid, gid),
            )


def all_prepared(connection: psycopg.Connection, subid: int, *, ledger: bool = True) -> list[Prepared]:
    """Return the transactions that are prepared under names of the subscription, oldest first.

    :param ledger: whether the target has a ledger. Without one, a transaction is genuine if this session's role
        prepared it.
    """
    query = _PREPARED.format(GENUINE if ledger else "x.owner = current_user")
    params = {"subid": subid, "prefix": gid_prefix(subid)}
    return [Prepared(*row) for row in connection.execute(query.encode(), params)]
