"""Which faults of a batch are looked for transaction by transaction, and how many transactions before one are good."""

from __future__ import annotations

from pgsub.apply.stream.batch import Batch
from pgsub.common.errors import Directive, PgsubError
from pgsub.protocol.lsn import format_lsn

#: out_of_memory, also where no lock is left: a batch needs more than its transactions one by one, and it would be the
#: same batch after a restart.
_OUT_OF_MEMORY = "53200"


def can_be_located(error: PgsubError) -> bool:
    """Return whether a change is to blame, and row by row it shows which; or the batch is too large for the target."""
    located = error.directive is Directive.STOP and error.context is not None
    return error.directive is Directive.FAULT or located or error.sqlstate == _OUT_OF_MEMORY


def good_before(batch: Batch, error: PgsubError) -> int:
    """Return how many transactions of a batch to try alone after a fault; 0: the faulty one is known.

    A deferred constraint fails at the COMMIT of all of them and names the last.
    """
    if not can_be_located(error):
        return 0
    lsns = [format_lsn(one.finish_lsn) for one in batch.transactions()]
    named = error.finish_lsn if error.directive is Directive.FAULT else None
    good = lsns.index(named) if named in lsns else len(lsns)
    return good if good < len(lsns) - 1 else len(lsns) // 2
