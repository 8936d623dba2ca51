"""Detects a blocked subscription: nothing is applied until somebody intervenes.

Either apply restarts repeatedly from the same position, or it waits for a lock that a prepared transaction of the
subscription itself holds. The server shows this only as an apply worker that comes and goes, or that waits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pgsub.catalog.rows import ConflictRow, ErrorRow, SlotRow
from pgsub.commands.status.wal_removal_forecast import lost_in
from pgsub.common import errors
from pgsub.common.errors import PermissionMissing, PublisherUnavailable, SparkUnusable, TargetUnavailable
from pgsub.common.quoting import word
from pgsub.common.server_words import is_unreachable
from pgsub.common.subscription import Subscription
from pgsub.launcher.error_handling import APPLY, RESTARTS
from pgsub.protocol.lsn import format_lsn

#: The wait for a prepared transaction of the subscription (pgsub.launcher.mirror.lock_waits), with its name and xid.
_OWN_PREPARED = re.compile(
    r"a lock that the subscription's prepared transaction (pgsub_[0-9]+_([0-9]+)_[0-9A-F]+) holds( on table .*)?",
    re.DOTALL,
)
#: The wait of the publisher for its standbys (pgsub.launcher.mirror.lock_waits).
_STANDBY = "a standby of the publisher "


def for_standby(waits: Mapping[str, Any]) -> bool:
    """Return whether apply receives nothing because the publisher waits for a standby. Apply itself is not silent."""
    return (waits["for"] or "").startswith(_STANDBY)


def own_prepared(waits: Mapping[str, Any] | None) -> tuple[str, int] | None:
    """Return the subscription's prepared transaction that apply waits for: its name, and its xid on the publisher.

    Its end comes behind the change that waits for it, so apply never reaches it.

    :param waits: what apply waits for.
    """
    found = _OWN_PREPARED.fullmatch((waits or {}).get("for") or "")
    return None if found is None else (found[1], int(found[2]))


def blocks(row: ErrorRow) -> bool:
    """Return whether an error of apply blocks the subscription. An unreachable server or Spark does not."""
    cls = getattr(errors, row.class_, None)
    if cls in (PublisherUnavailable, SparkUnusable) or (cls is TargetUnavailable and is_unreachable(row.sqlstate)):
        return False
    return row.restarts >= RESTARTS


def said(row: ErrorRow) -> str:
    """Return an error in one line. The detail is added if only that names the missing privilege."""
    detail = (row.detail or "").rstrip(".")
    if not detail or row.class_ != PermissionMissing.__name__:
        return row.message
    return f"{row.message} ({detail[:1].lower()}{detail[1:]})"


def blocked(
    name: str,
    problems: Sequence[ErrorRow],
    conflicts: Sequence[ConflictRow],
    slot: SlotRow | None,
    waits: Mapping[str, Any] | None,
    state: str,
) -> dict[str, Any] | None:
    """Describe a blocked subscription, None for any other.

    :param conflicts: the conflicts that stop apply.
    :param slot: the slot as last seen on the publisher.
    :param waits: what apply waits for.
    """
    if state != "blocked":
        return None
    row = next((problem for problem in problems if problem.worker == APPLY), None)
    position = slot.confirmed_flush_lsn if slot is not None else None
    if waits is not None and own_prepared(waits) is not None:
        facts = _waiting(name, waits)
    elif row is not None:
        facts = _restarting(name, row, conflicts)
        # the ledger's position does not include idle WAL
        position = None if row.position is None else max(row.position, position or 0)
    else:
        return None
    current = slot.current_lsn if slot is not None else None
    waiting = None if current is None or position is None else max(current - position, 0)
    return {
        **facts,
        "position": None if position is None else format_lsn(position),
        "waiting_transactions": None if slot is None else slot.waiting_transactions,
        "waiting_at_least": slot is not None and slot.waiting_at_least is True,
        "waiting_bytes": waiting,
        "retained_bytes": None if slot is None else slot.retained_bytes,
        "slot_lost_in": None if slot is None else lost_in(slot),
    }


def _restarting(name: str, row: ErrorRow, conflicts: Sequence[ConflictRow]) -> dict[str, Any]:
    return {
        "since": row.stuck_since,
        "restarts": row.restarts,
        "finish_lsn": None if row.finish_lsn is None else format_lsn(row.finish_lsn),
        "reason": said(row),
        "next": _next(name, row, conflicts),
    }


def _waiting(name: str, waits: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "since": waits["since"],
        "restarts": 0,
        "finish_lsn": None,
        "reason": f"apply waits for {waits['for']}",
        "next": runbook_command(name),
    }


def next_command(sub: Subscription, problems: Sequence[ErrorRow], conflicts: Sequence[ConflictRow]) -> str | None:
    """Return the first command after a failure. For a disabled subscription it shows the runbook."""
    row = next((problem for problem in problems if problem.worker == APPLY), None)
    if sub.enabled and row is not None:
        return _next(sub.name, row, conflicts)
    return runbook_command(sub.name) if problems else None


def _next(name: str, row: ErrorRow, conflicts: Sequence[ConflictRow]) -> str:
    conflict = next((one for one in conflicts if row.conflict and one.finish_lsn == row.finish_lsn), None)
    if conflict is not None:
        return f"pgsub conflicts show {word(name)} {conflict.id}"
    return runbook_command(name)


def runbook_command(name: str) -> str:
    """Return the command that shows the runbook."""
    return f"pgsub status {word(name)} --runbook"
