"""The tables of a target transaction whose names were verified, with those of their types: statements may name them.

Mirrors logicalrep_rel_open (relation.c), which opens and locks a relation by oid before anything is done with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from pgsub.common import table_lock
from pgsub.target.catalog.relation import TargetRelation
from pgsub.target.sql.pipeline import Pipeline
from pgsub.target.sql.statement_builder import Statement

_OID, _TEXT = 26, 25
#: Fails where a name is no more that of the table that it was, so that nothing behind it is run.
VERIFY = Statement.fixed(table_lock.VERIFY)
VERIFY_TYPES = Statement.fixed(table_lock.VERIFY_TYPES)
_Known = tuple[int, str, str, str | None]


def may_lock(table: TargetRelation, role: str | None) -> bool:
    """Return whether a role may lock the table.

    :param role: None for the user of the session.
    """
    if role is None:
        return table.user_locks
    return role == table.owner and table.owner_locks  # of another role nobody has asked


class VerifiedNames:
    """The names that one session has verified in its open transaction.

    :param pipeline: of the session; what verifies a name goes with the statements that use it, in one round trip.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._verified: set[_Known] = set()
        self._statements: dict[tuple[_Known, str], tuple[Statement, tuple[bytes, bytes]]] = {}

    def known(self) -> frozenset[_Known]:
        """Return what is verified, for :meth:`forget`."""
        return frozenset(self._verified)

    def forget(self, kept: Iterable[_Known] = ()) -> None:
        """Forget all of them but some: the locks are gone, with the transaction or back to a savepoint."""
        self._verified = set(kept)

    def verified(self, table: TargetRelation) -> bool:
        """Return whether statements may name the table."""
        return (table.oid, table.schema, table.name, table.named_types) in self._verified

    def verify(self, table: TargetRelation, tag: object, *, locks: bool, purpose: str = table_lock.WRITING) -> None:
        """Send what locks a table and verifies its name, and the names of its types, unless that was done.

        :param tag: of what the table is needed for.
        :param locks: whether the role may lock it; if not, the name is verified only.
        :param purpose: WRITING or EMPTYING of :mod:`pgsub.common.table_lock`.
        """
        known = table.oid, table.schema, table.name, table.named_types
        if known in self._verified:
            return
        lock, values = self._statements.get((known, purpose)) or self._compose(known, purpose)
        # guard: a table is locked and its name verified before a statement names it
        self._send(lock if locks else None, values, tag)
        if table.named_types is not None:
            # guard: the names of types and operators are verified before anything is planned with them
            self._pipeline.send(VERIFY_TYPES, (table.named_types.encode(),), (0,), tag)
        self._verified.add(known)

    def _compose(self, known: _Known, purpose: str) -> tuple[Statement, tuple[bytes, bytes]]:
        oid, schema, name, _ = known
        lock = Statement(table_lock.lock(schema, name, purpose), (), ())
        made = lock, (table_lock.name_as_sql(schema, name).encode(), str(oid).encode())
        self._statements[known, purpose] = made
        return made

    def _send(self, lock: Statement | None, values: tuple[bytes, bytes], tag: object) -> None:
        if lock is not None:
            self._pipeline.send(lock, (), (), tag)
        self._pipeline.send(VERIFY, values, (0, 0), tag)
