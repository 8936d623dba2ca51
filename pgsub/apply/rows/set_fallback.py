"""The exception that makes changes run row by row."""

from __future__ import annotations

from pgsub.target.catalog.relation_map import RelationMap


class SetFallback(Exception):
    """A request to execute changes row by row, which shows the faulty one.

    :ivar relation: the changed relation.
    """

    def __init__(self, relation: RelationMap, reason: str) -> None:
        super().__init__(f"{relation.target.schema}.{relation.target.name}: {reason}")
        self.relation = relation
