"""The repair of rows: the target's rows get the publisher's state of a point, while apply waits at that point.

NOTES
Both versions of each row are read again: the publisher's in the snapshot of the point, the target's under the lock of
apply's row. The transaction takes this lock together with the barrier. So the target has exactly what the point covers,
and nothing newer can be overwritten. Apply goes on when the transaction ends, however it ends. Rows are changed as
apply changes them (:class:`~pgsub.apply.execute.executor.Executor`), with the subscription's origin. Replaced rows are
kept in pgsub.skipped_change, marked as replayed, so that they explain no difference and can be pruned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from pgsub.apply.execute.executor import Executor
from pgsub.apply.rows.worker_sessions import TargetSession, changing_rows
from pgsub.apply.skip.replay import ReplayFilter, make_changes
from pgsub.apply.skip.skipped_reader import SkippedReader
from pgsub.apply.stream.transactions import Kind
from pgsub.common import failpoints, table_lock
from pgsub.common.errors import StateForbids, log_text
from pgsub.common.plural import counted
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.protocol.lsn import format_lsn
from pgsub.reconcile import expressions, replaced
from pgsub.reconcile.expressions import ComparedTable
from pgsub.reconcile.point_attempt import Standing
from pgsub.reconcile.reading.side import Side, same_texts
from pgsub.reconcile.reading.source import Source
from pgsub.target.ledger import events
from pgsub.target.ledger.maintenance import barrier
from pgsub.target.ledger.skipped_changes import SkippedChange, SkippedTransaction
from pgsub.target.ledger.tables import held_tables
from pgsub.target.sql import resync_truncate

Key = tuple[str | None, ...]
Row = dict[str, str | None]

#: Maximum number of rows that are repaired in one pause of apply.
AT_ONCE = 500
_LOCK_TIMEOUT = "3s"
#: Deletions are first, because another row may need their value of a unique column.
_ORDER = ("DELETE", "UPDATE", "INSERT")


@dataclass(frozen=True, slots=True)
class RepairedRows:
    """The number of rows that one transaction has inserted, updated and deleted."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0

    def __add__(self, other: RepairedRows) -> RepairedRows:
        return RepairedRows(self.inserted + other.inserted, self.updated + other.updated, self.deleted + other.deleted)

    @property
    def total(self) -> int:
        """The number of all rows."""
        return self.inserted + self.updated + self.deleted


def unfit(table: ComparedTable) -> str | None:
    """Return why rows of a table cannot be repaired individually; None if they can."""
    if not table.keyed:
        return "it has no key by which a row is known"
    if table.loose:
        return "its key may have several texts for one value"
    types = {column.name: column.type_oid for column in table.remote.columns}
    # a cast to the type may be a function of its owner, which would run with the rights of pgsub's session
    if any(types[table.columns[n].name] >= expressions.FIRST_NORMAL for n in table.key):
        return "its key has a user-defined type on the publisher"
    return None


