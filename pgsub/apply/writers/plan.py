"""Divides a batch into units: runs of whole transactions, each of which does not depend on the one before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np

from pgsub.apply.stream.transaction_batch import Batch, TransactionRun
from pgsub.apply.stream.transactions import Kind
from pgsub.apply.writers.dependencies import Dependencies
from pgsub.apply.writers.parallel_gain import WORTH
from pgsub.protocol.columnar import Offsets
from pgsub.protocol.parse_changes import BETWEEN_ROWS, ROW_CHANGES

#: Units per session to try in turn. With more units, fewer keys are shared between units, and less is compacted.
_CUTS = (1, 4, 16)
#: Speed-up per session if all sessions have work.
DIVIDED = 0.7


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive transactions of a batch.

    :ivar after: number of the part that must be committed before this one is executed, -1 for none.
    """

    begin: int
    end: int
    after: int


def count_changes(batch: Batch) -> int:
    """Count the row changes of a batch."""
    codes = [segment.codes for item in batch.items for segment in item.segments()]
    return sum(one.count(row) for one in codes for row in ROW_CHANGES)


def plain(batch: Batch) -> int:
    """Count the transactions at the start of a batch that have only row changes."""
    count = 0
    for item in batch.items:
        if isinstance(item, TransactionRun):
            codes = np.frombuffer(item.segment.codes, np.uint8)
            apart = np.flatnonzero(np.isin(codes, list(BETWEEN_ROWS)))
            if len(apart):
                return count + int(item.numbers_of(apart[:1] + item.segment.start)[0])
            count += len(item)
            continue
        whole = item.kind is Kind.COMMIT and item.spooled is None and not item.leaves and not item.in_stream
        if not whole or any(code in segment.codes for segment in item.segments() for code in BETWEEN_ROWS):
            return count
        count += 1
    return count


def parts(found: Dependencies, sessions: int, least: int, *, single: bool) -> list[Part]:
    """Divide transactions into parts for several sessions; return one part if that would not pay.

    :param least: approximate minimum number of changes of a part.
    :param single: each transaction is a part.
    """
    count = len(found.changes)
    if single:
        made = _merged(found, list(range(count + 1)), merge=False)
        return made if gain(found, made, sessions) >= _worth(sessions) else [Part(0, count, -1)]
    done = np.cumsum(found.changes)
    best, most = [Part(0, count, -1)], _worth(sessions)
    for cut in _CUTS:
        size = max(least, -(-int(done[-1]) // (sessions * cut)))
        edges = [0, *(np.flatnonzero(np.diff(done // size)) + 1).tolist(), count]
        made = _merged(found, sorted(set(edges)), merge=True)
        here = gain(found, made, sessions)
        if here > most:
            best, most = made, here
        if here >= DIVIDED * sessions or size == least:
            break
    return best


def _worth(sessions: int) -> float:
    """Return the speed-up that justifies so many sessions; two sessions never reach WORTH."""
    return min(WORTH, DIVIDED * sessions)


def _merged(found: Dependencies, edges: Sequence[int], *, merge: bool) -> list[Part]:
    """Make parts between edges; join dependent neighbours if ``merge`` is set."""
    if merge:
        edges = _joined(found, edges)
    # guard: a part waits for the latest part that any of its transactions depends on
    return [Part(begin, end, after) for (begin, end), after in zip(pairwise(edges), _after(found, edges), strict=True)]


def _after(found: Dependencies, edges: Sequence[int]) -> list[int]:
    """Return for each part the last part that it depends on, -1 for none."""
    part_of: Offsets = np.searchsorted(np.array(edges), np.arange(edges[-1]), side="right") - 1
    last: Offsets = np.full(len(edges) - 1, -1, np.int64)
    earlier, later = part_of[found.earlier], part_of[found.later]
    chosen = earlier != later
    np.maximum.at(last, later[chosen], earlier[chosen])
    return cast(list[int], last.tolist())


def _joined(found: Dependencies, edges: Sequence[int]) -> list[int]:
    """Remove the edges between neighbours that depend on each other."""
    kept = [edges[0]]
    part_at: list[int] = []
    for part, after in enumerate(_after(found, edges)):
        if part and not (after >= 0 and part_at[after] == len(kept) - 1):
            kept.append(edges[part])
        part_at.append(len(kept) - 1)
    return [*kept, edges[-1]]


def gain(found: Dependencies, made: Sequence[Part], sessions: int) -> float:
    """Return the best possible speed-up of the parts over one session."""
    done = np.concatenate([[0], np.cumsum(found.changes)])
    free, longest = [0.0] * sessions, 0.0
    ends: list[float] = []
    for part in made:
        session = free.index(min(free))
        start = max(free[session], ends[part.after] if part.after >= 0 else 0.0)
        longest = max(longest, start + float(done[part.end] - done[part.begin]))  # commits come in order
        ends.append(longest)
        free[session] = longest
    return float(done[-1]) / longest if longest else 1.0
