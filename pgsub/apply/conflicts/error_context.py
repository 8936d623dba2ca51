"""The change being applied, and the context that errors get from it. Mirrors apply_error_callback (worker.c)."""

from __future__ import annotations

from typing import NamedTuple

from pgsub.apply.conflicts import conflict_record, conflict_text
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common.errors import ApplyError, Directive, PgsubError
from pgsub.common.server_words import is_unreachable
from pgsub.protocol.lsn import format_lsn
from pgsub.protocol.messages import Tuple
from pgsub.protocol.reader import BINARY, UNCHANGED
from pgsub.target.catalog.relation_map import RelationMap
from pgsub.target.sql import row_queries
from pgsub.target.sql.statement_builder import Statement


class Place(NamedTuple):
    """A change and its transaction: the tag of a statement in the pipeline."""

    transaction: RemoteTransaction
    message_type: str  #: INSERT, UPDATE, DELETE, TRUNCATE, COMMIT, PREPARE, COMMIT PREPARED, ROLLBACK PREPARED
    relation: RelationMap | None = None
    new: Tuple | None = None
    old: Tuple | None = None

    @property
    def mapped(self) -> RelationMap:
        """The relation; the change must have one."""
        assert self.relation is not None
        return self.relation

    @property
    def row(self) -> Tuple:
        """The new row of an INSERT or UPDATE."""
        assert self.new is not None
        return self.new

    @property
    def searched(self) -> Tuple:
        """The row that finds the target's row."""
        searched = self.old or self.new
        assert searched is not None
        return searched

    @property
    def name(self) -> str:
        """schema.table of the target, for messages."""
        return f"{self.relation.target.schema}.{self.relation.target.name}" if self.relation else ""

    def resulting_row(self) -> Statement:
        """Build the query for the row that would result from an INSERT or UPDATE."""
        old_kinds = None if self.old is None else self.old.kinds
        return row_queries.resulting_row(self.mapped, self.row.kinds, old_kinds, inserts=self.inserts)

    @property
    def inserts(self) -> bool:
        """Whether it is an INSERT."""
        return self.message_type == "INSERT"

    def rule(self, what: str) -> str | None:
        """Return the resolution of a conflict of this change (missing or origin_differs); None: the server's."""
        return self.mapped.rule(f"{self.message_type.lower()}_{what}")

    def parameters(self, statement: Statement) -> tuple[list[bytes | None], list[int]]:
        """Return the values and formats of a statement's parameters."""
        values: list[bytes | None] = []
        formats: list[int] = []
        for source, position in statement.takes:
            row = self.new if source == "n" or self.old is None else self.old
            assert row is not None
            values.append(row.values[position])
            formats.append(row.kinds[position] == BINARY)
        return values, formats

    def columns(self, *, sent: bool) -> list[str]:
        """Return the columns of the new row that the publisher sent, or those that it left out as unchanged."""
        kinds = self.row.kinds
        return [c.name for i, c in enumerate(self.mapped.columns) if (kinds[i] != UNCHANGED) == sent]


def context(subid: int, place: Place, column: str | None = None) -> str:
    """Format the context line of the server's apply_error_callback.

    :param column: the faulty column of the publisher.
    """
    transaction = place.transaction
    if not transaction.xid:
        return conflict_record.copy_context(place.name)
    text = f'processing remote data for replication origin "pgsub_{subid}" during message type "{place.message_type}"'
    version = 0
    if place.relation is not None:
        version = place.relation.target.server_version
        text += f' for replication target relation "{place.name}"'
        if column is not None:
            text += f' column "{column}"'
    return f"{text} in transaction {transaction.xid}, finished at {conflict_text.lsn(transaction.finish_lsn, version)}"


def locate(error: PgsubError, subid: int, place: Place) -> None:
    """Add relation, transaction and finish LSN to an error.

    If a server is unreachable, no transaction caused the error.
    """
    error.context = context(subid, place, error.column if isinstance(error, ApplyError) else None)
    if isinstance(error, ApplyError) and error.record is not None:
        error.record.context = error.context
    if error.directive is Directive.RETRY and is_unreachable(error.sqlstate):
        return
    error.relation = place.name or error.relation
    if place.transaction.xid:  # a copied row has no transaction
        error.finish_lsn = format_lsn(place.transaction.finish_lsn)
        error.xid = place.transaction.xid
