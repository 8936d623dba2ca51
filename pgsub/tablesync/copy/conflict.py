"""The conflict that ended a plain copy. It is searched after the copy has failed, for the record of conflicts.

The server's copy_table (tablesync.c) only names the existing key, and a copy does not decode its rows. So the
publisher's row is searched by that key in the snapshot that was copied, and is applied alone, as apply would do it. The
search uses connections of its own, is limited in time, changes nothing, and may fail without harm.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psycopg
from psycopg import sql

from pgsub.apply import verified_publisher
from pgsub.apply.conflicts import conflict_record
from pgsub.apply.conflicts.conflict_record import ConflictRecord
from pgsub.common import quoting
from pgsub.common.connections.exported_snapshot import ExportedSnapshot
from pgsub.common.errors import ApplyError
from pgsub.common.query import roll_back
from pgsub.common.subscription import Subscription
from pgsub.publisher.snapshot import hold_table, use_snapshot
from pgsub.tablesync.copy import row_by_row
from pgsub.tablesync.copy.row_by_row import CopiedTable
from pgsub.target.catalog import unique_indexes
from pgsub.target.catalog.relation import FIRST_NORMAL
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session import connect as target
from pgsub.target.session import ledger_guard
from pgsub.target.session.connect import SessionName
from pgsub.target.sql import conflict_search

_log = logging.getLogger(__name__)

#: Maximum number of ways in which the values of a key are read. A comma in a value makes them ambiguous.
_READINGS = 20
#: Maximum number of the publisher's rows that are tried if a part of the key is an expression.
_CANDIDATES = 20


def record(
    error: psycopg.Error, sub: Subscription, claim: Claim, snapshot: ExportedSnapshot, table: CopiedTable
) -> ConflictRecord | None:
    """Find the conflict that ended a copy.

    :param snapshot: the slot's snapshot, whose holder still lives.
    :return: None if it is no conflict in the server's sense. The rows are missing if they cannot be found.
    """
    if error.sqlstate != "23505":
        return None
    name = SessionName(sub.subid, f"copy:{claim.worker}", claim.epoch)
    try:
        with contextlib.closing(target.open_session(sub, name)) as session:
            ledger_guard.check(session)
            return _Search(sub, claim, table, session, error.diag).record(snapshot)
    except Exception as trouble:  # the copy's own error is reported in any case
        _log.debug("the conflict of the copy of %s is not recorded: %s", table.relation.name, trouble)
    return None


@dataclass(frozen=True, slots=True)
class _Search:
    sub: Subscription
    claim: Claim
    table: CopiedTable
    session: psycopg.Connection
    diag: psycopg.errors.Diagnostic

    def record(self, snapshot: ExportedSnapshot) -> ConflictRecord | None:
        """Record the conflict, with both rows if they are found."""
        diag = self.diag
        place = (diag.schema_name or "", diag.table_name or "")
        keys = unique_indexes.keys_of(self.session, self.table.oid, *place, diag.constraint_name or "")
        if keys is None:
            return None
        found = conflict_record.copy_conflict(self.table.relation, diag)
        try:
            for values in _readings(found.key, keys):
                for row in self._publishers(snapshot, keys, values):
                    if (whole := self._tried(row)) is not None:
                        return whole
        except Exception as trouble:  # the key alone is reported then
            _log.debug("the conflicting rows of %s.%s are not found: %s", *place, trouble)
        return found

    def _publishers(self, snapshot: ExportedSnapshot, keys: Sequence[str], values: Sequence[str]) -> list[bytes]:
        """Read the rows that may have this key, as COPY sends them. The search uses those parts that are columns.

        The table's owner on the target wrote the expressions of the index, so they are not run on the publisher. A
        value of a user-defined type is not read there, because that may run code of its owner: the check of a domain.
        """
        # guard: no value is read on the publisher as a type of its users, without " if column.type_oid < FIRST_NORMAL"
        built_in = [column.name for column in self.table.relation.columns if column.type_oid < FIRST_NORMAL]
        names = {name: sql.Identifier(name) for name in built_in}
        columns = {**names, **{quoting.name(text): one for text, one in names.items()}}
        parts = [
            sql.SQL("{} IS NULL").format(columns[key])
            if value == "null"
            else sql.SQL("{} = {}").format(columns[key], sql.Literal(value))
            for key, value in zip(keys, values, strict=True)
            if key in columns
        ]
        if not parts:
            return []
        query = sql.SQL("COPY (SELECT * FROM ({}) AS {} WHERE {} LIMIT {}) TO STDOUT").format(
            sql.SQL(self.table.selection),
            sql.Identifier(self.table.relation.name),
            sql.SQL(" AND ").join(parts),
            sql.Literal(1 if len(parts) == len(keys) else _CANDIDATES),
        )
        with contextlib.closing(verified_publisher.connect(self.session, self.sub)) as source:
            use_snapshot(source, snapshot)
            hold_table(source, self.table.relation.relid, *self.table.name)
            source.execute(sql.SQL("SET LOCAL statement_timeout = {}").format(sql.Literal(conflict_search.TIMEOUT)))
            try:
                with source.cursor() as cursor, cursor.copy(query) as copy:
                    return [bytes(row) for row in copy]
            except (psycopg.errors.DataError, psycopg.errors.SyntaxErrorOrAccessRuleViolation):
                return []  # the value is invalid or the column is missing there: another reading may be right

    def _tried(self, row: bytes) -> ConflictRecord | None:
        """Find the row's conflict by applying it alone."""
        writer = row_by_row.Writer(self.session, self.sub, self.claim, tagged=False)
        try:
            self.session.execute("BEGIN")
            limits = sql.SQL("SET LOCAL statement_timeout = {0}; SET LOCAL lock_timeout = {0}")
            self.session.execute(limits.format(sql.Literal(conflict_search.TIMEOUT)))
            for _ in row_by_row.store(writer, self.table, [row]):
                pass
        except ApplyError as error:
            found: ConflictRecord | None = error.record
            indexes = (found.index_name or "").split(", ") if found is not None else []
            return found if self.diag.constraint_name in indexes else None
        finally:
            roll_back(self.session)
        return None


def _readings(key: str, names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Read the values in ``(a, b)=(1, 2)``. If some contain commas, yield all ways to divide them."""
    before = f"({', '.join(names)})=("
    if not (key.startswith(before) and key.endswith(")")):
        return
    parts = key[len(before) : -1].split(", ")
    for cuts in itertools.islice(itertools.combinations(range(1, len(parts)), len(names) - 1), _READINGS):
        bounds = (0, *cuts, len(parts))
        yield [", ".join(parts[start:stop]) for start, stop in itertools.pairwise(bounds)]
