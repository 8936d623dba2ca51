"""The verdict of ``pgsub status --check``, for monitoring systems."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pgsub.catalog.rows import ErrorRow
from pgsub.catalog.times import seconds_since
from pgsub.commands.status import blocked_state
from pgsub.commands.status.subscription_status import SubscriptionStatus, error_class, of_spark
from pgsub.common.errors import (
    ApplyError,
    PublicationMissing,
    PublisherUnavailable,
    ReplicationBroken,
    SparkUnusable,
    TargetUnavailable,
    TimeoutExpired,
)

#: Seconds without a sign of life after which a health check without its own threshold fails.
STUCK_SECONDS = 30.0
_SEVERITY = (7, 6, 13, 5, 4, 10, 3, 8)


@dataclass(frozen=True)
class Finding:
    """A finding of a health check."""

    code: int  #: exit code
    message: str
    next: str | None = None  #: the operator's next command


def check(
    found: Iterable[SubscriptionStatus], max_lag: float | None = None, unwritten: Sequence[str] = ()
) -> list[Finding]:
    """Check the health, most serious finding first: lost slot, error, no recording, not served, lag, locks.

    :param max_lag: seconds, None to check for a silent worker instead.
    :param unwritten: from :func:`pgsub.catalog.locks.troubles`. Other findings may then be outdated.
    """
    found = list(found)
    findings = [replace(finding, next=_next(one, finding)) for one in found if (finding := _finding(one, max_lag))]
    findings += [Finding(10, text) for text in unwritten]
    if not found:  # never healthy: the folder may be mistyped or another user's
        findings.append(Finding(3, "no subscription exists"))
    return sorted(findings, key=lambda finding: _SEVERITY.index(finding.code))


def _next(one: SubscriptionStatus, finding: Finding) -> str | None:
    """Return the operator's next command, which shows the runbook if what is waited for is known."""
    known = finding.code == TimeoutExpired.exit_code and one.waits_for is not None
    return one.next or (blocked_state.runbook_command(one.definition.name) if known else None)


def _finding(one: SubscriptionStatus, max_lag: float | None) -> Finding | None:
    name = f'subscription "{one.definition.name}"'
    if one.lost:
        return Finding(7, f"{name}: {one.broken.message if one.broken else 'replication slot lost'}")
    if one.blocked is not None and blocked_state.own_prepared(one.waits) is not None:
        return Finding(8, f"{name} is blocked: {one.blocked['reason']}")
    task = one.task if one.state == "waiting" else None
    if rows := [row for row in one.errors if task is None or not of_spark(row, task)]:
        code, row = min(((_code(row), row) for row in rows), key=lambda pair: _SEVERITY.index(pair[0]))
        return Finding(code, f"{name}: {blocked_state.said(row)}")
    if one.state == "waiting" and one.task is not None:
        return Finding(3, f"{name} waits for {one.task['waits_for']}")
    if one.switchover is not None and one.state in ("running", "disabled"):
        return Finding(3, f"{name}: a switchover is under way")
    if one.state != "running":
        return Finding(3, f"{name} is {'disabled' if one.state == 'disabled' else 'not served by any pgsub run'}")
    if not one.relations:
        return Finding(3, f"{name} has no tables")
    text = _late(one, max_lag) or _held_up(one)
    return None if text is None else Finding(8, f"{name}: {text}")


def _code(row: ErrorRow) -> int:
    cls = error_class(row)
    known = PublisherUnavailable | TargetUnavailable | ReplicationBroken | PublicationMissing | SparkUnusable
    return cls.exit_code if issubclass(cls, known) else ApplyError.exit_code


def _held_up(one: SubscriptionStatus) -> str | None:
    """Describe a table whose synchronization waits for a lock, None if there is none."""
    row = next((row for row in one.table_waits if row["seconds"] > STUCK_SECONDS), None)
    if row is None:
        return None
    table = f"{row['schemaname']}.{row['relname']}"
    return f'synchronization of table "{table}" has waited for {row["seconds"]:.0f} s for {row["for"]}'


def _late(one: SubscriptionStatus, max_lag: float | None) -> str | None:
    """Describe a lag above the threshold or, without a threshold, the silence of the apply worker."""
    waits = one.waits or {"seconds": 0.0, "for": None}
    waiting = f"it waits for {waits['for']}" if waits["for"] else ""
    if max_lag is None:
        if blocked_state.for_standby(waits) and waits["seconds"] > STUCK_SECONDS:
            return f"apply has waited for {waits['seconds']:.0f} s for {waits['for']}"
        text = f"the apply worker has given no sign of life for {waits['seconds']:.0f} s"
        return ", ".join(filter(None, (text, waiting))) if waits["seconds"] > STUCK_SECONDS else None
    # A new worker does not know its lag yet. Its task is shown slightly later than its launcher.
    begun = one.task["since"] if one.task is not None else None
    if (seconds_since(begun) if one.lag is None else one.lag) <= max_lag:
        return None
    lag = "is not known" if one.lag is None else f"is {one.lag:.1f} s, more than {max_lag:g} s"
    return "; ".join(filter(None, (f"lag {lag}", waiting)))
