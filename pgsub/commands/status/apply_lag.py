"""The lag of apply, from the last messages of the publisher and from its WAL position as seen by another session.

Times of changes are from the publisher's clock, the present time is from the local clock. Nothing arrives before it was
sent, so a local clock that is visibly behind is detected and corrected. A local clock that is ahead cannot be
distinguished from slow messages, and adds to the lag.
"""

from __future__ import annotations

from pgsub.catalog.rows import OriginRow, SlotRow, WorkerRow
from pgsub.catalog.times import seconds_between, seconds_since, utc_now

#: Seconds of a walsender's silence after which it counts as held up. It answers every few seconds.
HELD_UP_SECONDS = 10.0


def seconds(worker: WorkerRow | None, origin: OriginRow | None, slot: SlotRow | None) -> float | None:
    """Return the lag of apply in seconds, 0 if nothing newer has arrived or is held up on the publisher."""
    if worker is None or not worker.received_lsn:
        return None
    silent = seconds_since(worker.silent_since)
    done = max(worker.latest_end_lsn or 0, (origin.remote_lsn if origin else 0) or 0)
    if done >= worker.received_lsn:
        return max(silent, _held_up(worker, slot))  # while silent, newer data may have arrived
    since = worker.latest_end_time or worker.last_msg_send_time
    return max(seconds_between(since, utc_now()) + _clock_behind(worker), silent, 0.0) if since else None


def _clock_behind(worker: WorkerRow) -> float:
    """Return the seconds by which the local clock is at least behind the publisher's, from its last message."""
    sent, received = worker.last_msg_send_time, worker.last_msg_receipt_time
    return max(seconds_between(received, sent), 0.0) if sent and received else 0.0


def _held_up(worker: WorkerRow, slot: SlotRow | None) -> float:
    """Return the seconds of silence of a walsender although another session has seen its WAL advance.

    A walsender sends keepalives as it reads WAL, and answers requests, which come every few seconds.
    """
    heard = worker.last_msg_receipt_time
    if heard is None or slot is None or slot.taken_at is None or slot.taken_at < heard:
        return 0.0
    silence = seconds_since(heard)
    gone_on = (slot.current_lsn or 0) > (worker.received_lsn or 0)
    # guard: a silent walsender is not mistaken for an idle one
    return silence if gone_on and silence > HELD_UP_SECONDS else 0.0
