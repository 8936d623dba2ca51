"""Statements in order, each as the owner of the table that it names, whose name was verified before.

Mirrors SwitchToUntrustedUser (usercontext.c).
"""

from __future__ import annotations

import psycopg

from pgsub.apply.conflicts.error_context import Place
from pgsub.common.connections import session_role
from pgsub.protocol.columnar_copy import Stream
from pgsub.target.catalog.relation_map import RelationMap
from pgsub.target.sql import copy_from, statements
from pgsub.target.sql.pipeline import FirstRow, Pipeline, RowCount, StatementFailed
from pgsub.target.sql.statement_builder import Statement
from pgsub.target.sql.verified_names import VerifiedNames, may_lock


class OwnerPipeline(Pipeline):
    """A pipeline whose session acts as the role that each statement is to have.

    :ivar role: that it acts as, None: its own.
    :ivar names: of tables, as they were verified in this transaction.
    """

    def __init__(self, connection: psycopg.Connection) -> None:
        super().__init__(connection)
        self.role: str | None = None
        self._becoming: dict[str | None, Statement] = {}
        self.names = VerifiedNames(self)

    def begin(self) -> None:
        """Begin a target transaction: the session acts as its own role, and no name is verified."""
        self.role = None
        self.names.forget()

    def become(self, role: str | None, tag: object = None) -> None:
        """Send a change of role, where consecutive statements differ in it."""
        # guard: changes are made as the owner of each table, always
        if role == self.role:
            return
        statement = self._becoming.get(role)
        if statement is None:
            statement = self._becoming[role] = Statement(session_role.set_role(role), (), ())
        self.send(statement, (), (), tag)
        self.role = role

    def enter(self, relation: RelationMap, tag: object) -> None:
        """Send what comes before a statement about a relation."""
        target = relation.target
        self.become(target.acts_as, tag)
        self.names.verify(target, tag, locks=may_lock(target, target.acts_as))

    def send_row(
        self, statement: Statement, place: Place, on_count: RowCount | None, on_row: FirstRow | None = None
    ) -> None:
        """Send a statement of a single change."""
        self.enter(place.mapped, place)
        self.send(statement, *place.parameters(statement), place, on_count, on_row)

    def copy(self, relation: RelationMap, stream: Stream, tag: object, *, binary: bool) -> None:
        """Copy rows into a relation, after everything else was run; it is out of the pipeline then.

        :param stream: all columns of the remote relation.
        :raises StatementFailed: the COPY, or something before it.
        """
        self.enter(relation, tag)
        self.sync()
        statement = statements.copy_in(relation.target, [c.name for c in relation.columns], binary=binary)
        try:
            copy_from.run(self._connection, statement, stream)
        except psycopg.Error as error:
            raise StatementFailed(tag, error, None) from None
