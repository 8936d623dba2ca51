"""The tables of ``pgsub status``: a row for each subscription, and the details of one."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pgsub.catalog.times import readable
from pgsub.cli.output import render
from pgsub.cli.output.progress import copied_share, duration, size
from pgsub.common.plural import counted

if TYPE_CHECKING:
    from pgsub.commands.status.subscription_status import SubscriptionStatus

_ORDER = "idfsr"
_ERRORS = ("apply_error_count", "sync_seq_error_count", "sync_table_error_count")
_CUT, _LEAST = "last_error", 20  #: the column that a narrow terminal cuts, and its minimum width
LEGEND = "srsubstate: i initialize, d data copy, f finished copy, s synchronized, r ready"


def summary(
    found: Sequence[SubscriptionStatus],
    *,
    expanded: bool = False,
    choice: Callable[[Sequence[str], Sequence[Mapping[str, Any]]], render.Content] | None = None,
) -> str:
    """Format subscriptions, one per row."""
    columns = ["subscription", "state", "tables", "received_lsn", "applied_lsn", "lag", "slot"]
    columns += ["prepared", *(["held"] if any(one.held for one in found) else []), "errors_total", "last_error"]
    if any(one.definition.skips for one in found):
        columns.append("to_be_skipped")
    if expanded:
        columns += ["on_conflict", "skipped", "unavailable"]
    shown: Sequence[Mapping[str, Any]] = [_summary_row(one) for one in found]
    if choice is not None:
        return render.rows(*choice(columns, shown), expanded=expanded)
    if expanded or not render.terminal():
        return render.rows(columns, shown, expanded=expanded)
    columns = [name for name in columns if any(row[name] not in (None, 0) for row in shown)]
    for left_out in (set(), {"received_lsn"}, {"received_lsn", "slot"}):
        kept = [name for name in columns if name not in left_out]
        table = render.rows(kept, [_fitting(kept, row, shown) for row in shown])
        if render.broadest(table) <= render.screen():
            return table
    return render.rows(columns, shown, expanded=True)


def _summary_row(one: SubscriptionStatus) -> dict[str, Any]:
    apply = next((worker for worker in one.workers if worker["worker_type"] == "apply"), {})
    counts = Counter(row["srsubstate"] for row in one.relations)
    stats = one.stats or {}
    return {
        "subscription": one.definition.name,
        "state": one.state,
        "tables": ", ".join(f"{counts[state]} {state}" for state in _ORDER if counts[state]) or "none",
        "held": ", ".join(f"{row['schemaname']}.{row['relname']}" for row in one.held) or None,
        "received_lsn": apply.get("received_lsn"),
        "applied_lsn": one.applied_lsn,
        "lag": None if one.lag is None else f"{one.lag:.1f} s",
        "slot": _slot(one) or ("lost" if one.slot_lost else one.definition.slot_name),
        "prepared": _prepared(one),
        "errors_total": sum(stats.get(name) or 0 for name in _ERRORS),
        "last_error": one.last_error,
        "to_be_skipped": ", ".join(one.definition.skips) or None,
        "on_conflict": ", ".join(one.definition.on_conflict) or None,
        "skipped": _skipped(one.skipped),
        "unavailable": ", ".join(one.definition.unavailable) or None,
    }


def _slot(one: SubscriptionStatus) -> str | None:
    """Format the publisher's status of the slot, with its time if that is old."""
    status: str | None = (one.slot or {}).get("wal_status")
    return f"{status} at {readable(one.slot_as_of)}" if status and one.slot_as_of else status


def _prepared(one: SubscriptionStatus) -> str | None:
    """Format the number of prepared transactions, None without two_phase."""
    return {"d": None, "p": "two_phase is pending"}.get(one.definition.two_phase, str(len(one.prepared)))


