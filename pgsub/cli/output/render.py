"""Results as text: tables in psql's aligned format on a terminal, tab-separated and complete elsewhere.

Mirrors ``src/fe_utils/print.c``: ``print_aligned_text``, ``print_aligned_vertical``, ``print_unaligned_text``.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pgsub.cli.output.console import pasted, printable
from pgsub.cli.output.progress import duration, size
from pgsub.common.errors import UsageError
from pgsub.common.plural import counted
from pgsub.protocol.lsn import parse_lsn

if TYPE_CHECKING:
    from pgsub.commands.status.status import SubscriptionStatus

_ORDER = "idfsr"
_CUT, _LEAST = "last_error", 20  #: the column that is cut on a narrow terminal, and what is left of it at least
LEGEND = "srsubstate: i initialize, d data copy, f finished copy, s synchronized, r ready"


#: names of columns, and rows by them
Content = tuple[Sequence[str], Sequence[Mapping[str, Any]]]


def choice(
    columns: Sequence[str], content: Sequence[Mapping[str, Any]], wanted: Sequence[str] | None, order: str | None
) -> Content:
    """Take some columns of a table, and sort its rows.

    :param wanted: names of columns; None for all.
    :param order: the column to sort by, with - in front descending; what has no value comes last.
    :raises UsageError: there is no such column.
    """
    descending, by = (order or "").startswith("-"), (order or "").lstrip("-")
    for name in (*(wanted or ()), *([by] if order else ())):
        if name not in columns:
            raise UsageError(f'column "{name}" does not exist', hint=f"Columns are {', '.join(columns)}.")
    if order:
        missing = [row for row in content if row.get(by) is None]
        known = sorted((row for row in content if row.get(by) is not None), key=lambda row: _rank(row[by]))
        content = [*(reversed(known) if descending else known), *missing]
    shown = columns if wanted is None else wanted
    return shown, [{name: row.get(name) for name in shown} for row in content]


def _rank(value: Any) -> tuple[int, Any]:
    """Return what values of a column are sorted by: numbers and LSNs as numbers, the rest as text."""
    if isinstance(value, (int, float)):
        return 0, value
    if re.fullmatch(r"[0-9A-F]{1,8}/[0-9A-F]{1,8}", str(value)):
        return 0, parse_lsn(value)
    return 1, str(value)


def summary(
    found: Sequence[SubscriptionStatus],
    *,
    expanded: bool = False,
    choice: Callable[[Sequence[str], Sequence[Mapping[str, Any]]], Content] | None = None,
) -> str:
    """Show subscriptions, one a row."""
    columns = ["subscription", "state", "tables", "received_lsn", "applied_lsn", "lag", "slot"]
    columns += ["prepared", *(["held"] if any(one.held for one in found) else []), "errors_total", "last_error"]
    if any(one.definition.skips for one in found):
        columns.append("to_be_skipped")
    if expanded:
        columns += ["on_conflict", "skipped", "unavailable"]
    shown: Sequence[Mapping[str, Any]] = [_summary_row(one) for one in found]
    if choice is not None:
        return rows(*choice(columns, shown), expanded=expanded)
    if expanded or not _terminal():
        return rows(columns, shown, expanded=expanded)
    columns = [name for name in columns if any(row[name] not in (None, 0) for row in shown)]
    for left_out in (set(), {"received_lsn"}, {"received_lsn", "slot"}):
        kept = [name for name in columns if name not in left_out]
        table = rows(kept, [_fitting(kept, row, shown) for row in shown])
        if _broadest(table) <= _screen():
            return table
    return rows(columns, shown, expanded=True)


def _fitting(columns: Sequence[str], row: Mapping[str, Any], every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Cut the last error of a row, so that the table fits the screen if that can be had."""
    others = [max(_width(cell(one[name])) for one in (*every, {name: name})) for name in columns if name != _CUT]
    room = max(_screen() - sum(others) - 3 * len(others) - 2, _LEAST)
    text = row[_CUT] or ""
    return {**row, _CUT: text if len(text) <= room else f"{text[: room - 3]}..."}


