"""What README, pages, manual pages, examples and alert rules tell people to type is understood by the program."""

import re
import shlex
from pathlib import Path

import pytest
from command_lines import understood
from manual_pages import PAGES as MANUAL
from manual_pages import examples, typed
from typer import TyperException

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ALERTS = ROOT / "contrib" / "pgsub-alerts.yml"
_BLOCK = re.compile(r"^ *```(?:sh|console)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(pgsub\s[^`]+)`")
_TOLD = re.compile(r"(?:[Rr]un|by|it): (pgsub [^,\"]*)|, or (pgsub [^,\"]*)")
#: In running text the words that do not matter may be left out.
_LEFT_OUT = ("Missing argument", "Missing option", "Option '--master' requires")
#: What is not to be typed as it stands.
_FORM = re.compile(r"\.\.\.|…|\|")


def _of_page(path):
    for block in _BLOCK.findall(path.read_text()):
        yield from typed(block)


def _in_the_text_of(path):
    text = path.read_text()
    for found in _INLINE.findall(re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        words = shlex.split(found)[1:]
        if len(words) > 1:  # one word names the command
            yield words


def _of_alerts(path):
    for found in _TOLD.findall(re.sub(r"\{\{.*?\}\}", "x", path.read_text())):
        yield shlex.split("".join(found))[1:]


def _refused(commands, *tolerated):
    """What the parser says to each of them."""
    for words in commands:
        if _FORM.search(" ".join(words)):
            continue
        try:
            understood(*words)
        except TyperException as error:
            if not error.format_message().startswith(tolerated or "\0"):
                yield words, error.format_message()


def test_the_parser_refuses_what_is_wrong():
    wrong = [["nosuch"], ["run", "--nosuch"], ["status", "--max-lag", "quux"], ["wait", "s"], ["conflicts"]]
    assert [words for words, _ in _refused(wrong)] == wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_are_understood(page):
    assert list(_refused(_of_page(page))) == []
    assert list(_refused(_in_the_text_of(page), *_LEFT_OUT)) == []


@pytest.mark.parametrize("page", MANUAL, ids=lambda page: page.name)
def test_the_examples_of_a_manual_page_are_understood(page):
    found = list(examples(page))
    assert found or page.name in {"pgsub-conflicts.7", "pgsub.toml.5"}
    assert list(_refused(found)) == []


def test_the_commands_of_the_alert_rules_are_understood():
    found = list(_of_alerts(ALERTS))
    assert len(found) >= 12 and list(_refused(found)) == []
