"""The reason why changes are executed row by row after all."""

from __future__ import annotations

from pgsub.target.catalog.relation_map import RelationMap


class SetFallback(Exception):
    """Changes cannot be executed together: row by row it shows which row is to blame.

    :ivar relation: of the changes.
    """

    def __init__(self, relation: RelationMap, reason: str) -> None:
        super().__init__(f"{relation.target.schema}.{relation.target.name}: {reason}")
        self.relation = relation
