"""The filter by table state: which changes of a transaction are applied, and to which table.

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
from pgsub.common.errors import PgsubError, SchemaFault
from pgsub.protocol.messages import Relation
from pgsub.target.catalog.relation_map import RelationMap
from pgsub.target.sql import row_queries


@dataclass(frozen=True, slots=True)
class Decision:
    """A table takes a relation's changes.

    :ivar oid: of the subscribed table.
    :ivar held: the table is held: its changes are kept, not made.
    """

    oid: int
    held: bool = False


#: Decides about a remote relation's changes, by the oid of the target's table of that name (None: there is none) and
#: the finish LSN; None: they are left out.
Filter = Callable[[Relation, int | None, int], Decision | None]


class TableStateFilter:
    """The filter of one executor's changes. What it decided holds until the target transaction ends.

    :param rows: the session's writer, between whose statements the catalogs are asked.
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
        self._targets: dict[int, RelationMap] = {}
        self._held: dict[int, int] = {}

    def forget(self, relid: int | None = None) -> None:
        """Forget what was decided about a relation that was described anew; with None about all."""
        for known in (self._targets, self._held):
            if relid is None:
                known.clear()
            else:
                known.pop(relid, None)

    def check_names(self) -> None:
        """Look whether every name still means the same table: statements find tables by name.

        They have locked the tables, so the oids are final. Tables whose changes were left out count too: a subscribed
        one may have got the name meanwhile.
        """
        for name, oid in self._touched.items():

            def on_count(count: int, name: tuple[str, str] = name) -> None:
                if count == 0:
                    self._replaced.append(name)

            values = (str(oid).encode(), name[0].encode(), name[1].encode())
            self._rows.command(row_queries.NAME_UNCHANGED, values, on_count)

    def refuse_replaced(self) -> None:
        """Refuse the transaction, once that was run.

        :raises SchemaFault: a table was replaced by another.
        """
        for schema, name in self._replaced:
            raise SchemaFault(
                f'logical replication target relation "{schema}.{name}" was replaced by another table',
                detail=f"The changes were meant for OID {self._touched[schema, name]}.",
            )

    def target(self, transaction: RemoteTransaction, message_type: str, relid: int) -> RelationMap | None:
        """Return the table that a change goes to; None: it is left out."""
        known = self._targets.get(relid)
        if known is not None:  # once it is, whatever ends later is: states are fixed for this transaction
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
                except SchemaFault:  # only a held table need not be there
                    decision = self._should_apply(remote, None, transaction.decision_lsn)
                    if decision is None or not decision.held:
                        raise
                    return decision
        if oid != NEVER:
            self._touched[local_name(remote)] = oid
        return self._should_apply(remote, oid, transaction.decision_lsn)

    def held_table(self, transaction: RemoteTransaction, message_type: str, relid: int) -> int | None:
        """Return the held table that a change is kept for; None: it is made, or left out."""
        known = self._held.get(relid)
        if known is None and relid not in self._targets:
            decision = self._decide(transaction, message_type, relid)
            if decision is not None and decision.held:
                known = self._held[relid] = decision.oid
        return known

    def held_relations(self, block: ChangeBlock) -> list[int]:
        """Return the block's remote relations whose changes are kept, from one of its transactions on to its last."""
        last, found = block.transaction_of(len(block) - 1), []
        for relid in block.relids():
            with contextlib.suppress(PgsubError):  # raised again for the change itself, with its transaction
                decision = self._decide(last, "COMMIT", relid)
                if decision is not None and decision.held:
                    found.append(relid)
        return found

    @contextlib.contextmanager
    def _asking(self, transaction: RemoteTransaction, message_type: str, remote: Relation) -> Iterator[None]:
        """Let the catalogs be read on the same session, between its statements; faults get their place."""
        self._rows.sync()
        try:
            yield
        except PgsubError as error:
            locate(error, self._relations.subid, Place(transaction, message_type))
            error.relation = ".".join(local_name(remote))
            raise

    def target_of_all(self, block: ChangeBlock, relid: int) -> RelationMap | None:
        """Return the table that all changes of a relation in a block go to; None: they are left out.

        :raises KeyError: some are applied and some are not.
        """
        relation = self.target(block.transaction_of(0), "COMMIT", relid)
        if relation is None:
            remote, oid = self._relations.remote(relid), self._relations.oid(relid)
            last = block.transaction_of(len(block) - 1)
            # not by target(): it would hold for those before the last, too
            if oid is not None and self._should_apply(remote, oid, last.decision_lsn) is not None:
                raise KeyError(relid)
        return relation
