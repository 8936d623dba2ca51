"""Rows that are missing because no partition takes them, as while their partition is detached.

The server routes the row of a change before it searches it (apply_handle_tuple_routing, worker.c), and fails.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from pgsub.apply.conflicts import conflict_text
from pgsub.apply.conflicts.conflict import hint
from pgsub.apply.conflicts.error_context import Place, locate
from pgsub.apply.rows.owner_pipeline import OwnerPipeline
from pgsub.apply.rows.relation_cache import RelationCache
from pgsub.apply.rows.statements_by_shape import RowStatements
from pgsub.common.errors import ApplyError
from pgsub.protocol.reader import UNCHANGED
from pgsub.target.sql.partitions import Level, all_levels, levels
from pgsub.target.sql.row_queries import read_texts


class UnroutedRows:
    """Rows of partitioned tables that the changes of one target session did not find."""

    def __init__(self, pipeline: OwnerPipeline, statements: RowStatements, relations: RelationCache) -> None:
        self._pipeline, self._statements, self._relations = pipeline, statements, relations
        self._places: list[Place] = []  #: since the last question

    def add(self, place: Place) -> None:
        """Add a row that a change did not find. With rules on the table, a change may have searched nothing."""
        target = place.mapped.target
        if target.relkind == "p" and not target.rules:
            self._places.append(_routed(place))

    def forget(self) -> None:
        """Forget the rows, because their changes were undone."""
        self._places = []

    def first(self) -> ApplyError | None:
        """Return the server's error for the first row that no partition takes, and forget the rows.

        A partition that somebody attaches from now on is not noticed.
        """
        places, self._places = self._places, []
        if not places:
            return None
        # their partitions are read each time: the lock that a change has keeps nobody from attaching one
        tables = {place.mapped.target.oid for place in places}
        found = self._ask(places, {oid: levels(self._relations.connection, oid) for oid in tables})
        if not found:
            return None
        every = {oid: all_levels(self._relations.connection, oid) for oid in tables}
        known = {oid: below for oid, below in every.items() if below is not None}
        # guard: a search that locks no partition does not show that none takes the row
        if len(known) == len(every):
            found = self._ask(places, known)
        return found[0] if found else None  # else it may be untrue, and the next attempt asks again

    def _ask(self, places: Sequence[Place], levels_of: Mapping[int, Sequence[Level]]) -> list[ApplyError]:
        found: list[ApplyError] = []
        for place in places:
            below = levels_of[place.mapped.target.oid]
            statement = self._statements.unrouted(place, below, hash(below))
            self._pipeline.send_row(statement, place, None, functools.partial(self._found, found, place, below))
        self._pipeline.become(None)
        self._pipeline.sync()
        return found

    def _found(self, found: list[ApplyError], place: Place, below: Sequence[Level], row: list[str | None]) -> None:
        if found:
            return
        level, key = below[int(row[0] or 0)], read_texts(row[1])
        quoted = {column.name: column.quoted or column.name for column in place.mapped.target.columns}
        shown = conflict_text.row(dict(zip(level.key, key, strict=True)))
        error = ApplyError(
            f'could not apply remote transaction to relation "{place.name}": no partition of relation "{level.name}"'
            " found for row",
            detail=f"Partition key of the failing row contains ({', '.join(quoted[n] for n in level.key)}) = {shown}.",
            hint=hint(
                "Attach the row's partition again, or create one for it or a DEFAULT partition",
                self._relations.subname,
            ),
            sqlstate="23514",
        )
        locate(error, self._relations.subid, place)
        found.append(error)


def _routed(place: Place) -> Place:
    """Return a change with the row that the server routes as its new one. What was not sent of it is unchanged."""
    row, lookup = place.searched, place.mapped.lookup
    whole = place.mapped.remote.replica_identity == "f"  # otherwise the old row may have no more than its key
    # guard: a whole old row leads to its partition, without " and not whole"
    if place.old is not None and not whole:
        row = row._replace(kinds=bytes(kind if i in lookup else UNCHANGED for i, kind in enumerate(row.kinds)))
    return place._replace(new=row, old=None)
