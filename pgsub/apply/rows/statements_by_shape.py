"""Builds the statement for the change of a single row once for each shape of rows, and keeps it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pgsub.apply.conflicts.error_context import Place, locate
from pgsub.apply.rows.relation_cache import RelationCache
from pgsub.common.errors import PgsubError, ProtocolViolation
from pgsub.protocol.messages import Tuple
from pgsub.protocol.reader import BINARY, UNCHANGED
from pgsub.target.catalog.relation_map import RelationMap, check_updatable
from pgsub.target.catalog.table_names import partitions_at_once, partitions_locked_here
from pgsub.target.sql import row_queries, statements
from pgsub.target.sql.partitions import Level, unrouted
from pgsub.target.sql.statement_builder import Statement

#: Maximum number of cached statements. A row that is found by all of its columns has one for each set of NULLs.
STATEMENTS = 5000

#: Tuple kinds that need different statements: to set a column, whether it was sent; to find a row, whether it is NULL.
_SETS = bytes.maketrans(b"ntb", b"vvv")
_FINDS = bytes.maketrans(b"nutb", b"nnvv")


class RowStatements:
    """The statements of one target session.

    All methods raise ProtocolViolation if a row has a different number of columns than its relation, and a located
    PgsubError if the target cannot be changed this way.

    :param relations: caches the statements, and forgets those of a relation that changes.
    """

    def __init__(self, relations: RelationCache) -> None:
        self._relations = relations

    def insert(self, place: Place) -> Statement:
        """Build an INSERT of ``place.new``."""
        relation, new = place.mapped, place.row
        _check_width(place)
        return self._known(place, b"I" + _reads(relation, new), b"", lambda: statements.insert(relation, new.kinds))

    def update(self, place: Place, *, leaves: bool = False) -> Statement:
        """Build an UPDATE of the row that is found by ``place.old`` or the key of ``place.new``.

        :param leaves: the row leaves its partition.
        """
        if leaves:
            return self._updating(place, b"R", statements.reroute)
        _check_width(place)
        if _moves(place.mapped, place.row, place.old):
            return self._updating(place, b"M", statements.replace_identity)
        return self._updating(place, b"U", statements.update)

    def leaves(self, place: Place, *, again: bool = False) -> Statement:
        """Build a check whether an updated row leaves its partition; may query the target outside the pipeline.

        :param again: the row's partition was not known, but is locked now.
        """
        _check_width(place)

        def build(relation: RelationMap, kinds: bytes, old_kinds: bytes | None) -> Statement:
            # the statement is forgotten after any DDL
            connection, root = self._relations.connection, relation.target.oid
            parts = partitions_at_once(connection, root) or partitions_locked_here(connection, root)
            return row_queries.leaves_partition(relation, kinds, old_kinds, parts)

        return self._updating(place, b"P", build, again=again)

    def _updating(
        self,
        place: Place,
        kind: bytes,
        build: Callable[[RelationMap, bytes, bytes | None], Statement],
        *,
        again: bool = False,
    ) -> Statement:
        relation, new, old = place.mapped, place.row, place.old
        return self._known(
            place,
            kind + new.kinds.translate(_SETS) + _reads(relation, new),
            (b"n" if old is None else b"o") + _finds(relation, old or new),
            lambda: _checked(relation, build(relation, new.kinds, None if old is None else old.kinds)),
            again=again,
        )

    def delete(self, place: Place) -> Statement:
        """Build a DELETE of the row that is found by ``place.old``."""
        relation, old = place.mapped, place.searched
        _check_width(place)
        return self._known(
            place, b"D", _finds(relation, old), lambda: _checked(relation, statements.delete(relation, old.kinds))
        )

    def present(self, place: Place) -> Statement:
        """Build a query that only finds the row to be changed."""
        relation, searched, old = place.mapped, place.searched, place.old is not None
        return self._known(
            place,
            b"po" if old else b"pn",
            _finds(relation, searched),
            lambda: _checked(relation, row_queries.present(relation, searched.kinds, old)),
        )

    def untouched(self, place: Place) -> Statement:
        """Build a query for the row to be deleted that the transaction has neither written nor locked."""
        relation, old = place.mapped, place.searched
        return self._known(
            place, b"u", _finds(relation, old), lambda: _checked(relation, row_queries.untouched(relation, old.kinds))
        )

    def written_elsewhere(self, place: Place, *, lock: bool) -> Statement:
        """Build a query for the other origin that wrote the row to be changed, if any.

        :param lock: lock the row, not more than the change does.
        """
        relation, searched, old = place.mapped, place.searched, place.old is not None
        strength = ("UPDATE" if place.message_type == "DELETE" else "NO KEY UPDATE") if lock else ""
        return self._known(
            place,
            b"W" + strength[:1].encode() + (b"o" if old else b"n"),
            _finds(relation, searched),
            lambda: _checked(relation, row_queries.origin_differs(relation, searched.kinds, old, lock=strength)),
        )

    def unrouted(self, place: Place, below: Sequence[Level], version: int) -> Statement:
        """Build a query for the partitioned table that has no partition for ``place.new``.

        :param below: the partitions, as :func:`~pgsub.target.sql.partitions.levels` returns them now.
        :param version: their hash. DDL on partitions may go unnoticed for a while, so it is part of the shape.
        """
        relation, row = place.mapped, place.row
        return self._known(
            place,
            b"L%d" % version,
            row.kinds.translate(_SETS) + _reads(relation, row),
            lambda: unrouted(relation, row.kinds, below),
        )

    def _known(
        self, place: Place, shape: bytes, old_shape: bytes, build: Callable[[], Statement], *, again: bool = False
    ) -> Statement:
        remembered, key = self._relations.statements, (place.mapped.remote.relid, shape, old_shape)
        known = remembered.get(key)
        if known is None or again:
            if len(remembered) >= STATEMENTS:
                remembered.clear()
            try:
                known = remembered[key] = build()
            except PgsubError as error:
                locate(error, self._relations.subid, place)
                raise
        return known


def _checked(relation: RelationMap, statement: Statement) -> Statement:
    check_updatable(relation)
    return statement


def _moves(relation: RelationMap, new: Tuple, old: Tuple | None) -> bool:
    """Return whether a GENERATED ALWAYS identity column may change, which an UPDATE cannot do."""
    for i in relation.always:
        if new.kinds[i] == UNCHANGED or (old is None and relation.by_identity and i in relation.lookup):
            continue
        if old is None or (old.kinds[i], old.values[i]) != (new.kinds[i], new.values[i]):
            return True
    return False


def _finds(relation: RelationMap, row: Tuple) -> bytes:
    return bytes([row.kinds[i] for i in relation.lookup]).translate(_FINDS) + _reads(relation, row)


def _reads(relation: RelationMap, row: Tuple) -> bytes:
    """Return whether values are in binary form, for the columns where that makes another statement."""
    return bytes([row.kinds[i] == BINARY for i in sorted(relation.read)])


def _check_width(place: Place) -> None:
    relation = place.mapped
    for row in (place.new, place.old):
        if row is not None and len(row.kinds) != len(relation.columns):
            raise ProtocolViolation(
                f"row of remote relation ID {relation.remote.relid} has {len(row.kinds)} columns,"
                f" but its relation message had {len(relation.columns)}"
            )
