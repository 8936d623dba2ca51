"""Moves events from the ledger to the log and the state store: conflicts and their outcomes, messages, two_phase.

A worker inserts events in the same commit as the data. It holds back its feedback until they are deleted. Therefore a
conflict, or that two_phase was enabled, is in the log and in ``state.db`` before the publisher gets feedback past it.
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
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.launcher import error_rows
from pgsub.protocol.lsn import parse_lsn
from pgsub.target.session import origins

# Read with the present two_phase state: an unmoved event may be older than a command that disabled two_phase.
_EVENTS = """
SELECT e.id, e.body, s.two_phase::text FROM pgsub.event e JOIN pgsub.subscription s USING (subid)
 WHERE subid = %s ORDER BY e.id LIMIT 1000
"""
#: Levels that a worker uses. Any other level was not written by a worker.
_LEVELS = frozenset({"LOG", "INFO", "NOTICE", "WARNING", "ERROR", "DEBUG1", "DEBUG2"})
#: The format that :func:`~pgsub.common.errors.log_text` writes.
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
        self._logged: set[int] = set()  #: events that are logged but may not be in the state store yet

    def move(self) -> None:
        """Move events to the log and the state store, then delete them, which allows the worker to send feedback.

        :raises StateStoreError: the state store cannot be written now. The events stay in the ledger.
        """
        rows = self._session.execute(_EVENTS.encode(), (self._sub.subid,)).fetchall()
        if not rows:
            return
        failpoints.point("mirror.before_events")
        for event, body, _ in rows:  # only once, even if recording fails and is repeated
            if event not in self._logged:
                self._logged.add(event)
                self._write_log(body)
        self._run(lambda: self._write_events(rows))
        self._session.execute("DELETE FROM pgsub.event WHERE id = ANY (%s)", ([row[0] for row in rows],))
        self._logged -= {row[0] for row in rows}

    def _write_events(self, rows: list[tuple[Any, ...]]) -> None:
        with self._store.batch():
            self._record([(event, body) for event, body, _ in rows if body["kind"] == "conflict"])
            for _, body, two_phase in rows:  # outcomes of conflicts, even of conflicts in the same commit
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
        elif body["kind"] == "skipped_publication":
            self._log("WARNING", _left_out(self._sub))
        elif body["kind"] == "log":
            level = str(body["level"])  # the target's users may write this row
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


def _left_out(sub: Subscription) -> LogText:
    return log_text(
        f'the publisher decoded changes while a publication of subscription "{sub.name}" did not exist',
        detail="What was committed without it was not sent, and will not be, even if it exists again.",
        hint="Compare the tables with what is published now, and repair what differs unless it is meant to:\n"
        f"pgsub verify {word(sub.name)}\npgsub verify {word(sub.name)} --repair",
    )


def _composed(text: str) -> LogText:
    """Rebuild a record that a worker wrote. Any other text becomes one line.

    Users paste the lines of a hint, so only hints that workers write are accepted.
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
