"""Detects a blocked subscription: apply restarts repeatedly from the same position, and nothing is applied.

The server shows this only as an apply worker that comes and goes, which is easily overlooked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pgsub.catalog.rows import ConflictRow, ErrorRow, SlotRow
from pgsub.common import errors
from pgsub.common.errors import PermissionMissing, PublisherUnavailable, SparkUnusable, TargetUnavailable
from pgsub.common.quoting import word
from pgsub.common.server_words import is_unreachable
from pgsub.common.subscription import Subscription
from pgsub.launcher.error_handling import APPLY, RESTARTS
from pgsub.protocol.lsn import format_lsn


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
    name: str, problems: Sequence[ErrorRow], conflicts: Sequence[ConflictRow], slot: SlotRow | None, state: str
) -> dict[str, Any] | None:
    """Describe a blocked subscription, None for any other.

    :param conflicts: the conflicts that stop apply.
    :param slot: the slot as last seen on the publisher.
    """
    row = next((problem for problem in problems if problem.worker == APPLY), None)
    if state != "blocked" or row is None:
        return None
    waiting = position = None
    if row.position is not None:
        confirmed = slot.confirmed_flush_lsn if slot is not None else None
        position = max(row.position, confirmed or 0)  # the ledger's position does not include idle WAL
        if slot is not None and slot.current_lsn is not None:
            waiting = max(slot.current_lsn - position, 0)
    return {
        "since": row.stuck_since,
        "restarts": row.restarts,
        "position": None if position is None else format_lsn(position),
        "finish_lsn": None if row.finish_lsn is None else format_lsn(row.finish_lsn),
        "reason": said(row),
        "waiting_transactions": None if slot is None else slot.waiting_transactions,
        "waiting_at_least": slot is not None and slot.waiting_at_least is True,
        "waiting_bytes": waiting,
        "retained_bytes": None if slot is None else slot.retained_bytes,
        "slot_lost_in": None if slot is None else slot.lost_in,
        "next": _next(name, row, conflicts),
    }


def next_command(sub: Subscription, problems: Sequence[ErrorRow], conflicts: Sequence[ConflictRow]) -> str | None:
    """Return the first command after a failure. For a disabled subscription it shows the runbook."""
    row = next((problem for problem in problems if problem.worker == APPLY), None)
    if sub.enabled and row is not None:
        return _next(sub.name, row, conflicts)
    return f"pgsub status {word(sub.name)} --runbook" if problems else None


def _next(name: str, row: ErrorRow, conflicts: Sequence[ConflictRow]) -> str:
    conflict = next((one for one in conflicts if row.conflict and one.finish_lsn == row.finish_lsn), None)
    if conflict is not None:
        return f"pgsub conflicts show {word(name)} {conflict.id}"
    return f"pgsub status {word(name)} --runbook"
