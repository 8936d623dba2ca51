"""Which changes of a target transaction are taken, and which table they go to. Mirrors should_apply_changes_for_rel and
logicalrep_rel_open (worker.c, relation.c).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from pgsub.apply.conflicts import conflict
from pgsub.apply.conflicts.conflict import Place
from pgsub.apply.rows.change_block import ChangeBlock
from pgsub.apply.rows.relation_map import NEVER, RelationCache, local_name
from pgsub.apply.rows.writer import RowWriter
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common.errors import ApplyError, PgsubError, SchemaFault
from pgsub.protocol.messages import Relation
from pgsub.target.catalog.mapping import RelationMap
from pgsub.target.sql import statements

#: Decides whether a change is taken, by the remote relation, the oid of the target's table of that name, and the
#: finish LSN: the oid of the subscribed table, or None to leave it.
Filter = Callable[[Relation, int, int], int | None]
#: Stands for the oid of a table that the target lacks: only a held one need not be there.
LACKING = -1


class Kept(int):
    """What a filter says of a held table: its changes are to be kept, not made."""


class ChangeFilter:
    """Of one executor; what was decided holds until the target transaction ends.

    :param rows: the session's writer, between whose statements the catalogs are asked.
    :param subid: names the origin in contexts.
    """

    def __init__(self, rows: RowWriter, relations: RelationCache, subid: int) -> None:
        self._rows = rows
        self._relations = relations
        self._subid = subid
        self.begin()

    def begin(self) -> None:
        """A target transaction was opened."""
        self._touched: dict[tuple[str, str], int] = {}
        self._replaced: list[tuple[str, str]] = []
        self._admitted: dict[int, RelationMap] = {}
        self._kept: dict[int, Kept] = {}

    def forget(self, relid: int | None = None) -> None:
        """A relation was described anew, or with None perhaps any."""
        if relid is None:
            self._admitted.clear()
            self._kept.clear()
        else:
            self._admitted.pop(relid, None)
            self._kept.pop(relid, None)

    def look_for_replaced(self) -> None:
        """Statements find tables by name. What they found is locked now, so its oid tells whether it is still ours.

        Of tables whose changes were left too: another one that is subscribed may have got the name meanwhile.
        """
        for name, oid in self._touched.items():

            def on_count(count: int, name: tuple[str, str] = name) -> None:
                if count == 0:
                    self._replaced.append(name)

            values = (str(oid).encode(), name[0].encode(), name[1].encode())
            self._rows.command(statements.NAME_UNCHANGED, values, on_count)

    def refuse_replaced(self) -> None:
        """Once that was run.

        :raises SchemaFault: a table was replaced by another.
        """
        for schema, name in self._replaced:
            raise SchemaFault(
                f'logical replication target relation "{schema}.{name}" was replaced by another table',
                detail=f"The changes were meant for OID {self._touched[schema, name]}.",
            )

    def target(
        self, transaction: RemoteTransaction, message_type: str, relid: int, admits: Filter
    ) -> RelationMap | None:
        """Where a change goes; None: it is left out.

        :raises PgsubError: located.
        """
        admitted = self._admitted.get(relid)
        if admitted is not None:  # once it is, whatever ends later is: states are fixed for this transaction
            return admitted
        taken = self._taken(transaction, message_type, relid, admits)
        if taken is None or isinstance(taken, Kept):
            return None
        relation = self._relations.known(relid)
        if relation is None:
            with self._asking(transaction, message_type, self._relations.remote(relid)):
                relation = self._relations.make(relid, taken)
        self._admitted[relid] = relation
        return relation

    def _taken(self, transaction: RemoteTransaction, message_type: str, relid: int, admits: Filter) -> int | None:
        relations, remote = self._relations, self._relations.remote(relid)
        oid = relations.oid(relid)
        if oid is None:
            with self._asking(transaction, message_type, remote):
                try:
                    oid = relations.find(relid)
                except SchemaFault:
                    taken = admits(remote, LACKING, transaction.decision_lsn)
                    if isinstance(taken, Kept):
                        return taken
                    raise
        taken = admits(remote, oid, transaction.decision_lsn)
        if oid != NEVER:
            self._touched[local_name(remote)] = oid
        return taken

    def kept(self, transaction: RemoteTransaction, message_type: str, relid: int, admits: Filter) -> int | None:
        """The held table that a change is kept for; None: it is made, or left out.

        :raises PgsubError: located.
        """
        known = self._kept.get(relid)
        if known is None and relid not in self._admitted:
            taken = self._taken(transaction, message_type, relid, admits)
            if isinstance(taken, Kept):
                known = self._kept[relid] = taken
        return known

    def keeps(self, block: ChangeBlock, admits: Filter) -> list[int]:
        """Remote relations of a block of which changes are kept: from one of its transactions on, to its last."""
        last, found = block.transaction_of(len(block) - 1), []
        for relid in block.relids():
            with contextlib.suppress(PgsubError):  # who makes the change is told, and of which transaction it is
                if isinstance(self._taken(last, "COMMIT", relid, admits), Kept):
                    found.append(relid)
        return found

    @contextlib.contextmanager
    def _asking(self, transaction: RemoteTransaction, message_type: str, remote: Relation) -> Iterator[None]:
        """The catalogs are read on the same session, between its statements; faults get their place."""
        self._rows.sync()
        try:
            yield
        except PgsubError as error:
            conflict.locate(error, self._subid, Place(transaction, message_type))
            if isinstance(error, ApplyError):
                error.relation = ".".join(local_name(remote))
            raise

    def target_of_all(self, block: ChangeBlock, relid: int, admits: Filter) -> RelationMap | None:
        """Where all changes of a relation in a block go; None: they are left out.

        :raises KeyError: some are taken and some are not.
        """
        relation = self.target(block.transaction_of(0), "COMMIT", relid, admits)
        if relation is None:
            remote, oid = self._relations.remote(relid), self._relations.oid(relid)
            last = block.transaction_of(len(block) - 1)
            # not by target(): it would hold for those before the last, too
            if oid is not None and admits(remote, oid, last.decision_lsn) is not None:
                raise KeyError(relid)
        return relation


class Targets(Mapping[int, "RelationMap | None"]):
    """Targets of a block's relations, looked up as they are asked for; those that take a part only are not in it."""

    def __init__(self, admission: ChangeFilter, block: ChangeBlock, admits: Filter) -> None:
        self._admission, self._block, self._admits = admission, block, admits
        self._known: dict[int, RelationMap | None] = {}

    def __getitem__(self, relid: int) -> RelationMap | None:
        if relid not in self._known:
            self._known[relid] = self._admission.target_of_all(self._block, relid, self._admits)
        return self._known[relid]

    def __iter__(self) -> Iterator[int]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)
