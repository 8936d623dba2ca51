"""The limits of a batch: how many transactions are gathered for one commit on the target, and for how long."""

from __future__ import annotations

import time

from pgsub.apply.stream.receiver import Receiver
from pgsub.apply.stream.transaction_batch import Batch

#: Maximum size and duration of a batch. It also ends when nothing more is at hand. So a lone small transaction is
#: applied at once, and under a backlog a batch takes what was received while the previous one was applied.
BATCH_BYTES, BATCH_SECONDS = 16 << 20, 1.0
#: A batch of LONE or more transactions waits briefly for more, while they follow each other closely. The overhead of a
#: commit equals that of some dozens of changes.
LONE, CLOSE_SECONDS, GATHER_SECONDS = 16, 0.002, 0.02
#: It waits for BEHIND_SECONDS if the last transaction was sent BEHIND microseconds or more after its commit. Then
#: nobody waits for exactly these transactions, and larger batches reduce the delay.
BEHIND, BEHIND_SECONDS = 1_000_000, 0.1


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
