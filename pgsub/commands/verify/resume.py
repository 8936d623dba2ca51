"""Tables that a ``pgsub verify`` found equal before it broke off, by the journal of the state store."""

from __future__ import annotations

import time

from pgsub.catalog.store import StateStore
from pgsub.commands.verify.result import EQUAL, TableVerdict
from pgsub.common.subscription import Subscription
from pgsub.protocol.lsn import format_lsn, parse_lsn

_ACTION = "verify"
#: Seconds between writes: what is lost by a kill is compared once more.
_INTERVAL = 1.0
#: Rows of the journal in which a verify is looked for.
_LOOK_BACK = 1000


def found_equal(store: StateStore, sub: Subscription, sample: float | None) -> dict[str, int]:
    """Return the tables that the last verify had found equal, if it broke off, and at which position.

    :param sample: percent of the keys that are to be compared; what compared others says nothing.
    """
    for row in store.journal_rows(sub.subid, limit=_LOOK_BACK):
        if row.action == _ACTION:
            counts = row.detail.get("outcome") != "done" and row.detail.get("sample") == sample
            return {name: parse_lsn(lsn) for name, lsn in row.detail.get("equal", {}).items()} if counts else {}
    return {}


class EqualTables:
    """The tables that are found equal, as the journal keeps them.

    :param number: of the row of the journal.
    """

    def __init__(self, store: StateStore, number: int) -> None:
        self._store = store
        self._number = number
        self._equal: dict[str, str] = {}
        self._next = 0.0

    def add(self, verdict: TableVerdict) -> None:
        """Keep a table if it is equal."""
        if verdict.outcome == EQUAL:
            self._equal[verdict.name] = format_lsn(verdict.lsn)
            if time.monotonic() >= self._next:
                self.write()
                self._next = time.monotonic() + _INTERVAL

    def write(self) -> None:
        """Write what is kept."""
        self._store.journal_more(self._number, equal=self._equal)
