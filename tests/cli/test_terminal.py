"""Names and words of servers control no terminal, and begin no line, wherever they are printed."""

from __future__ import annotations

import re
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console, Group

from pgsub.catalog.rows import COPY, ErrorRow
from pgsub.cli.operate import switchover
from pgsub.cli.output import console, documents
from pgsub.cli.output.live import Screen
from pgsub.commands.switchover.outcome import Choice, Outcome
from pgsub.common.errors import PgsubError
from pgsub.publisher import slots

_EVIL = "a\x1b[2J\x07b\x0bc\x85d\u2028e\u202ef"
_WRITTEN = r"a\x1b[2J\x07b\x0bc\x85d\u2028e\u202ef"
_HINT = f"Run this on the target:\nDROP TABLE {_EVIL};"
_PROBLEM = PgsubError(_EVIL, detail=_EVIL, hint=_HINT)


def _switchover() -> None:
    one = {"server": "giving", "severity": "error", "message": _EVIL, "detail": _EVIL, "hint": _HINT}
    switchover._print(Outcome(_EVIL, _EVIL, "none", said=_EVIL, choices=[Choice(_EVIL, _EVIL)], obstacles=[one]))


_PRINTED = {
    "error": (lambda: console.error(_PROBLEM), 3, 4),
    "warning": (lambda: console.warning(_EVIL, _EVIL, _HINT), 3, 4),
    "notice": (lambda: console.notice(_EVIL, _HINT), 2, 3),
    "result": (lambda: documents.emit(_EVIL), 1, 1),
    "document of an error": (lambda: documents.emit_error(_PROBLEM), 3, 12),
    "obstacles": (_switchover, 7, 7),
}


@pytest.mark.parametrize("where", _PRINTED)
def test_no_text_of_others_controls_a_terminal_or_begins_a_line(where: str, capfd: pytest.CaptureFixture[str]) -> None:
    show, times, lines = _PRINTED[where]
    show()
    shown = "".join(capfd.readouterr())
    if where.startswith("document"):
        assert "\\u2028" in shown and shown.isascii()
    else:
        assert shown.count(_WRITTEN) == times
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", shown)
    assert shown.count("\n") == len(shown.splitlines()) == lines


def test_no_word_of_a_publisher_controls_the_screen() -> None:
    definition = SimpleNamespace(subid=1, name=_EVIL)
    copy = {"bytes_total": 1, "bytes_processed": 0, "seconds_left": None, "bytes_per_second": None, "command": COPY}
    one = SimpleNamespace(
        definition=definition,
        applied_lsn=None,
        state="error",
        lag=None,
        relations=[],
        slot={"wal_status": _EVIL, "retained_bytes": 0},
        slot_as_of=None,
        stats={},
        held=[],
        copies=[{**copy, "schemaname": "s", "relname": _EVIL}],
        waits_for=_EVIL,
        errors=[ErrorRow("apply", "ApplyError", _EVIL)],
        next=_EVIL,
    )
    drawn = StringIO()
    parts = Screen(coloured=False)._subscription(one)  # type: ignore[arg-type]
    Console(file=drawn, width=200, no_color=True).print(Group(*parts))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", drawn.getvalue())
    assert drawn.getvalue().count(r"a\x1b[2J") == 6


def test_a_state_of_a_slot_that_no_server_has_is_none() -> None:
    row = dict.fromkeys(slots.SlotState.__slots__)
    for said, known in ((_EVIL, None), ("lost", "lost"), ("reserved", "reserved")):
        assert slots._state({**row, "wal_status": said}).wal_status == known