@dataclass(frozen=True, slots=True)
class Repair:
    """Rows of one table to repair at a point.

    :ivar sources: the table on both servers, as in the comparison.
    :ivar keys: canonical texts of their keys, at most :data:`AT_ONCE`.
    :ivar extra: keys that the comparison, which reads whole tables, has found only on the target.
    """

    sub: Subscription
    table: ComparedTable
    sources: tuple[Source, Source]
    keys: Sequence[Key]
    extra: frozenset[Key]

    def run(self, standing: Standing, publisher: Side) -> RepairedRows | None:
        """Repair the rows and let apply go on.

        :param publisher: sees the snapshot of the point.
        :return: None if apply had gone on by itself; nothing was changed.
        :raises ApplyError: a row cannot be written; nothing was changed.
        :raises StateForbids: the table must not be changed.
        """
        with contextlib.closing(publisher.connect()) as connection:
            with publisher.seeing(connection, "read rows", named=self.sources[0].named()):
                connection.execute("SET LOCAL enable_seqscan = off")  # use the key's index, even of a small table
                connection.execute("SET LOCAL statement_timeout = '10s'")  # apply does not wait for longer
                there = self._rows(connection, self.sources[0], of_publisher=True)
            # rows that a TRUNCATE removed from the snapshot were not deleted
            publisher.check_not_rewritten(connection, self.sources[0], self.table.name)
        failpoints.point("repair.standing")
        with changing_rows(self.sub, "repair", "repair rows on the target") as session:
            session.connection.execute("BEGIN")
            # guard: rows are repaired only while apply is stopped at the point
            if not barrier.take(session.connection, self.sub.subid, standing.barrier, standing.lsn):
                return None
            failpoints.point("repair.taken")
            return self._bring(session, standing.lsn, there)

    def _rows(
        self,
        connection: psycopg.Connection,
        source: Source,
        *,
        of_publisher: bool,
    ) -> dict[Key, Row]:
        """Read rows by their keys, with the texts of their own server."""
        table = self.table
        names = [column.name for column in table.columns]
        values = expressions.publisher_values(table) if of_publisher else expressions.target_values(table)
        sought = [self._sought(n, f"a{at}", values[n].text, of_publisher) for at, n in enumerate(table.key)]
        wanted = sql.SQL("({}) IN (SELECT {} FROM ROWS FROM ({}) AS u ({}))").format(
            _joined(found for found, _ in sought),
            _joined(text for _, text in sought),
            _joined(
                sql.SQL("pg_catalog.unnest({}::pg_catalog.text[])").format(list(column))
                for column in zip(*self.keys, strict=True)
            ),
            _joined(sql.Identifier(f"a{at}") for at in range(len(sought))),
        )
        texts = [expressions.output(name) for name in names]
        query = sql.SQL("SELECT {} FROM {} WHERE {}").format(
            _joined([*(values[n].text for n in table.key), *texts]),
            source.relation,
            sql.SQL(" AND ").join([wanted, *source.conditions]),
        )
        size = len(table.key)
        rows = connection.execute(query).fetchall()
        return {tuple(row[:size]): dict(zip(names, row[size:], strict=True)) for row in rows}

    def _sought(
        self, number: int, text: str, canonical: sql.Composable, of_publisher: bool
    ) -> tuple[sql.Composable, sql.Composable]:
        """Compose both sides of the condition that finds a key again, for one of its columns.

        :param text: name of the column with the key's text, in the form of the target's type.
        :param canonical: expression for that text of a row.
        """
        column = self.table.columns[number]
        name, given = sql.Identifier(column.name), sql.SQL("u.{}").format(sql.Identifier(text))
        read: sql.Composable | None = sql.SQL(column.full_type)
        if of_publisher:
            remote = next(one for one in self.table.remote.columns if one.name == column.name)
            read = expressions.found_again(remote, column)
        # guard: a row that the target holds in another form is not mistaken for a deleted one
        if read is None:
            return sql.SQL('({}) COLLATE pg_catalog."C"').format(canonical), given
        return name, sql.SQL("{}::{}").format(given, read)

    def _bring(self, session: TargetSession, lsn: int, there: dict[Key, Row]) -> RepairedRows:
        connection, local = session.connection, self.table.target
        connection.execute(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'".encode())
        if local.oid in held_tables.held(connection, self.sub.subid):
            raise StateForbids(
                f'changes of table "{self.table.name}" are held',
                detail="Rows that are repaired now would be changed again when it is released.",
                hint=f"Release it first:\npgsub alter {word(self.sub.name)} --release {word(self.table.name)}",
            )
        table_lock.hold(connection, local.oid, local.schema, local.name, named_types=local.named_types)
        with same_texts(connection):
            here = self._rows(connection, self.sources[1], of_publisher=False)
        bodies = sorted(
            (body for key in self.keys if (body := self._change(key, there.get(key), here.get(key))) is not None),
            key=lambda body: _ORDER.index(body["operation"]),
        )
        if any(body["operation"] != "INSERT" for body in bodies):
            # guard: rows of a subscription created after the comparison are neither replaced nor deleted
            resync_truncate.check_writers(
                connection,
                self.sub.subid,
                resync_truncate.members(connection, [local.oid]),
                f"See which rows differ now:\npgsub verify {word(self.sub.name)} --rows",
            )
        self._write(session, lsn, bodies)
        done = [body["operation"] for body in bodies]
        found = RepairedRows(done.count("INSERT"), done.count("UPDATE"), done.count("DELETE"))
        self._record(session, lsn, bodies, found)
        failpoints.point("repair.before_commit")
        connection.execute("COMMIT")
        failpoints.point("repair.committed")
        return found

    def _change(self, key: Key, wanted: Row | None, present: Row | None) -> dict[str, Any] | None:
        """Make the change from one row to the other, in the form of pgsub.skipped_change; None if there is none.

        Apply deletes a row that the publisher has deleted since the comparison. If the row is still there, a corrupt
        index may hide the publisher's row, as after a change of the system's collations: the next comparison decides.
        """
        # guard: what an index does not find is not deleted, without " or (wanted is None and key not in self.extra)"
        if wanted == present or (wanted is None and key not in self.extra):
            return None
        identity = [self.table.columns[n].name for n in self.table.key]
        body: dict[str, Any] = {
            "operation": "INSERT" if present is None else "DELETE" if wanted is None else "UPDATE",
            "commit_ts": 0,
            "kind": Kind.COMMIT.value,
            "replica_identity": "d",
            "identity": identity,
        }
        if wanted is not None:
            body["new"] = wanted
        if present is not None:
            body["old"], body["old_kind"] = present, "K"
        return body

    def _write(self, session: TargetSession, lsn: int, bodies: Sequence[dict[str, Any]]) -> None:
        connection, local = session.connection, self.table.target
        names = (local.schema, local.name)
        reader = SkippedReader(connection, lsn, SkippedTransaction(0, [], {(*names, "UPDATE"): 0}, 0, None))
        rows = [SkippedChange(n, 0, *names, body) for n, body in enumerate(bodies, 1)]
        # a missing row was seen under the lock: a policy hides it from the role, or another session was faster
        executor = Executor(connection, session.relations, set_based=False)
        make_changes(session, executor, reader, rows, ReplayFilter(connection, self.sub.subid, lsn))

    def _record(self, session: TargetSession, lsn: int, bodies: Sequence[dict[str, Any]], found: RepairedRows) -> None:
        """Keep replaced rows and record the repair for the launcher, in the transaction that does it."""
        connection, subid = session.connection, self.sub.subid
        now = replaced.keep(connection, subid, self.table, lsn, bodies, "repairing")
        if found.total:
            text = (
                f'table "{self.table.name}" of subscription "{self.sub.name}" was repaired at {format_lsn(lsn)}:'
                f" {counted(found.inserted, 'row')} inserted, {found.updated} updated, {found.deleted} deleted"
            )
            events.add(connection, subid, events.log_entry("LOG", log_text(text)))
            if session.progress.tagged:
                session.progress.tag(lsn, now)


def _joined(parts: Iterable[sql.Composable]) -> sql.Composed:
    return sql.SQL(", ").join(parts)
