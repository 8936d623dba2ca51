"""Names of tables are chosen by others: in a command that is to be pasted into a shell they are quoted."""

from __future__ import annotations

import re
from pathlib import Path

import pgsub

_UNQUOTED = re.compile(r"--(?:resync|hold|release|table) \{(?!(?:word|shlex\.quote)\()")


def test_no_command_to_paste_has_a_table_in_it_that_is_not_quoted() -> None:
    root = Path(pgsub.__file__).parent
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        for line in path.read_text().splitlines()
        if _UNQUOTED.search(line)
    ]
    assert found == []


def test_no_record_of_the_log_is_put_together_by_hand() -> None:
    """Names and texts of others could begin a field of it; errors.said() keeps them from that."""
    root = Path(pgsub.__file__).parent
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"\\n(DETAIL|HINT|CONTEXT):", line)
    ]
    assert found == []
