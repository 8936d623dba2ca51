"""Sends statements in order, each as the owner of the table that it names, after verifying the name.

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
    """A pipeline whose session switches to the role of each statement.

    :ivar role: its present role, None for the session's own.
    :ivar names: table names verified in this transaction.
    """

    def __init__(self, connection: psycopg.Connection) -> None:
        super().__init__(connection)
        self.role: str | None = None
        self._becoming: dict[str | None, Statement] = {}
        self.names = VerifiedNames(self)

    def begin(self) -> None:
        """Begin a target transaction, with the session's own role and no verified names."""
        self.role = None
        self.names.begin()

    def become(self, role: str | None, tag: object = None) -> None:
        """Switch to a role if it is not the present one."""
        # guard: changes are made as the owner of each table, always
        if role == self.role:
            return
        statement = self._becoming.get(role)
        if statement is None:
            statement = self._becoming[role] = Statement(session_role.set_role(role), (), ())
        self.send(statement, (), (), tag)
        self.role = role

    def enter(self, relation: RelationMap, tag: object) -> None:
        """Switch to the role for a relation and verify its name."""
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
        """Copy rows into a relation after all earlier statements have run; leave the pipeline.

        :param stream: all columns of the remote relation.
        :raises StatementFailed: the COPY or an earlier statement failed.
        """
        self.enter(relation, tag)
        self.sync()
        statement = statements.copy_in(relation.target, [c.name for c in relation.columns], binary=binary)
        try:
            copy_from.run(self._connection, statement, stream)
        except psycopg.Error as error:
            raise StatementFailed(tag, error, None) from None
