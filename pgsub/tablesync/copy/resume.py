"""The resumption of an interrupted copy: its rows are compared at the new snapshot, and differences are repaired.

The server's copy_table (tablesync.c) is one transaction, of which nothing remains.

NOTES
The ledger knows the blocks that each chunk read and the xid of its rows. So each part is compared with the new slot's
snapshot (:mod:`pgsub.reconcile.copied_parts`). Rows that are no longer in the publisher's part are first removed from
all parts, by ctid and xid: they are the copy's own, and no other rows are touched. Then missing rows are copied, as new
chunks. This order is necessary because an UPDATE may have moved a row from one part to another. Parts with too many
differences are removed completely, and copied again with the blocks that are in no part.

Each transaction keeps the ledger true: a part has as many rows with its xids as recorded. If not, others have changed
them, and their changes are not discarded. So an attempt that was killed leaves nothing to undo.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psycopg
from psycopg import sql

from pgsub.common import failpoints
from pgsub.common.errors import ApplyError, TableRewritten, log_text
from pgsub.common.plural import counted
from pgsub.common.query import scalar
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.reconcile import copied_parts
from pgsub.reconcile.copied_parts import PartComparison, PartResult
from pgsub.reconcile.expressions import ComparedTable
from pgsub.tablesync.copy import cleanup, plan
from pgsub.tablesync.copy.adoption import Adopter
from pgsub.tablesync.copy.spilled_values import SpilledValues
from pgsub.target.ledger import events
from pgsub.target.ledger.tables import chunks
from pgsub.target.ledger.tables.chunks import Brought, ChunkKey, Part
from pgsub.target.session import roles, transactions
from pgsub.target.sql.statement_builder import table_name

_PATIENCE = "SET LOCAL lock_timeout = '10s'"
_LEAVES = """
SELECT pg_catalog.array_agg(ARRAY[t.oid::bigint, pg_catalog.pg_relation_filenode(t.oid)::bigint] ORDER BY t.oid)::text
  FROM (SELECT %(oid)s::oid AS oid UNION SELECT relid FROM pg_catalog.pg_partition_tree(%(oid)s::oid::regclass)) AS t
