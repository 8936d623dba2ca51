"""The number of transactions behind the one that blocks apply, for ``status``.

They are counted on a temporary copy of the slot (:mod:`pgsub.apply.preview.slot_reader`), which is how a preview reads
them. A count takes about a second, and happens only while the subscription is blocked. The server has no such number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pgsub.apply.preview.slot_reader import Ended, SlotReader, reading
from pgsub.apply.stream.transactions import Kind
from pgsub.catalog.rows import ErrorRow
from pgsub.common.errors import PgsubError
from pgsub.common.subscription import Subscription
from pgsub.launcher.error_handling import APPLY, RESTARTS
from pgsub.publisher import slots
from pgsub.publisher.connect import Connection
from pgsub.target.ledger.subscriptions import Identity

#: Minimum seconds between two counts.
EVERY = 60.0
#: Limits of one count: transactions, seconds, and bytes.
MOST, SECONDS, BYTES = 10_000, 1.0, 16 << 20
#: Slots and walsenders that are left free for others.
_SPARE = 2


@dataclass(frozen=True, slots=True)
class Waiting:
    """Published transactions behind the failing one. ``complete`` is false if the count stopped at a limit."""

    transactions: int
    complete: bool


class Backlog:
    """The counter of transactions that wait for one subscription.

    :param current: returns the definition that was read last, None if the subscription was dropped.
    :param known: the publisher's identity, from the ledger.
    """

    def __init__(
        self,
        sub: Subscription,
        current: Callable[[int], Subscription | None],
        known: Identity,
        *,
        must_use_password: bool,
    ) -> None:
        self._sub = sub
        self._current = current
        self._known = known
        self._must_use_password = must_use_password
        self._next = 0.0
        self._behind: tuple[int, int] | None = None  #: position, and finish LSN of the failing transaction
        self._last: Waiting | None = None

    def waiting(self, connection: Connection, errors: Iterable[ErrorRow]) -> Waiting | None:
        """Return the count, at most a minute old. It is None if nothing is blocked or the number is unknown.

        :param errors: the errors in the state store.
        """
        row = next((one for one in errors if one.worker == APPLY), None)
        if row is None or row.restarts < RESTARTS or row.position is None or self._known.system_identifier is None:
            self._behind = self._last = None
            return None
        behind = row.position, row.finish_lsn or row.position - 1
        if behind != self._behind or time.monotonic() >= self._next:
            self._behind, self._next = behind, time.monotonic() + EVERY
            self._last = self._count(connection, row.position, behind[1])
        return self._last

    def _count(self, connection: Connection, start: int, behind: int) -> Waiting | None:
        current = self._current(self._sub.subid)
        room = slots.free_slots(connection)
        if current is None or room.max - room.used <= _SPARE or room.free_walsenders <= _SPARE:
            return None
        must, prepares = self._must_use_password, current.two_phase == "e"
        try:
            with reading(self._sub, self._known, start, two_phase=prepares, must_use_password=must) as opened:
                return count(opened, behind)
        except PgsubError:
            return None  # the apply worker meets the same problem and reports it


def count(opened: SlotReader, behind: int) -> Waiting:
    """Count the transactions that finish after an LSN, up to the limits."""
    found, size, end = 0, 0, time.monotonic() + SECONDS
    for step in opened.steps():
        if isinstance(step, Ended):
            size += step.transaction.size
            found += step.transaction.finish_lsn > behind and step.transaction.kind in (Kind.COMMIT, Kind.PREPARE)
        if found >= MOST or size >= BYTES or time.monotonic() >= end:
            return Waiting(found, False)
    return Waiting(found, True)
