"""Who opens a session on the target asks whether its ledger can be trusted before reading it."""

from __future__ import annotations

import re

import sources

_OPENS = re.compile(r"\btarget\.open_session\(|(?<![.\w])open_session\(sub\b")
_CHECKS = re.compile(r"ledger_guard\.(?:check|guard)\(|\bviews=False\b")
#: Modules that do not check, with the reason.
_UNCHECKED = {
    "apply/worker/executor_requirements.py": "it closes the session at once",
    "commands/switchover/rehearsal.py": "the command's first session has checked",
    "commands/switchover/transfer/pause_sessions.py": "the command's first session has checked",
}


def test_no_session_on_the_target_reads_a_ledger_that_it_has_not_checked() -> None:
    texts = sources.modules()
    unchecked = {name for name, text in texts.items() if _OPENS.search(text) and not _CHECKS.search(text)}
    assert unchecked == _UNCHECKED.keys(), unchecked ^ _UNCHECKED.keys()