def well(found: Sequence[SubscriptionStatus]) -> str | None:
    """Say in one line that nothing needs attention; None where something does."""
    if not found or any(one.state != "running" or one.errors or one.waits or not one.relations for one in found):
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


def details(one: SubscriptionStatus) -> Iterator[str]:
    """Yield tables about one subscription: its relations, and whatever needs attention."""
    yield relations(one)
    if one.blocked:
        yield blocked(one)
    elif one.state == "waiting":
        yield waiting(one)
    elif one.next:
        yield rows(["next"], [{"next": one.next}], expanded=True)
    for shown, make in ((one.waits, waits), (one.held, held), (one.copies, copies)):
        if shown:
            yield make(one)


def relations(one: SubscriptionStatus) -> str:
    """Format the tables of one subscription, one a row."""
    table = rows(["schemaname", "relname", "srsubstate", "srsublsn"], one.relations)
    unready = any(row["srsubstate"] != "r" for row in one.relations)
    return f"{table}\n{LEGEND}" if unready and _terminal() else table


def copies(one: SubscriptionStatus) -> str:
    """Format the tables of one subscription that are being copied, one a row."""
    columns = ["table", "done", "bytes", "rows", "chunks", "rate", "left"]
    return rows(columns, [_copy_row(row) for row in one.copies])


def held(one: SubscriptionStatus) -> str:
    """Format the tables of one subscription that are on hold, one a row."""
    shown = [
        {
            "held": f"{row['schemaname']}.{row['relname']}",
            "since": row["held_at"],
            "kept_changes": row["kept_changes"],
            "kept": size(row["kept_bytes"]),
            "next": "being applied" if row["releasing"] else _release(one, row),
        }
        for row in one.held
    ]
    return rows(["held", "since", "kept_changes", "kept", "next"], shown)


def _release(one: SubscriptionStatus, row: Mapping[str, Any]) -> str:
    return shlex.join(["pgsub", "alter", one.definition.name, "--release", f"{row['schemaname']}.{row['relname']}"])


def waits(one: SubscriptionStatus) -> str:
    """Format the wait of a silent apply worker."""
    found = one.waits or {}
    shown = {"silent_since": found["since"], "waits_for": found["for"] or "a statement on the target"}
    return rows(["silent_since", "waits_for"], [shown], expanded=True)


def waiting(one: SubscriptionStatus) -> str:
    """Format what the task of the apply worker waits for."""
    found = one.task or {}
    shown = {"waiting_since": found["silent_since"], "waits_for": found["waits_for"], "next": one.next}
    return rows(["waiting_since", "waits_for", "next"], [shown], expanded=True)


def blocked(one: SubscriptionStatus) -> str:
    """Format why a subscription is blocked, a line for each fact."""
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
    shown["blocked_since"] = found["since"]
    columns = ["blocked_since", "restarts", "position", "finish_lsn", "reason", "waiting", "retained"]
    return rows([*columns, "slot_lost_in", "next"], [shown], expanded=True)


def _copy_row(row: Mapping[str, Any]) -> dict[str, Any]:
    done, total = row["bytes_processed"], row["bytes_total"]
    rate, left = row["bytes_per_second"], row["seconds_left"]
    return {
        "table": f"{row['schemaname']}.{row['relname']}",
        "done": f"{min(done / total, 0.99):.0%}" if total else None,
        "bytes": size(done) + (f" of {size(total)}" if total else ""),
        "rows": _copied_rows(row),
        "chunks": f"{row['chunks_done']} of {row['chunks_total']}",
        "rate": None if rate is None else f"{size(rate)}/s",
        "left": None if left is None else duration(left),
    }


def _copied_rows(row: Mapping[str, Any]) -> str | None:
    """Format the rows of a copy; their number is known once a piece of the table is committed."""
    done, total = row["tuples_processed"], row["tuples_total"]
    if not done and row["bytes_processed"]:
        return f"of {total}" if total else None
    return f"{done} of {total}" if total else str(done)


