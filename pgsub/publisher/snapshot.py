"""A slot with the snapshot of its consistent point, which is held open for any number of readers.

Mirrors the start of LogicalRepSyncTableStart (tablesync.c): the copy reads exactly what the slot will not send. The
snapshot is taken by ``USE_SNAPSHOT`` in a transaction and exported again, so it survives further commands on the
connection. A snapshot that CREATE_REPLICATION_SLOT itself exports ends with the next command.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import LiteralString

import psycopg
from psycopg.rows import TupleRow

from pgsub.common import server_words, table_lock
from pgsub.common.connections.exported_snapshot import ExportedSnapshot, HolderGone
from pgsub.common.errors import PublisherUnavailable, TableReplaced
from pgsub.publisher.connect import Connection, connect
from pgsub.publisher.server_errors import translating
from pgsub.publisher.slot_creation import Report, SlotWatch
from pgsub.publisher.slots import create_slot
from pgsub.publisher.stream.walsender import quote_identifier

# Catalogs are read as of the snapshot; functions return the present state.
_REWRITTEN = f"""
    WITH wanted AS (
        SELECT c.oid FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = %(schema)s AND c.relname = %(name)s)
    SELECT NOT EXISTS (SELECT FROM wanted w
            WHERE w.oid = pg_catalog.to_regclass(pg_catalog.format('%%I.%%I', %(schema)s::text, %(name)s::text)))
        OR EXISTS (SELECT FROM (
                SELECT w.oid FROM wanted w
                UNION SELECT t.relid FROM wanted w, pg_catalog.pg_partition_tree(w.oid) t) AS m (oid)
            JOIN pg_catalog.pg_class c ON c.oid = m.oid
            WHERE c.relkind = 'r' AND c.relfilenode <> pg_catalog.pg_relation_filenode(c.oid)
                OR {table_lock.COLUMNS_RENAMED.format(oid="c.oid")})"""


class SlotSnapshot:
    """The holder of a slot's snapshot. :meth:`open` creates it; :meth:`close` or leaving a ``with`` block ends it."""

    def __init__(
        self, connection: Connection, slot_name: str, consistent_point: int, exported: ExportedSnapshot
    ) -> None:
        self.connection = connection
        self.slot_name = slot_name
        self.consistent_point = consistent_point  #: start LSN of tables that are copied from this snapshot
        self.exported = exported  #: for :func:`use_snapshot` in any session with the same database

    @classmethod
    def open(
        cls,
        conninfo: str,
        slot_name: str,
        application_name: str,
        failover: bool = False,
        *,
        verify: Callable[[Connection], object],
        must_use_password: bool = False,
        report: Report = lambda message, detail, hint: None,
        stop: threading.Event | None = None,
        temporary: bool = False,
        deadline: float | None = None,
        on_open: Callable[[int], object] = lambda pid: None,
    ) -> SlotSnapshot:
        """Create a permanent slot and hold the snapshot of its consistent point.

        An error after the slot was created leaves it behind: the caller has recorded its name in the ledger before.

        :param verify: raises an error if the session that creates the slot is not connected to the publisher.
        :param temporary: the slot is dropped with the snapshot, or by :meth:`drop`.
        :param deadline: ends the wait, by ``time.monotonic()``.
        :param on_open: receives the PID on the publisher, before the slot is created.
        :raises Fenced: a stop was requested.
        """
        connection = connect(
            conninfo, application_name=application_name, replication=True, must_use_password=must_use_password
        )
        try:
            # guard: a slot is created only on the publisher
            verify(connection)
            on_open(connection.pgconn.backend_pid)
            _execute(connection, "BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ", "start a transaction")
            with SlotWatch(connection, conninfo, slot_name, report, stop=stop, deadline=deadline):
                consistent_point = create_slot(
                    connection, slot_name, failover=failover, snapshot="use", temporary=temporary
                )
            with translating(connection, "export the snapshot"):
                exported = ExportedSnapshot.of(connection)
        except BaseException:
            connection.close()
            raise
        return cls(connection, slot_name, consistent_point, exported)

    def drop(self) -> None:
        """Drop the slot, which keeps WAL. The snapshot stays."""
        _execute(self.connection, f"DROP_REPLICATION_SLOT {quote_identifier(self.slot_name)}", "drop a slot")

    def alive(self) -> bool:
        """Return whether the snapshot can still be imported: its transaction is open, and the server answers."""
        try:
            self.connection.execute("SELECT 1")
        except psycopg.Error:
            return False
        return self.connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS

    def close(self) -> None:
        """End the snapshot. Sessions that imported it keep it. This never fails."""
        with contextlib.suppress(psycopg.Error):
            self.connection.execute("COMMIT")
        self.connection.close()

    def __enter__(self) -> SlotSnapshot:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def use_snapshot(connection: Connection, snapshot: ExportedSnapshot, more: LiteralString = "") -> None:
    """Begin a read-only transaction that sees an exported snapshot, in one round trip, because each table needs one.

    :param more: a statement that sets something for the transaction.
    :raises PublisherUnavailable: the snapshot's holder is gone, so this attempt at the copy is over; try another.
    """
    statement = psycopg.sql.SQL("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; {}; " + more).format(
        snapshot.importing()
    )
    with translating(connection, "import the slot's snapshot"):
        try:
            connection.execute(statement, prepare=False)
        except HolderGone as error:
            raise PublisherUnavailable(
                f"could not import the slot's snapshot: {server_words.said(error).message}",
                detail="The session that held the snapshot has ended.",
                sqlstate=error.sqlstate,
            ) from None


