"""How many transactions one commit on the target has: when they are gathered, and when they are tried after a fault."""

from __future__ import annotations

import time

from pgsub.apply.stream.receiver import Receiver
from pgsub.apply.stream.transaction_batch import Batch
from pgsub.common.errors import Directive, PgsubError
from pgsub.protocol.lsn import format_lsn

#: Maximum size and duration of a batch. It also ends when nothing more is at hand. So a lone small transaction is
#: applied at once, and under a backlog a batch takes what was received while the previous one was applied.
BATCH_BYTES, BATCH_SECONDS = 16 << 20, 1.0
#: A batch of LONE or more transactions waits briefly for more, while they follow each other closely. The overhead of a
#: commit equals that of some dozens of changes.
LONE, CLOSE_SECONDS, GATHER_SECONDS = 16, 0.002, 0.02
#: It waits for BEHIND_SECONDS if the last transaction was sent BEHIND microseconds or more after its commit. Then
#: nobody waits for exactly these transactions, and larger batches reduce the delay.
BEHIND, BEHIND_SECONDS = 1_000_000, 0.1

#: out_of_memory, also raised when no lock is left: a batch needs more memory than its transactions one by one, and a
#: restart would produce the same batch.
_OUT_OF_MEMORY = "53200"


def full(batch: Batch, since: float) -> bool:
    """Return whether the batch takes no more.

    :param since: receipt of its first transaction, by the monotonic clock.
    """
    return batch.size >= BATCH_BYTES or time.monotonic() - since >= BATCH_SECONDS


def gathered(batch: Batch, since: float, receiver: Receiver, quiet: bool) -> bool:
    """Return whether waiting for more would only delay the received transactions.

    :param since: receipt of its first transaction, by the monotonic clock.
    :param receiver: has no further message at hand.
    :param quiet: nothing was received for some time.
    """
    if len(batch) < LONE:
        return True
    waited = time.monotonic() - since
    if receiver.flows and receiver.last_send_ts - batch.last.commit_ts >= BEHIND:
        return waited >= BEHIND_SECONDS
    return quiet or waited >= GATHER_SECONDS


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