def rows(columns: Sequence[str], content: Sequence[Mapping[str, Any]], *, expanded: bool = False) -> str:
    """Format rows as a table, or one after the other with a line for each column."""
    texts = [[cell(row.get(column)) for column in columns] for row in content]
    for line in texts:
        line[:] = [pasted(text) if column == "next" else text for column, text in zip(columns, line, strict=True)]
    if expanded:
        return _vertical(columns, texts)
    if _terminal():
        return _aligned(columns, texts)
    return "\n".join("\t".join(line) for line in [list(columns), *texts])


def _terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def _screen() -> int:
    return shutil.get_terminal_size().columns


def _broadest(text: str) -> int:
    return max(map(_width, text.split("\n")))


def cell(value: Any) -> str:
    """Format a value as psql does: nothing for NULL, t and f, and no line breaks or tabs."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, (list, dict)):
        value = json.dumps(value, ensure_ascii=False)
    return printable(str(value)).replace("\t", "\\t").replace("\n", "\\n")


def _summary_row(one: SubscriptionStatus) -> dict[str, Any]:
    apply = next((worker for worker in one.workers if worker["worker_type"] == "apply"), {})
    counts = Counter(row["srsubstate"] for row in one.relations)
    stats, slot = one.stats or {}, one.slot or {}
    return {
        "subscription": one.definition.name,
        "state": one.state,
        "tables": ", ".join(f"{counts[state]} {state}" for state in _ORDER if counts[state]) or "none",
        "held": ", ".join(f"{row['schemaname']}.{row['relname']}" for row in one.held) or None,
        "received_lsn": apply.get("received_lsn"),
        "applied_lsn": one.applied_lsn,
        "lag": None if one.lag is None else f"{one.lag:.1f} s",
        "slot": slot.get("wal_status") or one.definition.slot_name,
        "prepared": _prepared(one),
        "errors_total": (stats.get("apply_error_count") or 0) + (stats.get("sync_table_error_count") or 0),
        "last_error": one.errors[0].message if one.errors else None,
        "to_be_skipped": ", ".join(one.definition.skips) or None,
        "on_conflict": ", ".join(one.definition.on_conflict) or None,
        "skipped": _skipped(one.skipped),
        "unavailable": ", ".join(one.definition.unavailable) or None,
    }


def _skipped(kept: Mapping[str, Any] | None) -> str | None:
    """Format the size of pgsub.skipped_change."""
    if kept is None:
        return None
    changes = counted(kept["waiting_changes"] + kept["replayed_changes"], "change")
    return f"{changes}, {kept['replayed_changes']} replayed, {size(kept['bytes'])}"


def _prepared(one: SubscriptionStatus) -> str | None:
    """Format the number of prepared transactions; None without two_phase."""
    return {"d": None, "p": "two_phase is pending"}.get(one.definition.two_phase, str(len(one.prepared)))


def _aligned(columns: Sequence[str], texts: Sequence[Sequence[str]]) -> str:
    widths = [max(map(_width, column)) for column in zip(columns, *texts, strict=True)]
    head = " | ".join(name.center(width) for name, width in zip(columns, widths, strict=True))
    lines = [" " + head.rstrip(), "-" + "-+-".join("-" * width for width in widths) + "-"]
    for line in texts:
        padded = [text + " " * (width - _width(text)) for text, width in zip(line, widths, strict=True)]
        lines.append(" " + " | ".join(padded).rstrip())
    count = len(texts)
    return "\n".join([*lines, f"({counted(count, 'row')})"])


def _vertical(columns: Sequence[str], texts: Sequence[Sequence[str]]) -> str:
    width = max(map(len, columns))
    blocks = []
    for number, line in enumerate(texts, 1):
        blocks.append(f"-[ RECORD {number} ]" + "-" * width)
        blocks += [f"{name:<{width}} | {text}".rstrip() for name, text in zip(columns, line, strict=True)]
    return "\n".join(blocks) or "(0 rows)"


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)
