"""Decides which faults of a batch are located transaction by transaction, and how many transactions to try alone."""

from __future__ import annotations

from pgsub.apply.stream.transaction_batch import Batch
from pgsub.common.errors import Directive, PgsubError
from pgsub.protocol.lsn import format_lsn

#: out_of_memory, also raised when no lock is left: a batch needs more memory than its transactions one by one, and a
#: restart would produce the same batch.
_OUT_OF_MEMORY = "53200"


def can_be_located(error: PgsubError) -> bool:
    """Return whether to go row by row: that locates the faulty change, or the batch is too large for the target."""
    located = error.directive is Directive.STOP and error.context is not None
    return error.directive is Directive.FAULT or located or error.sqlstate == _OUT_OF_MEMORY


def good_before(batch: Batch, error: PgsubError) -> int:
    """Return how many transactions of a batch to try alone after a fault; 0 if the faulty one is known.

    A deferred constraint fails at the COMMIT of the whole batch, and the error names the last transaction.
    """
    if not can_be_located(error):
        return 0
    lsns = [format_lsn(one.finish_lsn) for one in batch.transactions()]
    named = error.finish_lsn if error.directive is Directive.FAULT else None
    good = lsns.index(named) if named in lsns else len(lsns)
    return good if good < len(lsns) - 1 else len(lsns) // 2
