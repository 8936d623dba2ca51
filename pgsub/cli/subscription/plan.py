"""The output of a dry run: the tables and how they would be copied, as a table or as a JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pgsub.cli.output import console, render
from pgsub.cli.output.documents import emit, emit_document
from pgsub.cli.output.progress import size

if TYPE_CHECKING:
    from pgsub.commands.preflight.findings import Preflight, Table

_COLUMNS = ("table", "copy", "chunks", "rows", "size", "target", "reason")
_MODES = {"none": "no", "atomic": "one transaction", "chunked": "chunks", "adopt": "what differs"}
_EMPTY = {True: "empty", False: "not empty", None: None}


def show(command: str, name: str, found: Preflight, document: dict[str, Any] | None) -> None:
    """Print what the command would do. Its warnings have already been shown.

    :param command: create or refresh.
    :param document: print this as JSON instead, unless it is None.
    """
    if document is not None:
        emit_document(command, {"dry_run": True, "subscription": name, **document})
        return
    if command == "refresh" and not found.tables:
        console.notice("no table would be added; nothing was changed")
        return
    emit(render.rows(_COLUMNS, [_row(table) for table in found.tables]))
    compared = [table for table in found.tables if table.mode == "adopt"]
    copied = [table for table in found.tables if table.mode not in ("none", "adopt")]
    shown = [_total(compared, found, "compared")] if compared else []
    if copied or not compared:
        shown.append(_total(copied, found, "copied"))
    console.notice("; ".join([*shown, "nothing was changed"]))


def _total(tables: Sequence[Table], found: Preflight, done: str) -> str:
    about = size(sum(table.remote.bytes for table in tables))
    return f"{len(tables)} of {len(found.tables)} tables, about {about}, would be {done}"


def _row(table: Table) -> dict[str, object]:
    rows = int(table.remote.reltuples) if table.remote.reltuples >= 0 else None
    return {
        "table": table.name,
        "copy": _MODES[table.mode],
        "chunks": table.chunks or None,
        "rows": rows,
        "size": size(table.remote.bytes),
        "target": _EMPTY[table.empty],
        "reason": table.reason,
    }
