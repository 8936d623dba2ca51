"""Finds dependencies between transactions by the keys of the rows that they change.

They save work but carry no promise. If a transaction is executed too early, row locks, unique indexes and row counts on
the target make the later one fail, as long as nothing else connects their effects. Where something else may connect
them, one session applies the batch in order: see :func:`reason`. Values freed in unique indexes other than the key are
not considered, because a DELETE does not send them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pgsub.apply.rows.change_block import ChangeBlock
from pgsub.apply.sets import eligibility
from pgsub.apply.sets.keys import hashes
from pgsub.apply.sets.message_arrays import taken
from pgsub.apply.stream.transaction_batch import Batch, TransactionRun
from pgsub.protocol import columnar
from pgsub.protocol.columnar import Changes, Offsets, Words
from pgsub.protocol.reader import BINARY, TEXT
from pgsub.target.catalog.relation_map import RelationMap


class Together(Exception):
    """A request to apply the transactions in order in one session; the message is the reason."""


class Dependencies:
    """The pairs of transactions of a batch that change the same row, each with the next one that does.

    :ivar changes: number of changes of each transaction.
    :ivar earlier: numbers of transactions; the one at the same index in ``later`` changes a row after it.
    """

    def __init__(self, changes: Offsets, earlier: Offsets, later: Offsets) -> None:
        self.changes, self.earlier, self.later = changes, earlier, later

    @classmethod
    def of(cls, batch: Batch, known: Callable[[int], RelationMap | None]) -> Dependencies:
        """Decode the changes of a batch and compare their keys.

        :param batch: plain transactions that have only row changes.
        :param known: returns the map of a remote relation, None if it has none yet.
        :raises Together: a change may depend on others in a way that its key does not show.
        """
        block, numbers = _gathered(batch)
        changes = np.bincount(numbers, minlength=len(batch)).astype(np.int64)
        groups, _ = columnar.decode(block.messages, in_stream=False)
        relations = {relid: _independent(known(relid)) for relid in {group.relid for group in groups}}
        if len({one.target.oid for one in relations.values()}) < len(relations):
            raise Together("two relations of the publisher are one of the target")
        codes, at = _codes(groups, relations)
        return cls(changes, *_pairs(codes, numbers[at]))


def _gathered(batch: Batch) -> tuple[ChangeBlock, Offsets]:
    """Return the changes of a batch, and the transaction number of each."""
    block, numbers, count = ChangeBlock(in_stream=False), [np.empty(0, np.int64)], 0
    for item in batch.items:
        for segment in item.segments():
            frames = block.add(item, segment)
            inside = item.numbers_of(frames) if isinstance(item, TransactionRun) else np.zeros(len(frames), np.int64)
            numbers.append(count + inside)
        count += len(item) if isinstance(item, TransactionRun) else 1
    return block, np.concatenate(numbers)


def _independent(relation: RelationMap | None) -> RelationMap:
    if relation is None:
        raise Together("a relation has no map yet")
    found = reason(relation)
    if found is not None:
        raise Together(f'{found} at "{relation.target.schema}.{relation.target.name}"')
    return relation


def reason(relation: RelationMap) -> str | None:
    """Return why a relation's changes may depend on changes with other keys; None if they cannot."""
    found = eligibility.reason(relation)
    if found is not None:
        return found
    if relation.rules:
        return "its conflicts have rules"
    sent = {column.name for column in relation.remote.columns}
    if any(column.defaulted and column.name not in sent for column in relation.target.columns):
        # readers may take values of a sequence, or times, for the order of commits
        return "a column that is not sent has a default"
    return None


def _codes(groups: list[Changes], relations: dict[int, RelationMap]) -> tuple[Words, Offsets]:
    """Return the hashes of all old and new keys, and the positions of their messages."""
    codes, at = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    forms: dict[tuple[int, int], int] = {}
    for group in groups:
        relation = relations[group.relid]
        for rows in [one for one in (group.old, group.new) if one is not None]:
            if len(rows.kinds) != len(relation.columns):
                raise Together("a row has a different number of columns than its relation")
            keys = taken(rows, relation.lookup)
            for place, kinds in enumerate(keys.kinds):
                form = forms.setdefault((group.relid, place), int(kinds[0]))
                if form not in (TEXT, BINARY) or (kinds != form).any():
                    raise Together("a key has a column without a value, or comes in text and in binary form")
            codes.append(hashes(group.buffer, keys, relation.target.oid))
            at.append(group.positions)
    return np.concatenate(codes), np.concatenate(at)


def _pairs(codes: Words, numbers: Offsets) -> tuple[Offsets, Offsets]:
    """Return each transaction that shares a key with an earlier one, and the last such transaction before it."""
    order = np.lexsort((numbers, codes))
    codes, numbers = codes[order], numbers[order]
    chosen = (codes[1:] == codes[:-1]) & (numbers[1:] != numbers[:-1])
    return numbers[:-1][chosen], numbers[1:][chosen]
