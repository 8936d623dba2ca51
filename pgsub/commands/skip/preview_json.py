"""Previews as plain values: what ``--json`` prints and what a terminal is shown a part of."""

from __future__ import annotations

from typing import Any

from pgsub.apply.preview.simulation import Finding
from pgsub.apply.preview.slot_reader import Header
from pgsub.catalog.times import wire_time
from pgsub.commands.skip.preview import Preview
from pgsub.protocol.lsn import format_lsn


def transaction(header: Header) -> dict[str, Any]:
    """Which transaction."""
    return {
        "xid": header.xid,
        "kind": header.kind.value,
        "gid": header.gid,
        "begin_lsn": format_lsn(header.begin_lsn),
        "finish_lsn": format_lsn(header.finish_lsn),
        "end_lsn": format_lsn(header.end_lsn),
        "at": wire_time(header.commit_ts),
        "bytes": header.size,
    }


def document(found: Preview) -> dict[str, Any]:
    """Everything that a preview found."""
    assert found.header is not None
    error = found.error
    return {
        "transaction": transaction(found.header),
        "rows_mode": found.rows,
        "verdict": found.verdict,
        "changes": found.changes,
        "lost": found.lost,
        "not_compared": found.not_compared,
        "unexplained": found.unexplained,
        "error": None if error is None else {"message": error.message, "detail": error.detail},
        "tables": [
            {"schemaname": schema, "relname": name, **totals} for (schema, name), totals in sorted(found.totals.items())
        ],
        "rows": [row(one) for one in found.findings],
        "rows_omitted": found.omitted,
    }


def row(one: Finding) -> dict[str, Any]:
    """One change."""
    return {
        "number": one.number,
        "operation": one.message_type,
        "schemaname": one.schemaname,
        "relname": one.relname,
        "outcome": one.outcome,
        "conflict": one.conflict,
        "key": _values(one.key),
        "remote": _values(one.remote),
        "local": _values(one.local),
        "differs": list(one.differs),
        "existing": [
            {"index": other.index, "row": dict(other.row), "differs": list(other.differs)} for other in one.existing
        ],
        "reason": one.reason,
        "rule": one.rule,
    }


def _values(values: Any) -> dict[str, str | None] | None:
    return None if values is None else dict(values)
