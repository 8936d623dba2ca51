"""Names of tables are chosen by others: in a command that is to be pasted into a shell they are quoted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pgsub
from pgsub.cli import app, console, documents, render
from pgsub.cli.reporting import LogReporter
from pgsub.cli.settings import current
from pgsub.errors import PgsubError

assert app.app  # whose commands are known then

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


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> str:
    """A state folder that was given on the command line."""
    monkeypatch.setattr(current, "state_dir_option", "/srv/my state")
    return "--state-dir '/srv/my state'"


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("HINT:  Enable it first:\npgsub enable s", ["pgsub enable s"]),
        ("it holds once the subscription is enabled: pgsub enable 'a b'", ["pgsub enable 'a b'"]),
        ("pgsub disable s && pgsub run --until-caught-up", ["pgsub disable s", "pgsub run --until-caught-up"]),
        ("Try this:\n  pgsub conflicts replay s 1\nor that", ["pgsub conflicts replay s 1"]),
        ("HINT:  Start pgsub run again: it counts.\npgsub create --help", []),
        ("pgsub status s --state-dir /x\npgsub --state-dir FOLDER status", []),
    ],
)
def test_a_command_names_the_state_folder_that_was_given(elsewhere: str, text: str, commands: list[str]) -> None:
    expected = text
    for one in commands:
        expected = expected.replace(one, f"{one} {elsewhere}")
    assert console.pasted(text) == expected
    current.state_dir_option = None
    assert console.pasted(text) == text


def test_every_way_out_completes_commands(elsewhere: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    problem = PgsubError("odd", hint="Look:\npgsub status s")
    console.error(problem)
    console.warning("odd", hint="Look:\npgsub status s")
    console.notice("odd: pgsub status s", hint="Look:\npgsub status s")
    documents.emit_error(problem)
    documents.emit_document("status", {"subscriptions": [{"next": "pgsub status s", "errors": [problem.__dict__]}]})
    documents.emit_document("status", {"runbook": [{"commands": ["pgsub status s"], "text": "pgsub status s"}]})
    print(render.rows(["next", "name"], [{"next": "pgsub status s", "name": "pgsub status s"}]))
    LogReporter(tmp_path / "log").log("ERROR", problem.said())
    said = "".join(capfd.readouterr()) + (tmp_path / "log").read_text()
    assert said.count(f"pgsub status s {elsewhere}") == said.count("pgsub status s") - 2 == 10


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