def hold_table(connection: Connection, oid: int, schema: str, name: str) -> None:
    """Lock a table that is read under an imported snapshot, and verify that it still has the name.

    :raises PublisherUnavailable: another table has the name; another snapshot helps.
    :raises PgsubError: translated.
    """
    with translating(connection, f'lock table "{schema}.{name}"', table=(schema, name)):
        try:
            table_lock.hold(connection, oid, schema, name, table_lock.READING)
        except TableReplaced:
            raise _rewritten(schema, name) from None


def _rewritten(schema: str, name: str) -> PublisherUnavailable:
    return PublisherUnavailable(
        f'table "{schema}.{name}" was rewritten on the publisher while it was copied, or its columns were renamed',
        detail="The slot's snapshot does not see its rows as they are now; a new one will.",
    )


def leave_snapshot(connection: Connection) -> None:
    """End the transaction of :func:`use_snapshot`, and with it the locks on the tables read."""
    _execute(connection, "COMMIT", "end a transaction")


def check_not_rewritten(connection: Connection, schema: str, name: str) -> None:
    """Check, after a table was read under an imported snapshot, that it was the snapshot's table.

    VACUUM FULL and CLUSTER move rows between block ranges that are read one by one. After TRUNCATE, an ALTER TABLE that
    rewrites, or the creation of another table with the same name, the snapshot sees no rows: neither the copy nor the
    slot would send them. After a column was renamed, another one may have been read by its name.

    The read has locked the table until the end of the transaction, so the answer stays true. The snapshot's holder must
    not lock tables itself. A task would queue behind a session that waits for that lock, and the holder waits for the
    task: a deadlock that no server can see.

    :raises PublisherUnavailable: it was not; another snapshot helps.
    """
    doing = f'check whether table "{schema}.{name}" was rewritten'
    with translating(connection, doing, table=(schema, name)):
        row = connection.execute(_REWRITTEN.encode(), {"schema": schema, "name": name}).fetchone()
    if row != (False,):
        raise _rewritten(schema, name)


def _execute(connection: Connection, query: str, doing: str) -> psycopg.Cursor[TupleRow]:
    with translating(connection, doing):
        return connection.execute(query.encode())
