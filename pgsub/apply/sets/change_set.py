"""Change sets: what many row messages of one relation do to each row of its target, as a plain value.

Made by :mod:`pgsub.apply.sets.compaction`, executed by :mod:`pgsub.apply.sets.writer`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pgsub.protocol.columnar import Changes, Rows
from pgsub.target.catalog.relation_map import RelationMap


@dataclass(frozen=True, slots=True)
class Updates:
    """Rows that are found by their keys and get the same columns set."""

    columns: tuple[int, ...]  #: remote positions of the columns that are set
    keys: Rows  #: an array row for each lookup column
    rows: Rows  #: an array row for each remote column


@dataclass(frozen=True, slots=True)
class ChangeSet:
    """Effects on one relation, to be executed in this order: absent, deletes, updates, inserts.

    :ivar buffer: what the offsets of ``absent``, ``deletes`` and ``updates`` point into; ends in ``PAD``.
    :ivar changes: row messages it was made of.
    :ivar effects: rows it touches, those that only must be absent included.
    :ivar absent: keys that must not exist.
    :ivar deletes: keys that must exist and are deleted.
    :ivar updates: rows that must exist.
    :ivar inserts: rows to insert, in the order of arrival, as INSERT messages; after the deletes.
    """

    relation: RelationMap
    buffer: bytes
    changes: int
    effects: int
    absent: Rows | None = None
    deletes: Rows | None = None
    updates: tuple[Updates, ...] = ()
    inserts: Changes | None = None
