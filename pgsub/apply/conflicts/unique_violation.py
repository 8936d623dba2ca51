"""Adds the conflicting rows to the report of a unique violation that stopped apply.

Mirrors CheckAndReportConflict (execReplication.c) and ReportApplyConflict (conflict.c). A failed statement names only
one index. A search of the target finds the others. It is bounded, changes nothing, and may fail without harm.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import psycopg

from pgsub.apply.conflicts import conflict, conflict_record
from pgsub.apply.conflicts.conflict import UniqueFailure
from pgsub.apply.conflicts.conflict_record import ConflictRecord
from pgsub.common import table_lock
from pgsub.common.errors import ApplyError, PermissionMissing
from pgsub.common.query import leave_transaction
from pgsub.common.subscription import Subscription
from pgsub.target.catalog.relation import TargetRelation
from pgsub.target.session import roles
from pgsub.target.sql.conflict_search import ConflictingRow, Search, TableSearch, bounded, member

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def complete_errors(connection: psycopg.Connection, sub: Subscription) -> Iterator[None]:
    """Complete a unique violation or missing privilege that ends the body.

    :param connection: the session of the error.
    """
    try:
        yield
    except ApplyError as error:
        if isinstance(error.unique_failure, UniqueFailure):
            leave_transaction(connection)
            complete_report(connection, error)
            error.hint = conflict.hint("Change or remove the row on the target", sub.name)
        raise
    except PermissionMissing as error:
        denied, error.denied = error.denied, None
        if denied is not None:
            leave_transaction(connection)
            with contextlib.suppress(psycopg.Error):
                _raise_what_it_lacks(connection, sub, error, *denied)
        raise


def _raise_what_it_lacks(
    connection: psycopg.Connection, sub: Subscription, error: PermissionMissing, target: TargetRelation, change: str
) -> None:
    """Raise the server's error if it would have refused before checking the table's privileges."""
    try:
        roles.check_own(connection, target, sub, change)
    except PermissionMissing as refusal:
        refusal.context, refusal.relation = error.context, error.relation
        refusal.finish_lsn, refusal.xid = error.finish_lsn, error.xid
        raise refusal from None


def complete_report(connection: psycopg.Connection, error: ApplyError) -> None:
    """Complete a unique violation.

    :param connection: the session of the error, outside a transaction or in one that is left unchanged.
    """
    failure, error.unique_failure = error.unique_failure, None
    if not isinstance(failure, UniqueFailure):
        return
    try:
        with connection.transaction(force_rollback=True):  # settings for the search are rolled back
            found = _search(connection, error.record, failure)
        _complete(error, failure, found)
    except Exception as trouble:  # the conflict must be reported in any case
        _log.debug("the rows in the way of %s are not reported: %s", error.relation, trouble)


def _search(connection: psycopg.Connection, record: ConflictRecord, failure: UniqueFailure) -> Search | None:
    place, change = failure.place, failure.place.resulting_row()
    table = member(connection, place.mapped.target, (record.schemaname, record.relname))
    if table is None:
        return None
    with bounded(connection, place.mapped.target.acts_as):
        reading, types = table_lock.READING, table.named_types  # types of the table that it is a partition of
        table_lock.hold(connection, table.oid, table.schema, table.name, reading, named_types=types)
        search = TableSearch(connection, table)
        return search.search(change, *place.parameters(change), sent=place.columns(sent=True), inserts=place.inserts)


def _complete(error: ApplyError, failure: UniqueFailure, found: Search | None) -> None:
    """Put the search result into the error and its record."""
    record: ConflictRecord = error.record
    if found is not None and record.index_name not in found.indexes:
        error.conflict, error.record, error.message, error.detail = None, None, failure.message, failure.detail
        error.args = (error.message,)
        return
    rows = [ConflictingRow(record.index_name or "", failure.key)]  # the statement's own report is always valid
    if found is not None:
        # hits in earlier indexes were not there when the statement failed: the transaction had removed them
        later = found.indexes[found.indexes.index(record.index_name or "") :]
        seen = [hit for hit in found.hits if hit.index in later]
        rows = seen if record.index_name in {hit.index for hit in seen} else [*rows, *seen]
    if len(rows) > 1:
        record.conflict_type = "multiple_unique_conflicts"
    elif found is not None and found.moved:
        record.conflict_type = "insert_exists"  # an update that moves a row to another partition inserts it there
    conflict.add_rows_in_the_way(record, failure.place, rows, found)
    record.message = conflict_record.message(record.schemaname, record.relname, record.conflict_type)
    error.conflict, error.message, error.detail = record.conflict_type, record.message, record.detail
    error.args = (record.message,)
