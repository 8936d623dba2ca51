"""Events of the ledger, on their way into log and state store: conflicts, what became of them, messages, two_phase.

A worker inserts them in the commit of the data, and holds its feedback back until they are gone. So a conflict is in
the log and in ``state.db`` before the publisher hears of the position behind it; so is that two_phase is enabled.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg

from pgsub.catalog.conflicts import APPLIED, SKIPPED
from pgsub.catalog.rows import ConflictRow
from pgsub.catalog.store import StateStore
from pgsub.common import failpoints
from pgsub.common.errors import Log, LogText, field, log_text
from pgsub.common.subscription import Subscription
from pgsub.launcher import error_rows
from pgsub.protocol.lsn import parse_lsn
from pgsub.target.session import origins

# with the state of now: an event that nobody moved at its time may be older than a command that disabled two_phase
_EVENTS = """
SELECT e.id, e.body, s.two_phase::text FROM pgsub.event e JOIN pgsub.subscription s USING (subid)
 WHERE subid = %s ORDER BY e.id LIMIT 1000
"""
#: Those that a worker gives its records; any other is not a worker's.
_LEVELS = frozenset({"LOG", "INFO", "NOTICE", "WARNING", "ERROR", "DEBUG1", "DEBUG2"})
#: As :func:`~pgsub.common.errors.log_text` makes it.
_RECORD = re.compile(
    r"(?P<message>[^\n]*)"
    + "".join(rf"(?:\n{one.upper()}:  (?P<{one}>.*?))?" for one in ("detail", "context", "hint")),
    re.DOTALL,
)
_HINTS = frozenset({None, origins.SHORT_HINT})


class Events:
    """The events of one subscription."""

    def __init__(
        self,
        session: psycopg.Connection,
        store: StateStore,
        sub: Subscription,
        log: Log,
        run: Callable[[Callable[[], None]], None] = lambda work: work(),
    ) -> None:
        self._session = session
        self._store = store
        self._sub = sub
        self._log = log
        self._run = run
        self._logged: set[int] = set()  #: events that the log has and the state store may lack

    def move(self) -> None:
        """Move events into log and state store, then delete them, which lets the worker's feedback pass.

        :raises StateStoreError: they cannot be recorded now; they stay in the ledger.
        """
        rows = self._session.execute(_EVENTS.encode(), (self._sub.subid,)).fetchall()
        if not rows:
            return
        failpoints.point("mirror.before_events")
        for event, body, _ in rows:  # once, however often recording is tried
            if event not in self._logged:
                self._logged.add(event)
                self._write_log(body)
        self._run(lambda: self._write_events(rows))
        self._session.execute("DELETE FROM pgsub.event WHERE id = ANY (%s)", ([row[0] for row in rows],))
        self._logged -= {row[0] for row in rows}

    def _write_events(self, rows: list[tuple[Any, ...]]) -> None:
        with self._store.batch():
            self._record([(event, body) for event, body, _ in rows if body["kind"] == "conflict"])
            for _, body, two_phase in rows:  # what became of conflicts, those of the same commit too
                if body["kind"] == "skipped":
                    self._store.conflicts_skipped(self._sub.subid, parse_lsn(body["finish_lsn"]))
                elif body["kind"] == "replayed":
                    place = (parse_lsn(body["finish_lsn"]), body.get("conflict"), body.get("table"))
                    self._store.conflicts_replayed(self._sub.subid, *place)
                elif body["kind"] == "advanced":
                    self._store.conflicts_left_out(self._sub.subid, parse_lsn(body["from"]), parse_lsn(body["to"]))
                elif body["kind"] == "two_phase":
                    self._store.alter(self._sub.subid, two_phase=two_phase)

    def _record(self, conflicts: list[tuple[int, dict[str, Any]]]) -> None:
        if conflicts:
            found = [conflict_of(self._sub, event, body) for event, body in conflicts]
            added = self._store.add_conflicts(found)
            counts = Counter(f"confl_{row.conflict_type}" for row, one in zip(found, added, strict=True) if one.new)
            self._store.add_stats(self._sub.subid, **counts)

    def _write_log(self, body: dict[str, Any]) -> None:
        if body["kind"] == "message":
            self._message(body)
        elif body["kind"] == "two_phase":
            self._log("LOG", log_text(f'two_phase is enabled for subscription "{self._sub.name}"'))
        elif body["kind"] == "log":
            level = str(body["level"])  # a row of the ledger is the target's to write
            self._log(level if level in _LEVELS else "LOG", _composed(str(body["text"])))
        elif body["kind"] == "conflict" and not body.get("quiet"):
            self._log("LOG", log_text(body["message"], detail=body["detail"], context=body["context"]))

    def _message(self, body: dict[str, Any]) -> None:
        place = f" in transaction {body['xid']}" if body["transactional"] else ""
        text = f'logical decoding message "{body["prefix"]}": {body["content"]}'.replace("\n", "\n\t")
        context = (
            f'processing remote data for replication origin "pgsub_{self._sub.subid}" during message type "MESSAGE"'
            f"{place}, emitted at {body['lsn']}"
        )
        self._log("LOG", LogText(f"{text}\n{field('CONTEXT', context)}"))


def _composed(text: str) -> LogText:
    """Return a record that a worker wrote, put together once more; any other text is one line.

    Lines of a hint are there to be pasted, so it is one of those that workers write.
    """
    found = _RECORD.fullmatch(text)
    if found is None or found["hint"] not in _HINTS:
        return log_text(text)
    return log_text(found["message"], detail=found["detail"], context=found["context"], hint=found["hint"])


def conflict_of(sub: Subscription, event: int, body: dict[str, Any]) -> ConflictRow:
    """Make the row of a conflict that did not stop a worker, or no longer does."""
    return error_rows.conflict_row(sub, body, _action(body), event)


def _action(body: dict[str, Any]) -> str:
    if body.get("action"):
        return str(body["action"])
    return APPLIED if body["conflict_type"].endswith("_origin_differs") else SKIPPED