"""

#: Moves the result of a COPY from a publisher's table (OID, schema, name) to the target in the open transaction;
#: returns rows and bytes.
Move = Callable[[str, tuple[int, str, str]], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Resumption:
    """A table whose copy goes on.

    :ivar binary: its rows are copied in the binary format.
    """

    table: ComparedTable
    binary: bool


class Resumed:
    """The repair of a copy's existing rows.

    :param session: the writing session, outside of a transaction.
    :param alive: called for each transaction.
    """

    def __init__(
        self,
        session: psycopg.Connection,
        sub: Subscription,
        key: ChunkKey,
        resumption: Resumption,
        *,
        move: Move,
        alive: Callable[[], None],
    ) -> None:
        self._session, self._sub, self._key, self._move, self._alive = session, sub, key, move, alive
        self._resumption = resumption
        self._remote, self._target = resumption.table.remote, resumption.table.target
        self._leaves = {(leaf.schema, leaf.name): leaf for leaf in self._remote.leaves}
        done = [one for one in chunks.brought(session, key.claim) if one.part is not None]
        self._of_part: dict[copied_parts.Part, tuple[Part, list[Brought]]] = self._grouped(done)
        self._found = SpilledValues[PartResult]()
        self._anew: list[Brought] = []
        self._removed = self._brought = 0

    def _grouped(self, done: Sequence[Brought]) -> dict[copied_parts.Part, tuple[Part, list[Brought]]]:
        """Group chunks with those that were added to the same part later."""
        together: dict[Part, list[Brought]] = defaultdict(list)
        for one in done:
            assert one.part is not None
            together[one.part].append(one)
        return {self._compared(part, of_part): (part, of_part) for part, of_part in together.items()}

    def _compared(self, part: Part, done: Sequence[Brought]) -> copied_parts.Part:
        leaf = self._leaves.get((part.schema, part.name))
        return copied_parts.Part(
            None if leaf is None else (leaf.oid, leaf.schema, leaf.name),
            part.first,
            part.until,
            tuple(one.xid for one in done),
            sum(one.rows for one in done),
            sum(one.bytes for one in done),
        )

    def mend(self, adopter: Adopter) -> None:
        """Compare the existing rows, remove those that are gone, and copy those that are missing.

        :raises ApplyError: rows of the copy were changed locally.
        :raises PgsubError: a server failed.
        """
        files = self._files()
        with adopter.seeing() as comparison:
            self._compare(PartComparison(comparison, self._resumption.table, in_utf8=adopter.in_utf8))
        failpoints.point("resume.compared")
        for result in self._found:
            if result.surplus:
                self._remove(result, files)
        if self._anew:
            self._remove_whole()
        failpoints.point("resume.removed")
        for result in self._found:
            if result.missing:
                self._bring(result)

    def record(self) -> None:
        """Record the result in the open transaction."""
        name = f"{self._target.schema}.{self._target.name}"
        text = (
            f'copy of table "{name}" of subscription "{self._sub.name}" continues where it was interrupted:'
            f" {counted(len(self._of_part) - len(self._found), 'part')} of {len(self._of_part)} as they were,"
            f" {counted(self._removed, 'row')} removed, {self._brought} added"
        )
        events.add(self._session, self._sub.subid, events.log_entry("LOG", log_text(text)))

    def _compare(self, comparison: PartComparison) -> None:
        comparison.read(list(self._of_part))
        found = {part: comparison.target_rows(part) for part in self._of_part}
        # guard: rows of an interrupted copy that others have changed are not discarded
        if any(part.rows != rows for part, rows in found.items()):
            raise self._changed(sum(part.rows for part in found), sum(found.values()))
        for result in comparison.differing():
            self._alive()
            self._found.add(result)
            if result.anew:
                self._anew += self._of_part[result.part][1]

    def _changed(self, brought: int, unchanged: int) -> ApplyError:
        name = f"{self._target.schema}.{self._target.name}"
        fault = ApplyError(
            f'could not continue the interrupted copy of "{name}"',
            detail=f"{brought} rows were copied, {unchanged} are unchanged; the others were changed or deleted locally"
            " meanwhile.",
            hint="Compare the table, so that only rows that differ are sent:\n"
            f"pgsub refresh {word(self._sub.name)} --resync {word(name)} --adopt",
        )
        fault.relation = name
        return fault

    # removing

    def _files(self) -> str:
        """Return the relfilenodes of the target's table and its partitions."""
        return str(scalar(self._session, _LEAVES, {"oid": self._target.oid}))

    def _remove(self, result: PartResult, files: str) -> None:
        """Remove exactly the rows that are no longer in the publisher's part."""
        xids: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for xid, table, ctid in result.surplus:
            xids[xid][table].append(ctid)
        keys = {one.xid: one.key for one in self._of_part[result.part][1]}
        self._alive()
        with transactions.durable(self._session):
            self._session.execute(_PATIENCE)
            for xid, tables in xids.items():
                for table, ctids in tables.items():
                    self._delete(xid, table, ctids)
                chunks.lessen(self._session, keys[xid], sum(map(len, tables.values())))
            # guard: row addresses are not used after the table was rewritten
            if self._files() != files:
                name = f"{self._target.schema}.{self._target.name}"
                raise TableRewritten(f'table "{name}" was truncated or rewritten on the target while it was compared')
            self._removed += len(result.surplus)
            failpoints.point("resume.before_commit")
        failpoints.point("resume.after_commit")

    def _delete(self, xid: int, table: int, ctids: Sequence[str]) -> None:
        query = sql.SQL(
            "DELETE FROM {} WHERE tableoid = {}::oid AND xmin::text = {} AND ctid = ANY ({}::pg_catalog.tid[])"
        ).format(table_name(self._target), table, str(xid), "{" + ",".join(f'"{ctid}"' for ctid in ctids) + "}")
        with roles.using(self._session, self._target):
            removed = self._session.execute(query).rowcount
        if removed != len(ctids):
            raise self._changed(len(ctids), removed)

    def _remove_whole(self) -> None:
        """Remove all rows of parts that are copied again."""
        expected = sum(one.rows for one in self._anew)
        self._alive()
        with transactions.durable(self._session):
            self._session.execute(_PATIENCE)
            rows = cleanup.delete_rows(self._session, self._target, [one.xid for one in self._anew])
            if rows != expected:
                raise self._changed(expected, rows)
            chunks.remove(self._session, [one.key for one in self._anew])
            self._removed += rows
            failpoints.point("resume.before_commit")
        failpoints.point("resume.after_commit")

    # copying

    def _bring(self, result: PartResult) -> None:
        """Copy missing rows as a new chunk."""
        part, _ = self._of_part[result.part]
        leaf = self._leaves[(part.schema, part.name)]
        copy_out = plan.copy_of_rows(self._remote, leaf, result.missing, binary=self._resumption.binary)
        self._alive()
        # no block that rolls back: after an error of a copy the session can only be closed
        self._session.execute(f"BEGIN; SET LOCAL synchronous_commit = on; {_PATIENCE}".encode())
        rows, size = self._move(copy_out, (leaf.oid, leaf.schema, leaf.name))
        chunks.supplement(self._session, self._key.claim, self._key.attempt, part, rows, size)
        self._brought += rows
        failpoints.point("resume.before_commit")
        self._session.execute("COMMIT")
        failpoints.point("resume.after_commit")
