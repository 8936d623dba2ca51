"""The fallback from change sets to rows: the exception that asks for it, and the relations that stay with rows."""

from __future__ import annotations

import time

from pgsub.target.catalog.relation_map import RelationMap

#: Seconds for which a relation is changed row by row after one of its sets deviated. So if rows are missing now and
#: then, the rest of the batch is not rolled back and replayed each time.
AVOID_SECONDS = 30.0


class SetFallback(Exception):
    """A request to execute changes row by row, which shows the faulty one.

    :ivar relation: the changed relation.
    """

    def __init__(self, relation: RelationMap, reason: str) -> None:
        super().__init__(f"{relation.target.schema}.{relation.target.name}: {reason}")
        self.relation = relation


class RowByRow:
    """The relations that sets do not change for a while."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}  #: by target oid

    def add(self, relation: RelationMap) -> None:
        """Change a relation row by row from now on."""
        self._until[relation.target.oid] = time.monotonic() + AVOID_SECONDS

    def __contains__(self, relation: RelationMap) -> bool:
        return self._until.get(relation.target.oid, 0.0) > time.monotonic()
