"""Tells that the slot of a table's synchronization is lost, before the table's worker comes to need it.

That worker may be busy with the copy for hours, or wait for its turn. Apply goes on meanwhile, and everything would
look well. The server shows such a slot only in pg_replication_slots.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from pgsub.common.errors import SlotLost
from pgsub.common.subscription import Subscription
from pgsub.launcher.error_handling import ErrorReporter, sync_name
from pgsub.tablesync import sync_slots
from pgsub.target.ledger.subscriptions import RelationState


class SlotsRead(NamedTuple):
    """The slots of table synchronization in one read of the publisher.

    :ivar usable: whether each slot can still be used, by name.
    :ivar all_there: a slot that is not among them does not exist: the server is no standby, and has the main slot.
    :ivar told: workers of which the state store has the error of a lost slot.
    """

    usable: Mapping[str, bool]
    all_there: bool
    told: Collection[str]


class TableSlots:
    """The slots of one subscription's tables, as the publisher showed them.

    :ivar looks: number of reads so far.
    """

    def __init__(self, sub: Subscription, errors: ErrorReporter) -> None:
        self._sub = sub
        self._errors = errors
        self._lost: dict[int, str] = {}  #: slots that the previous read showed as lost, by table
        self._reported: dict[int, str] = {}
        self.looks = 0

    def look(self, read: SlotsRead, tables: Sequence[RelationState]) -> None:
        """Report tables whose slot two reads showed as lost. One read may be older than the slot.

        :param tables: the tables in the ledger.
        """
        lost = {table.srrelid: slot for table in tables if (slot := _lost_slot(table, read)) is not None}
        for table in tables:
            relid, worker = table.srrelid, sync_name(table.srrelid)
            slot = lost.get(relid)
            if slot is not None and slot == self._lost.get(relid) and slot != self._reported.get(relid):
                self._reported[relid] = slot
                self._errors.report(worker, _error(self._sub, table, slot, there=slot in read.usable))
            elif worker in read.told and read.usable.get(table.sync_slot or ""):
                self._reported.pop(relid, None)
                self._errors.clear(worker)  # the table is copied again, with another slot
        self._lost = lost
        self.looks += 1


def _lost_slot(table: RelationState, read: SlotsRead) -> str | None:
    """Return the slot of a table that needs it and cannot have it. A copy that has failed gets another slot."""
    slot, state = table.sync_slot, table.srsubstate
    if slot is None or state not in ("d", "f"):
        return None
    # guard: a table whose slot is lost is told while apply goes on
    if read.usable.get(slot, not (read.all_there and state == "f")):
        return None
    return slot


def _error(sub: Subscription, table: RelationState, slot: str, *, there: bool) -> SlotLost:
    name = f"{table.schemaname}.{table.relname}"
    return SlotLost(
        f'replication slot "{slot}" of table "{name}" {"is lost" if there else "does not exist"}',
        detail="The publisher has invalidated it." if there else "It was dropped on the publisher.",
        hint=sync_slots.lost_hint(sub, table),
        sqlstate="55000" if there else "42704",
    )
