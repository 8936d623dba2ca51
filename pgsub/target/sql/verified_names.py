"""The tables whose names, and names of types, were verified in a target transaction. Statements may name them.

Mirrors logicalrep_rel_open (relation.c), which opens and locks a relation by OID before anything else.
"""

from __future__ import annotations

from collections.abc import Iterable

from pgsub.common import table_lock
from pgsub.target.catalog.relation import TargetRelation
from pgsub.target.sql.pipeline import Pipeline
from pgsub.target.sql.statement_builder import Statement

_OID, _TEXT = 26, 25
#: Fails if another table has the name now, so that no statement behind it runs.
VERIFY = Statement.fixed(table_lock.VERIFY)
VERIFY_TYPES = Statement.fixed(table_lock.VERIFY_TYPES)
_Known = tuple[int, str, str, str | None]
Used = tuple[int, str, str, str]  #: OID, schema, name and definition of a table


def may_lock(table: TargetRelation, role: str | None) -> bool:
    """Return whether a role may lock the table.

    :param role: None: the session's user.
    """
    if role is None:
        return table.user_locks
    return role == table.owner and table.owner_locks  # the privileges of other roles are unknown


class VerifiedNames:
    """The names that one session has verified in its open transaction.

    :param pipeline: the session's pipeline. A name is verified in the same round trip as the statements that use it.
    :ivar used: the definitions from which statements were made, even if these were undone.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._verified: set[_Known] = set()
        self.used: dict[Used, None] = {}
        self._statements: dict[tuple[_Known, str], tuple[Statement, tuple[bytes, bytes]]] = {}

    def begin(self) -> None:
        """Begin a target transaction."""
        self.forget()
        self.used = {}

    def known(self) -> frozenset[_Known]:
        """Return the verified names, for :meth:`forget`."""
        return frozenset(self._verified)

    def forget(self, kept: Iterable[_Known] = ()) -> None:
        """Forget all names but some: the transaction or a rollback to a savepoint has released the locks."""
        self._verified = set(kept)

    def verified(self, table: TargetRelation) -> bool:
        """Return whether statements may name the table."""
        return (table.oid, table.schema, table.name, table.named_types) in self._verified

    def verify(self, table: TargetRelation, tag: object, *, locks: bool, purpose: str = table_lock.WRITING) -> None:
        """Send the statements that lock a table and verify its name and the names of its types, unless that was done.

        :param tag: tag of the change that needs the table.
        :param locks: whether the role may lock it; if not, only the name is verified.
        :param purpose: WRITING or EMPTYING of :mod:`pgsub.common.table_lock`.
        """
        known = table.oid, table.schema, table.name, table.named_types
        if table.definition is not None:
            self.used[table.oid, table.schema, table.name, table.definition] = None
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
