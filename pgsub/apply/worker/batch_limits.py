"""The limits of a batch: how many transactions are gathered for one commit on the target, and how long."""

from __future__ import annotations

import time

from pgsub.apply.stream.batch import Batch
from pgsub.apply.stream.receiver import Receiver

#: A batch ends at these, and where nothing more is at hand: so a lone small transaction is applied at once, and under
#: a backlog a batch takes what came in while the one before was applied.
BATCH_BYTES, BATCH_SECONDS = 16 << 20, 1.0
#: From so many transactions on a batch waits for more as long as they follow each other closely, but not for long:
#: what a commit costs besides its changes is as much as some dozens of them.
LONE, CLOSE_SECONDS, GATHER_SECONDS = 16, 0.002, 0.02
#: And for longer where the publisher sends what was committed so many microseconds ago: nobody is waiting for these
#: very transactions then, and larger batches are what lets the delay vanish.
BEHIND, BEHIND_SECONDS = 1_000_000, 0.1


def full(batch: Batch, since: float) -> bool:
    """Return whether the batch takes no more.

    :param since: when its first transaction came, of the monotonic clock.
    """
    return batch.size >= BATCH_BYTES or time.monotonic() - since >= BATCH_SECONDS


def gathered(batch: Batch, since: float, receiver: Receiver, quiet: bool) -> bool:
    """Return whether waiting for more would only delay what was received.

    :param since: when its first transaction came, of the monotonic clock.
    :param receiver: has nothing more at hand.
    :param quiet: nothing came for some time.
    """
    if len(batch) < LONE:
        return True
    waited = time.monotonic() - since
    if receiver.flows and receiver.last_send_ts - batch.last.commit_ts >= BEHIND:
        return waited >= BEHIND_SECONDS
    return quiet or waited >= GATHER_SECONDS