def _skipped(kept: Mapping[str, Any] | None) -> str | None:
    """Format the amount of rows in pgsub.skipped_change."""
    if kept is None:
        return None
    changes = counted(kept["waiting_changes"] + kept["replayed_changes"], "change")
    return f"{changes}, {kept['replayed_changes']} replayed, {size(kept['bytes'])}"


def _fitting(columns: Sequence[str], row: Mapping[str, Any], every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Cut the last error of a row so that the table fits the screen if possible."""
    others = [
        max(render.text_width(render.cell(one[name])) for one in (*every, {name: name}))
        for name in columns
        if name != _CUT
    ]
    room = max(render.screen() - sum(others) - 3 * len(others) - 2, _LEAST)
    text = row[_CUT] or ""
    return {**row, _CUT: text if len(text) <= room else f"{text[: room - 3]}..."}


def well(found: Sequence[SubscriptionStatus]) -> str | None:
    """Return a line saying that nothing needs attention, None if something does."""
    if not found or any(map(_needs_attention, found)):
        return None
    name = found[0].definition.name
    which = f'Subscription "{name}" is' if len(found) == 1 else f"All {len(found)} subscriptions are"
    tables = [row["srsubstate"] for one in found for row in one.relations]
    lag = max((one.lag for one in found if one.lag is not None), default=None)
    copied = f"{counted(len(tables), 'table')} synchronized"
    if any(state != "r" for state in tables):
        copied = f"{sum(state == 'r' for state in tables)} of {copied}"
    behind = "" if lag is None else ", nothing is waiting" if lag < 1 else f", {lag:.0f} s behind"
    return f"{which} running: {copied}{behind}."


def _needs_attention(one: SubscriptionStatus) -> bool:
    return (
        one.state != "running"
        or bool(one.errors or one.waits or one.table_waits or one.switchover)
        or not one.relations
    )


def troubled(found: Sequence[SubscriptionStatus]) -> Iterator[str]:
    """Yield a line for each subscription that needs attention, with its state and the next command."""
    for one in found:
        if one.next:
            yield f'Subscription "{one.definition.name}" is in state {one.state}. The next command is:\n{one.next}'


def details(one: SubscriptionStatus) -> Iterator[str]:
    """Yield tables about one subscription: its relations, and everything that needs attention."""
    yield relations(one)
    if one.sequences:
        yield sequences(one)
    if one.blocked:
        yield blocked(one)
    elif one.state == "waiting":
        yield waiting(one)
    elif one.next:
        yield render.rows(["next"], [{"next": one.next}], expanded=True)
    for shown, make in (
        (one.waits, waits),
        (one.table_waits, table_waits),
        (one.held, held),
        (one.copies, copies),
        (one.applying is not None and one.applying["sessions"] != 1, applying),
    ):
        if shown:
            yield make(one)


def applying(one: SubscriptionStatus) -> str:
    """Format the number of the target's sessions that apply, with the reason."""
    return render.rows(["sessions", "why"], [one.applying or {}], expanded=True)


def relations(one: SubscriptionStatus) -> str:
    """Format the tables of a subscription, one per row."""
    table = render.rows(["schemaname", "relname", "srsubstate", "srsublsn"], one.relations)
    unready = any(row["srsubstate"] != "r" for row in one.relations)
    return f"{table}\n{LEGEND}" if unready and render.terminal() else table


def sequences(one: SubscriptionStatus) -> str:
    """Format the sequences of a subscription after the last attempt to synchronize them, one per row."""
    columns = ["sequence", "srsubstate", "publisher_value", "target_value", "ahead", "taken_at"]
    columns += ["problem"] if any(row["problem"] for row in one.sequences) else []
    shown = [{**row, "sequence": f"{row['schemaname']}.{row['relname']}"} for row in one.sequences]
    return render.rows(columns, shown)


def copies(one: SubscriptionStatus) -> str:
    """Format the tables that are being copied, one per row."""
    columns = ["table", "done", "bytes", "rows", "chunks", "rate", "left"]
    return render.rows(columns, [_copy_row(row) for row in one.copies])


def _copy_row(row: Mapping[str, Any]) -> dict[str, Any]:
    done, total = row["bytes_processed"], row["bytes_total"]
    rate, left = row["bytes_per_second"], row["seconds_left"]
    return {
        "table": f"{row['schemaname']}.{row['relname']}",
        "done": copied_share(row) or None,
        "bytes": size(done) + (f" of {size(total)}" if total else ""),
        "rows": _copied_rows(row),
        "chunks": f"{row['chunks_done']} of {row['chunks_total']}",
        "rate": None if rate is None else f"{size(rate)}/s",
        "left": None if left is None else duration(left),
    }


def _copied_rows(row: Mapping[str, Any]) -> str | None:
    """Format the rows of a copy. Their number is known after the first commit of a chunk."""
    done, total = row["tuples_processed"], row["tuples_total"]
    if not done and row["bytes_processed"]:
        return f"of {total}" if total else None
    return f"{done} of {total}" if total else str(done)


def held(one: SubscriptionStatus) -> str:
    """Format the held tables of a subscription, one per row."""
    shown = [
        {
            "held": f"{row['schemaname']}.{row['relname']}",
            "since": readable(row["held_at"]),
            "kept_changes": row["kept_changes"],
            "kept": size(row["kept_bytes"]),
            "next": "being applied" if row["releasing"] else _release(one, row),
        }
        for row in one.held
    ]
    return render.rows(["held", "since", "kept_changes", "kept", "next"], shown)


def _release(one: SubscriptionStatus, row: Mapping[str, Any]) -> str:
    return shlex.join(["pgsub", "alter", one.definition.name, "--release", f"{row['schemaname']}.{row['relname']}"])


def waits(one: SubscriptionStatus) -> str:
    """Format the wait of an apply worker."""
    found = one.waits or {}
    shown = {"waits_since": readable(found["since"]), "waits_for": found["for"] or "a statement on the target"}
    return render.rows(["waits_since", "waits_for"], [shown], expanded=True)


def table_waits(one: SubscriptionStatus) -> str:
    """Format the tables whose synchronization waits for a lock, one per row."""
    shown = [
        {
            "table": f"{row['schemaname']}.{row['relname']}",
            "waits_since": readable(row["since"]),
            "waits_for": row["for"],
        }
        for row in one.table_waits
    ]
    return render.rows(["table", "waits_since", "waits_for"], shown)


def waiting(one: SubscriptionStatus) -> str:
    """Format what the task of the apply worker waits for."""
    found = one.task or {}
    shown = {"waiting_since": readable(found["silent_since"]), "waits_for": found["waits_for"], "next": one.next}
    return render.rows(["waiting_since", "waits_for", "next"], [shown], expanded=True)


def blocked(one: SubscriptionStatus) -> str:
    """Format why a subscription is blocked, one line per fact."""
    found = one.blocked or {}
    shown = {**found, "waiting": found["waiting_bytes"], "retained": found["retained_bytes"]}
    for name in ("waiting", "retained"):
        shown[name] = None if shown[name] is None else size(shown[name])
    count = found["waiting_transactions"]
    if count is not None:
        least = "at least " if found["waiting_at_least"] else ""
        behind = f"{least}{counted(count, 'transaction')} behind it"
        shown["waiting"] = ", ".join(filter(None, (behind, shown["waiting"])))
    lost = found["slot_lost_in"]
    shown["slot_lost_in"] = None if lost is None else duration(lost)
    shown["blocked_since"] = readable(found["since"])
    columns = ["blocked_since", "restarts", "position", "finish_lsn", "reason", "waiting", "retained"]
    columns += [] if lost is None else ["slot_lost_in"]
    if one.slot_as_of is not None:
        shown["slot_seen_at"] = readable(one.slot_as_of)
        columns.append("slot_seen_at")
    return render.rows([*columns, "next"], [shown], expanded=True)
