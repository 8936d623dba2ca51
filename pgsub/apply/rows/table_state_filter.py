"""Decides by table state which changes of a transaction are applied, and to which table.

Mirrors should_apply_changes_for_rel and logicalrep_rel_open (worker.c, relation.c).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pgsub.apply.conflicts.error_context import Place, locate
from pgsub.apply.rows.change_block import ChangeBlock
from pgsub.apply.rows.relation_cache import NEVER, local_name
from pgsub.apply.rows.writer import RowWriter
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common import table_lock
from pgsub.common.errors import PgsubError, SchemaFault
from pgsub.protocol.messages import Relation
from pgsub.target.catalog.relation_map import RelationMap
from pgsub.target.sql import row_queries


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision to take a relation's changes.

    :ivar oid: oid of the subscribed table.
    :ivar held: the table is held: its changes are kept, not applied.
    """

    oid: int
    held: bool = False


#: Decides about a remote relation's changes. It is given the oid of the target table of that name (None if there is
#: none) and the finish LSN. None means that the changes are not applied.
Filter = Callable[[Relation, int | None, int], Decision | None]


class TableStateFilter:
    """The filter of one executor. Its decisions hold until the target transaction ends.

    :param rows: the session's writer; the catalogs are queried between its statements.
    """

    def __init__(self, rows: RowWriter) -> None:
        self._rows = rows
        self._relations = rows.relations
        self.begin(lambda *_: None)

    def begin(self, should_apply: Filter) -> None:
        """Begin a target transaction."""
        self._should_apply = should_apply
        self._touched: dict[tuple[str, str], int] = {}
        self._replaced: list[tuple[str, str]] = []
        self._altered: list[tuple[str, str]] = []
        self._targets: dict[int, RelationMap] = {}
        self._held: dict[int, int] = {}

    def forget(self, relid: int | None = None) -> None:
        """Forget the decisions about a relation that has a new description; None for all relations."""
        for known in (self._targets, self._held):
            if relid is None:
                known.clear()
            else:
                known.pop(relid, None)

    def check_tables(self) -> None:
        """Send checks that every table still is what the statements were made for.

        The changes have locked their tables, so what is found now was so when the statements ran. A table may have been
        altered while its first statement waited for the lock. Statements find tables by name. The names of tables whose
        changes were not applied are checked too, because a subscribed table may have taken the name.
        """
        used = self._rows.used()
        for oid, schema, name, definition in used:

            def if_none(count: int, table: tuple[str, str] = (schema, name)) -> None:
                if count == 0:
                    self._altered.append(table)

            values = tuple(one.encode() for one in (str(oid), schema, name, definition))
            self._rows.command(row_queries.DEFINITION_UNCHANGED, values, if_none)
        checked = {one[:3] for one in used}
        for touched, oid in self._touched.items():
            if (oid, *touched) not in checked:
                self._check_name(touched, oid)

    def _check_name(self, name: tuple[str, str], oid: int) -> None:
        def on_count(count: int) -> None:
            if count == 0:
                self._replaced.append(name)

        values = (str(oid).encode(), name[0].encode(), name[1].encode())
        self._rows.command(row_queries.NAME_UNCHANGED, values, on_count)

    def refuse_others(self) -> None:
        """Refuse the transaction if the checks have failed.

        :raises TableAltered: statements were made from another definition of a table.
        :raises SchemaFault: another table has replaced one.
        """
        # guard: a table that is altered before apply has locked it is not changed by its old definition
        for schema, name in self._altered:
            raise table_lock.altered(schema, name)
        for schema, name in self._replaced:
            raise SchemaFault(
                f'logical replication target relation "{schema}.{name}" was replaced by another table',
                detail=f"The changes were meant for OID {self._touched[schema, name]}.",
            )

    def target(self, transaction: RemoteTransaction, message_type: str, relid: int) -> RelationMap | None:
        """Return the table for a change; None if it is not applied."""
        known = self._targets.get(relid)
        if known is not None:  # if one is applied, later ones are too: states are fixed in this target transaction
            return known
        decision = self._decide(transaction, message_type, relid)
        if decision is None or decision.held:
            return None
        relation = self._relations.known(relid)
        if relation is None:
            with self._asking(transaction, message_type, self._relations.remote(relid)):
                relation = self._relations.make(relid, decision.oid)
        self._targets[relid] = relation
        return relation

    def _decide(self, transaction: RemoteTransaction, message_type: str, relid: int) -> Decision | None:
        relations, remote = self._relations, self._relations.remote(relid)
        oid = relations.oid(relid)
        if oid is None:
            with self._asking(transaction, message_type, remote):
                try:
                    oid = relations.find(relid)
                except SchemaFault:  # only a held table may be missing
                    decision = self._should_apply(remote, None, transaction.decision_lsn)
                    if decision is None or not decision.held:
                        raise
                    return decision
        if oid != NEVER:
            self._touched[local_name(remote)] = oid
        return self._should_apply(remote, oid, transaction.decision_lsn)

    def held_table(self, transaction: RemoteTransaction, message_type: str, relid: int) -> int | None:
        """Return the held table for which a change is kept; None if it is applied or left out."""
        known = self._held.get(relid)
        if known is None and relid not in self._targets:
            decision = self._decide(transaction, message_type, relid)
            if decision is not None and decision.held:
                known = self._held[relid] = decision.oid
        return known

    def held_relations(self, block: ChangeBlock) -> list[int]:
        """Return the block's remote relations whose changes are kept, at least in its last transaction."""
        last, found = block.transaction_of(len(block) - 1), []
        for relid in block.relids():
            with contextlib.suppress(PgsubError):  # raised again for the change itself, with its transaction
                decision = self._decide(last, "COMMIT", relid)
                if decision is not None and decision.held:
                    found.append(relid)
        return found

    @contextlib.contextmanager
    def _asking(self, transaction: RemoteTransaction, message_type: str, remote: Relation) -> Iterator[None]:
        """Leave the pipeline to query the catalogs in the same session, and locate the errors."""
        self._rows.sync()
        try:
            yield
        except PgsubError as error:
            locate(error, self._relations.subid, Place(transaction, message_type))
            error.relation = ".".join(local_name(remote))
            raise

    def target_of_all(self, block: ChangeBlock, relid: int) -> RelationMap | None:
        """Return the table for all changes of a relation in a block; None if they are not applied.

        :raises KeyError: only some of them are applied.
        """
        relation = self.target(block.transaction_of(0), "COMMIT", relid)
        if relation is None:
            remote, oid = self._relations.remote(relid), self._relations.oid(relid)
            last = block.transaction_of(len(block) - 1)
            # target() would decide for earlier transactions, too
            if oid is not None and self._should_apply(remote, oid, last.decision_lsn) is not None:
                raise KeyError(relid)
        return relation
