"""Executes blocks of changes as sets. In a large target transaction, only a failed block is replayed row by row."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial

from pgsub.apply.rows.change_block import ChangeBlock
from pgsub.apply.rows.set_fallback import SetFallback
from pgsub.apply.rows.table_state_filter import TableStateFilter
from pgsub.apply.rows.writer import RowWriter
from pgsub.apply.sets.writer import SetWriter
from pgsub.target.sql.pipeline import StatementFailed

_log = logging.getLogger(__name__)


class BlockSets:
    """The sets of one target session.

    :param replica: session_replication_role = replica is in effect there.
    """

    def __init__(self, rows: RowWriter, table_states: TableStateFilter, *, replica: bool) -> None:
        self._rows = rows
        self._filter = table_states
        self._sets = SetWriter(rows, replica=replica)
        self._large = False  #: the target transaction has had a full block

    def begin(self) -> None:
        """Begin a target transaction."""
        self._large = False
        self._sets.begin()

    def apply(self, block: ChangeBlock, counters: Counter[str]) -> Sequence[int] | None:
        """Execute as sets whatever can be.

        :param counters: the executor's counters.
        :return: positions of the remaining messages, None for all.
        """
        targets = partial(self._filter.target_of_all, block)
        self._large |= block.full
        # guard: a deviation before a full block is not attributed to the block
        if self._large:
            self._sets.finish()
        try:
            with self._rows.undoing() if self._large else contextlib.nullcontext():
                result = self._sets.apply(block.messages, targets, in_stream=block.in_stream)
                if self._large:
                    self._sets.finish()
        except (SetFallback, StatementFailed) as failure:
            if not self._large:
                raise
            _log.debug("a block is replayed row by row: %s", failure)
            self._sets.begin()
            counters["set_fallbacks"] += 1
            return None
        counters.update(
            changes_in_sets=result.changes, changes_folded=result.folded, serial_relations=len(result.serial)
        )
        return result.left

    def finish(self) -> None:
        """Wait until all statements have succeeded: see :meth:`SetWriter.finish`."""
        self._sets.finish()
