"""Compacts row messages of one relation into their net effect on each key: a change set.

NOTES: These rules make a change set give the same rows as its messages one by one. Messages that break a rule are
executed row by row, with the rule as the reason.

* Keys are equal if and only if their bytes are. :mod:`~pgsub.apply.sets.keys` admits only such types and collations.
* No change changes a key, and no trigger, rule or enforced foreign key sees an intermediate state.
* The changes of a key form a sequence: only an INSERT follows a DELETE, and any other INSERT is the first change.
* The first change of a key is its precondition: the key must be absent (INSERT) or exist (UPDATE, DELETE). Row counts
  on the target check it; a deviation rolls back.
* A row that was deleted and inserted again is replaced, not updated: columns that only the target has start anew.
* An unchanged TOAST value is the newest value sent since the row began; without one, the column is not set.

``tests/models/change_set_model.py`` shows the mistake that each rule prevents.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pgsub.apply.sets.change_set import ChangeSet, Updates
from pgsub.apply.sets.keys import Keys
from pgsub.apply.sets.message_arrays import MessageArrays, rows_at, taken
from pgsub.protocol import columnar, columnar_copy
from pgsub.protocol.columnar import PAD, Changes, Flags, Offsets, Rows
from pgsub.protocol.reader import BINARY, TEXT, UNCHANGED
from pgsub.target.catalog.relation_map import RelationMap
from pgsub.target.sql.statements import unassigned

#: Maximum number of different sets of unset columns (unchanged TOAST) in the updates; each set needs a statement.
MASKS = 16

_INSERT, _UPDATE, _DELETE = b"IUD"


def compact(relation: RelationMap, groups: Sequence[Changes]) -> ChangeSet | str:
    """Compact row messages of one relation.

    :param relation: must pass :func:`~pgsub.apply.sets.eligibility.reason`, unless all messages are INSERTs.
    :param groups: the decoded messages; ``positions`` give their order.
    :return: the change set, or why the messages must be executed one by one.
    """
    if not relation.columns:
        return "it has no columns"
    if any(len(rows.kinds) != len(relation.columns) for g in groups for rows in (g.old, g.new) if rows is not None):
        return "a row has a different number of columns than its relation"
    if all(group.kind == "I" for group in groups):
        return _inserted(relation, groups)
    messages = MessageArrays(relation, groups)
    if not messages.keeps_keys():
        return "an update changes a key"
    keys = Keys(messages.buffer, messages.keys)
    if keys.reason is not None:
        return keys.reason
    return _Compaction(relation, messages, keys).result()


def _inserted(relation: RelationMap, groups: Sequence[Changes]) -> ChangeSet | str:
    if len(groups) != 1:
        return "its inserts came in several groups"
    (group,) = groups
    assert group.new is not None
    if columnar_copy.formats(group.new) == "mixed":
        return _MIXED
    count = len(group.positions)
    return ChangeSet(relation, group.buffer, count, count, inserts=group)


_MIXED = "values come in text and in binary form"


class _Compaction:
    """Messages sorted by key, then by arrival; indexes named ``at`` or ``first`` refer to this order."""

    def __init__(self, relation: RelationMap, messages: MessageArrays, keys: Keys) -> None:
        self._relation = relation
        self._messages = messages
        self._new = messages.new
        self._keys = keys
        self._order, self._same = keys.grouped(messages.positions)
        self._operations = messages.operations[self._order]
        begins = np.concatenate([[True], ~self._same])
        self._first: Offsets = np.flatnonzero(begins)
        self._last: Offsets = np.append(self._first[1:], len(self._order)) - 1
        #: the message at which the row of each message begins: the key's first message, or the newest insert
        at = np.arange(len(self._order))
        self._row: Offsets = np.maximum.accumulate(np.where(begins | (self._operations == _INSERT), at, 0))

    def result(self) -> ChangeSet | str:
        if self._keys.collided:
            return "two keys have one hash"
        first, last = self._operations[self._first], self._operations[self._last]
        deletes = self._operations == _DELETE
        if (self._same & ((self._operations[1:] == _INSERT) != deletes[:-1])).any():
            return "the changes of a key do not follow from each other"
        died: Flags = np.logical_or.reduceat(deletes, self._first)
        new = first == _INSERT
        inserts = self._inserts((last != _DELETE) & (new | died))
        if isinstance(inserts, str):
            return inserts
        updates = self._updates((first == _UPDATE) & ~died)
        if isinstance(updates, str):
            return updates
        absent, deleted = self._found(new & (last == _DELETE)), self._found(~new & died)
        if absent is not None or deleted is not None or updates:
            reason = _unfit(self._relation, self._relation.lookup, self._messages.keys)
            if reason is not None:
                return reason
        return ChangeSet(
            self._relation,
            self._messages.buffer,
            len(self._order),
            len(self._first),
            absent,
            deleted,
            updates,
            inserts,
        )

    def _found(self, chosen: Flags) -> Rows | None:
        """Return the keys of these effects."""
        if not chosen.any():
            return None
        return rows_at(self._messages.keys, self._order[self._first[self._by_locality(np.flatnonzero(chosen))]])

    def _by_locality(self, effects: Offsets) -> Offsets:
        """Sort by key if that order is already known, else by arrival."""
        if self._keys.ordered:
            return effects
        return effects[np.argsort(self._messages.positions[self._order[self._first[effects]]], kind="stable")]

    def _sources(self, column: int, at: Offsets) -> Offsets:
        """Find the message with a row's newest value of a column; if none has one, a message that has it unchanged.

        :param at: each row's last message.
        """
        kinds = self._new.kinds[column]
        if not (kinds == UNCHANGED).any():
            return self._order[at]
        sent = np.zeros(len(self._order), np.bool_)
        has_row = self._operations != _DELETE
        sent[has_row] = kinds[self._order[has_row]] != UNCHANGED
        newest = np.maximum.accumulate(np.where(sent, np.arange(len(sent)), -1))[at]
        return self._order[np.where(newest >= self._row[at], newest, at)]

    def _updates(self, chosen: Flags) -> tuple[Updates, ...] | str:
        if not chosen.any():
            return ()
        relation = self._relation
        if not set(relation.always) <= set(relation.lookup):
            return "an update may change a GENERATED ALWAYS identity column"
        if unassigned(relation.target) is None:
            return "an update has nothing to set"
        settable = [i for i in range(len(relation.columns)) if i not in relation.lookup]
        effects = self._by_locality(np.flatnonzero(chosen))
        found = rows_at(self._messages.keys, self._order[self._first[effects]])
        rows = self._merged(self._last[effects])
        reason = _unfit(relation, settable, taken(rows, settable))
        if reason is not None:
            return reason
        masks, group = _masks(rows.kinds[settable] == UNCHANGED)
        if len(masks) > MASKS:
            return f"its updates leave more than {MASKS} different sets of columns alone"
        made = []
        for number, mask in enumerate(masks):
            some = np.flatnonzero(group == number)
            columns = tuple(i for i, alone in zip(settable, mask.tolist(), strict=True) if not alone)
            made.append(Updates(columns, rows_at(found, some), rows_at(rows, some)))
        return tuple(made)

    def _merged(self, at: Offsets) -> Rows:
        """Merge rows from their newest values.

        :param at: each row's last message.
        """
        new = self._new
        if not (new.kinds == UNCHANGED).any():
            return rows_at(new, self._order[at])
        sources = [self._sources(column, at) for column in range(len(new.kinds))]
        parts = [
            [array[column][source] for column, source in enumerate(sources)]
            for array in (new.kinds, new.offsets, new.lengths)
        ]
        return Rows(*map(np.stack, parts))

    def _inserts(self, chosen: Flags) -> Changes | str | None:
        if not chosen.any():
            return None
        at = self._last[chosen]
        at = at[np.argsort(self._messages.positions[self._order[self._row[at]]], kind="stable")]
        rows = self._merged(at)
        if columnar_copy.formats(rows) == "mixed":
            return _MIXED
        source = self._order[at]
        # a message's row begins with N and the number of columns, and ends with the message
        has_value = (self._new.kinds[0][source] == TEXT) | (self._new.kinds[0][source] == BINARY)
        starts = self._new.offsets[0][source] - np.where(has_value, 5, 1) - 3
        ends = self._messages.ends[source]
        whole = ((self._new.offsets[:, source] == rows.offsets) & (self._new.kinds[:, source] == rows.kinds)).all()
        if not whole:
            return self._assembled(rows)
        buffer, places = columnar_copy.gathered(self._messages.buffer, starts, ends - starts)
        moved = Rows(rows.kinds, rows.offsets + (places[:-1] - starts), rows.lengths)
        relid = self._relation.remote.relid
        return Changes("I", "", relid, buffer + PAD, places[:-1], places[1:], np.arange(len(at)), None, moved)

    def _assembled(self, rows: Rows) -> Changes:
        """Build messages for rows whose values are from several messages."""
        buffer = self._messages.buffer
        head = b"I" + self._relation.remote.relid.to_bytes(4) + b"N" + len(rows.kinds).to_bytes(2)
        payloads = []
        for kinds, offsets, lengths in zip(
            rows.kinds.T.tolist(), rows.offsets.T.tolist(), rows.lengths.T.tolist(), strict=True
        ):
            parts = [head]
            for kind, offset, length in zip(kinds, offsets, lengths, strict=True):
                begin = offset - (5 if kind in (TEXT, BINARY) else 1)
                parts.append(buffer[begin : offset + length])
            payloads.append(b"".join(parts))
        ((group,), _) = columnar.decode(payloads, in_stream=False)
        return group


def _masks(alone: Flags) -> tuple[list[Flags], Offsets]:
    """Return the distinct columns of a table of flags, and the index of the one that each column equals."""
    if (alone == alone[:, :1]).all():
        return [alone[:, 0]], np.zeros(alone.shape[1], np.int64)
    packed = np.ascontiguousarray(np.packbits(alone, axis=0).T)
    _, where, group = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    return [alone[:, at] for at in where.tolist()], group.reshape(-1)


def _unfit(relation: RelationMap, columns: Sequence[int], rows: Rows) -> str | None:
    """Return why values of these columns cannot be passed as arrays.

    :param rows: one array row per column.
    """
    for kinds, position in zip(rows.kinds, columns, strict=True):
        column = relation.columns[position]
        text, binary = bool((kinds == TEXT).any()), bool((kinds == BINARY).any())
        if text and binary:
            return _MIXED
        if not column.fits:
            return f'the length of values of column "{column.name}" is only checked by its input function'
        if text and (not column.from_text or position in relation.read):
            return f'text cannot be cast to the type of column "{column.name}" as its input function reads it'
        if binary and not column.array_oid:
            return f'there are no arrays of the type of column "{column.name}"'
    return None
