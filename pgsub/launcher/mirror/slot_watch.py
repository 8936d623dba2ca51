"""Reads the subscription's slot and publications on the publisher now and then for ``status``. Nothing waits for it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from typing import Literal

from pgsub.catalog.rows import SLOT_SECONDS, ErrorRow, SlotRow
from pgsub.catalog.store import StateStore
from pgsub.catalog.times import readable, utc_now, utc_text
from pgsub.common.errors import (
    Log,
    PgsubError,
    PublicationMissing,
    PublisherUnavailable,
    SlotLost,
    StateStoreError,
    log_text,
)
from pgsub.common.subscription import Subscription
from pgsub.common.threads import SupervisedThread
from pgsub.launcher.error_handling import APPLY, PUBLICATIONS, SLOT, ErrorReporter
from pgsub.launcher.mirror import lock_waits
from pgsub.launcher.mirror.backlog import Backlog, Waiting
from pgsub.launcher.mirror.table_slots import SlotsRead, TableSlots
from pgsub.launcher.recorder import Run
from pgsub.publisher import connect as publisher
from pgsub.publisher import publication, slots
from pgsub.publisher.server_errors import translating
from pgsub.target.ledger.subscriptions import RelationState

SECONDS = 5.0
#: Maximum and minimum seconds over which the growth of the publisher's WAL is measured. Shorter spans give only noise.
WINDOW, SHORTEST = 300.0, 20.0
#: Slots that one watch warns of. Nothing of what the publisher says here is verified, and it could always name others.
_MOST_WARNED = 100
#: Columns that are shown with the publisher's values.
_SHARED = {one.name for one in fields(SlotRow)} & {one.name for one in fields(slots.SlotState)} - {"inactive_since"}


class SlotWatch:
    """The reader of pg_replication_slots. It has its own thread because a hanging publisher must not block the
    launcher.

    A failed read is repeated. When no read succeeded for long, that is reported as an error unless apply has one: apply
    meets the same problem and reports it. A slot that synchronizes no table is logged once. It may have been made after
    the backup from which the target was restored.

    :ivar publisher_waits: what slots wait for on the publisher: locks, and standbys that are away.
    """

    def __init__(
        self, sub: Subscription, store: StateStore, backlog: Backlog, run: Run, errors: ErrorReporter, log: Log
    ) -> None:
        self._sub = sub
        self._store = store
        self._backlog = backlog
        self._run = run
        self._errors = errors
        self._log = log
        self._next = 0.0
        self._thread: SupervisedThread | None = None
        self._missing: PublicationMissing | Literal[False] | None = False  #: as read; False once reported
        self._growth: deque[tuple[float, int]] = deque()
        self._seen = False  #: since the watch began
        self._unseen_since = time.monotonic(), utc_now()  #: start of the last successful read, or of the watch
        self._failure: PgsubError | None = None  #: of the last read
        self._told: str | None = None  #: message of the last report of an unseen slot
        self._excused = 0.0  #: when apply last had an error
        self._table_slots = TableSlots(sub, errors)
        self._slots_read: SlotsRead | None = None  #: of the last read; None once handled
        self._unnamed: set[str] = set()  #: slots of the previous read that belonged to no table
        self._warned: set[str] = set()
        self.publisher_waits: dict[str, str] = {}

    def tick(self, relations: Sequence[RelationState] = ()) -> None:
        """Report what was read, and read again if it is time.

        :param relations: the tables in the ledger.
        """
        read, self._slots_read = self._slots_read, None
        if read is not None:
            self._warn_of_unnamed(read, relations)
            self._table_slots.look(read, relations)
        missing, self._missing = self._missing, False
        if missing is None:
            self._errors.clear(PUBLICATIONS)
        elif missing:
            self._errors.report(PUBLICATIONS, missing, repeats=False)
        clock = time.monotonic()
        self._say_unseen(clock)
        if clock < self._next or self._sub.slot_name is None or (self._thread and self._thread.is_alive()):
            return
        self._next = clock + SECONDS
        self._thread = SupervisedThread("slot_watch", "slot watch", self._read)
        self._thread.try_start()

    def _warn_of_unnamed(self, read: SlotsRead, relations: Sequence[RelationState]) -> None:
        """Warn of slots that belonged to no table in two reads. One read may see a slot that is just made."""
        unnamed = set(read.usable).difference(*((one.sync_slot, one.spare_slot) for one in relations))
        unwarned = sorted(unnamed.intersection(self._unnamed) - self._warned)
        for name in unwarned[: _MOST_WARNED - len(self._warned)]:
            self._warned.add(name)
            detail, hint = slots.of_no_table(name)
            text = (
                f'replication slot "{name}" on the publisher synchronizes no table of subscription "{self._sub.name}"'
            )
            self._log("WARNING", log_text(text, detail=detail, hint=hint))
        self._unnamed = unnamed

    def _say_unseen(self, clock: float) -> None:
        """Report that the slot has not been seen for long, or that it is seen again."""
        thread, since = self._thread, self._unseen_since
        failure = self._failure or (thread.fatal_error if thread is not None else None)
        if self._errors.shows(APPLY):
            self._excused = clock  # apply may find the publisher again before the next read does
        if self._sub.slot_name is None or (self._seen and clock - since[0] < SLOT_SECONDS):
            self._told = None
            self._errors.clear(SLOT)
        elif clock - max(since[0], self._excused) >= SLOT_SECONDS and (failure or (thread and thread.is_alive())):
            error = _unseen(self._sub, since[1], failure)
            if error.message != self._told:
                self._told = error.message
                self._errors.report(SLOT, error)

    def _read(self) -> None:
        assert self._sub.slot_name is not None
        began = time.monotonic(), utc_now()
        known = self._known_errors()
        try:
            connection = publisher.connect(self._sub.connection, application_name=self._sub.name)
            try:
                state = slots.slot_state(connection, self._sub.slot_name)
                waiting = self._backlog.waiting(connection, known) if state is not None else None
                read = self._read_slots(connection, state, known)
                self.publisher_waits = self._waits(connection, self._sub.slot_name)
                self._missing = publication.absence(connection, self._sub)
            finally:
                connection.close()
        except PgsubError as error:
            self._failure, self.publisher_waits = error, {}
            return
        self._unseen_since, self._seen, self._failure, self._slots_read = began, True, None, read
        row = self._row(state, waiting) if state is not None else None
        with contextlib.suppress(StateStoreError):
            self._run(lambda: self._store.put_slot(self._sub.subid, row))

    def _known_errors(self) -> list[ErrorRow]:
        """Return the errors in the state store, none while it cannot be read. The slot is watched nevertheless."""
        with contextlib.suppress(StateStoreError):
            return list(self._run(lambda: self._store.errors(self._sub.subid)))
        return []

    def _read_slots(
        self, connection: publisher.Connection, main: slots.SlotState | None, known: Sequence[ErrorRow]
    ) -> SlotsRead:
        usable = slots.sync_slots(connection, self._sub.subid)
        told = {row.worker for row in known if row.class_ == SlotLost.__name__}
        return SlotsRead(usable, main is not None and not main.in_recovery, told)

    def _waits(self, connection: publisher.Connection, slot_name: str) -> dict[str, str]:
        with translating(connection, "look at locks and standbys of the publisher"):
            away = lock_waits.standbys_away(connection, self._sub.subid, slot_name)
            # guard: a publisher that waits for a standby is not taken for an idle one, without "away | "
            return away | lock_waits.publisher_locks(connection, self._sub.subid)

    def close(self) -> None:
        """Wait for a running read."""
        if self._thread is not None:
            self._thread.join(2)

    def _rate(self, current_lsn: int) -> int | None:
        """Return the growth of the publisher's WAL in bytes per second, None before it can be measured."""
        growth, now = self._growth, time.monotonic()
        if growth and current_lsn < growth[-1][1]:
            growth.clear()  # another server answers
        growth.append((now, current_lsn))
        while now - growth[0][0] > WINDOW:
            growth.popleft()
        seconds = now - growth[0][0]
        return int((current_lsn - growth[0][1]) / seconds) if seconds >= SHORTEST else None

    def _row(self, state: slots.SlotState, waiting: Waiting | None) -> SlotRow:
        copied = state.synced and state.in_recovery
        return SlotRow(
            state.name,
            slot_type="logical" if state.plugin else "physical",
            inactive_since=utc_text(state.inactive_since) if state.inactive_since else None,
            taken_at=utc_now(),
            wal_bytes_per_second=self._rate(state.current_lsn),
            waiting_transactions=None if waiting is None else waiting.transactions,
            waiting_at_least=None if waiting is None else not waiting.complete,
            # a standby's copy is made again while the primary has the slot
            **{name: getattr(state, name) for name in _SHARED} | ({"wal_status": None} if copied else {}),
        )


def _unseen(sub: Subscription, since: str, failure: PgsubError | None) -> PublisherUnavailable:
    reason = "the publisher has not answered" if failure is None else failure.message
    detail = (
        "Apply continues through its present session. Meanwhile nobody sees how much WAL the slot keeps and when it"
        " is lost, and a stream that is interrupted may not start again."
    )
    return PublisherUnavailable(
        f'replication slot "{sub.slot_name}" has not been seen since {readable(since)}: {reason}',
        detail=" ".join(filter(None, [detail, failure.detail if failure else None])),
        hint=failure.hint if failure else "See whether the publisher answers to a new session.",
        sqlstate=failure.sqlstate if failure else None,
    )
