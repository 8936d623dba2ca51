"""What ends the quick ways of applying changes: one by one it shows which row it is, and what is done about it."""

from __future__ import annotations

from pgsub.target.catalog.mapping import RelationMap


class SetFallback(Exception):
    """What was found on the target is not what changes presuppose: serial execution says which row and why.

    :ivar relation: of the changes.
    :ivar reason: what was found.
    """

    def __init__(self, relation: RelationMap, reason: str) -> None:
        super().__init__(f"{relation.target.schema}.{relation.target.name}: {reason}")
        self.relation = relation
        self.reason = reason
