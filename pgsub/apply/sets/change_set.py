"""Change sets: the effects of many row messages on the rows of one target relation, as a plain value.

Made by :mod:`pgsub.apply.sets.compaction`, executed by :mod:`pgsub.apply.sets.writer`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pgsub.protocol.columnar import Changes, Rows
from pgsub.target.catalog.relation_map import RelationMap


@dataclass(frozen=True, slots=True)
class Updates:
    """Rows that are found by their keys and have the same columns set."""

    columns: tuple[int, ...]  #: remote positions of the columns that are set
    keys: Rows  #: one array row per lookup column
    rows: Rows  #: one array row per remote column


@dataclass(frozen=True, slots=True)
class ChangeSet:
    """The effects on one relation, executed in this order: absent, deletes, updates, inserts.

    :ivar buffer: buffer for the offsets in ``absent``, ``deletes`` and ``updates``; ends in ``PAD``.
    :ivar changes: number of row messages it was made of.
    :ivar effects: number of affected rows, including those that only must be absent.
    :ivar absent: keys that must not exist.
    :ivar deletes: keys that must exist and are deleted.
    :ivar updates: rows that must exist and are updated.
    :ivar inserts: rows to insert, as INSERT messages in the order of arrival.
    """

    relation: RelationMap
    buffer: bytes
    changes: int
    effects: int
    absent: Rows | None = None
    deletes: Rows | None = None
    updates: tuple[Updates, ...] = ()
    inserts: Changes | None = None
