"""Row messages of one relation as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pgsub.apply.sets.keys import Keys
from pgsub.protocol.columnar import Bytes, Changes, Offsets, Rows
from pgsub.target.catalog.relation_map import RelationMap


class MessageArrays:
    """Arrays of the row messages of all groups, those with a new row first."""

    def __init__(self, relation: RelationMap, groups: Sequence[Changes]) -> None:
        self.lookup = list(relation.lookup)
        self.groups = sorted(groups, key=lambda group: group.new is None)
        self.buffer = self.groups[0].buffer
        self.positions: Offsets = np.concatenate([group.positions for group in self.groups])
        self.ends: Offsets = np.concatenate([group.ends for group in self.groups])
        self.operations: Bytes = np.repeat(
            np.frombuffer("".join(g.kind for g in self.groups).encode(), np.uint8),
            [len(group.positions) for group in self.groups],
        )
        self.new = _joined([group.new for group in self.groups if group.new is not None], len(relation.columns))
        self.keys = _joined([taken(_finding(group), self.lookup) for group in self.groups], len(self.lookup))

    def keeps_keys(self) -> bool:
        """Return whether every update with an old row has the same key bytes in the new one."""
        for group in self.groups:
            if group.old is None or group.new is None:
                continue
            old, new = taken(group.old, self.lookup), taken(group.new, self.lookup)
            if (old.kinds != new.kinds).any() or not Keys(group.buffer, old).same_as(new):
                return False
        return True


def _joined(rows: Sequence[Rows], columns: int) -> Rows:
    if not rows:
        shape = (columns, 0)
        return Rows(np.empty(shape, np.uint8), np.empty(shape, np.int64), np.empty(shape, np.int32))
    if len(rows) == 1:
        return rows[0]
    return Rows(
        np.concatenate([one.kinds for one in rows], axis=1),
        np.concatenate([one.offsets for one in rows], axis=1),
        np.concatenate([one.lengths for one in rows], axis=1),
    )


def _finding(group: Changes) -> Rows:
    """Return the rows that identify the changed rows."""
    rows = group.new if group.old is None else group.old
    assert rows is not None
    return rows


def taken(rows: Rows, columns: Sequence[int]) -> Rows:
    chosen = list(columns)
    return Rows(rows.kinds[chosen], rows.offsets[chosen], rows.lengths[chosen])


def rows_at(rows: Rows, messages: Offsets) -> Rows:
    return Rows(
        rows.kinds.take(messages, axis=1), rows.offsets.take(messages, axis=1), rows.lengths.take(messages, axis=1)
    )
