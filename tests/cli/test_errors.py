"""Exit codes and the form of errors, whatever happens to the program and its streams."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from terminal import terminal

from pgsub.cli import main
from pgsub.cli.main import run
from pgsub.cli.output import console, documents, progress
from pgsub.commands.reporter import TableProgress
from pgsub.common import errors
from pgsub.common.errors import exit_code_table

ROOT = Path(__file__).parents[2]


def _classes(cls=errors.PgsubError):
    return [cls, *(found for sub in cls.__subclasses__() for found in _classes(sub))]


@pytest.mark.parametrize("page", sorted((ROOT / "man").glob("*.1")), ids=lambda page: page.name)
def test_the_exit_codes_of_the_classes_and_of_the_manual_page_are_the_same(page):
    section = page.read_text().partition(".SH EXIT STATUS\n")[2].partition(".SH ")[0]
    documented = {int(code) for code in re.findall(r"^\\fB(\d+)\\fR$", section, re.MULTILINE)}
    assert documented == {code for code, _ in exit_code_table()} | {130, 143}
    assert {cls.exit_code for cls in _classes()} | {0} == {code for code, _ in exit_code_table()}


def test_the_exit_code_table_is_the_promised_one():
    assert [code for code, _ in exit_code_table()] == list(range(14))


def test_an_unknown_subscription_is_code_3_in_text_and_document(pgsub, store, valid):
    ended = pgsub("status", "nobody", "--json")
    assert ended.returncode == 3
    said = "HINT:  See which exist.\npgsub status"
    assert ended.stderr == f'pgsub: error: subscription "nobody" does not exist\n{said}\n'
    error = valid("error", ended.stdout)["error"]
    assert (error["code"], error["class"]) == (3, "SubscriptionNotFound")


def test_a_usage_error_with_json_has_a_document_too(pgsub, valid):
    ended = pgsub("status", "--json", "--max-lag", "1s")
    assert ended.returncode == valid("error", ended.stdout)["error"]["code"] == 2


def test_a_state_folder_that_others_may_enter_is_code_10_with_the_command_that_mends_it(pgsub, store, folder):
    folder.chmod(0o755)
    ended = pgsub("status")
    assert ended.returncode == 10
    assert ended.stderr.splitlines()[-1].endswith(f"chmod 700 {folder}")


def test_detail_context_and_hint_follow_in_the_order_of_the_server(capfd):
    from pgsub.cli.output import console

    console.error(errors.PgsubError("it broke", detail="Here.", context="while trying", hint="Mend it.\nmend --now"))
    expected = "pgsub: error: it broke\nDETAIL:  Here.\nCONTEXT:  while trying\nHINT:  Mend it.\nmend --now\n"
    assert capfd.readouterr().err == expected


def test_control_characters_of_values_do_not_reach_the_terminal(capfd):
    from pgsub.cli.output import console

    console.error(errors.PgsubError("bad value", detail="Key (a)=(\x1b[2J\x9b31m) exists."))
    assert "\x1b" not in (text := capfd.readouterr().err) and "\x9b" not in text


def test_control_characters_in_a_traceback_or_in_the_name_of_a_table_under_way_do_not_reach_the_terminal(
    capfd, monkeypatch
):
    monkeypatch.setenv("PGSUB_DEBUG", "1")
    try:
        raise RuntimeError("\x1b[2J")
    except RuntimeError as unexpected:
        main._bug(unexpected, [])
    forging = TableProgress("public", "t\x1b[2J\nNOTICE:  forged", "d", 1, 2, 0, None, 0, 1)
    progress.Lines().show([forging])
    text = capfd.readouterr().err
    assert "Traceback" in text and "forged" in text
    assert "\x1b" not in text and "\nNOTICE" not in text


def test_an_unexpected_exception_is_code_12_and_shows_its_traceback_only_when_asked(capfd, valid):
    # a null byte in a path is what nobody expects and the system refuses
    assert run(["--state-dir", "a\0b", "status", "--json"]) == 12
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err and "--debug" in shown.err
    assert valid("error", shown.out)["error"]["class"] == "InternalError"
    assert run(["--state-dir", "a\0b", "status", "--debug"]) == 12
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.long
def test_an_interrupted_command_is_code_130_without_a_traceback(environment, store, folder):
    command = [sys.executable, "-m", "pgsub", "wait", "orders", "--for", "synced", "--even-if-stopped"]
    waiting = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    _until_open(waiting, folder)
    waiting.send_signal(signal.SIGINT)
    assert waiting.communicate()[1] == ""
    assert waiting.returncode == 130


def test_a_reader_that_goes_away_is_no_error_to_talk_about(environment, store):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "pgsub", "status", "--json"]
    ended = subprocess.run(command, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, "")


@pytest.mark.long
def test_a_closed_stdout_or_stderr_does_not_matter(environment, store):
    for closed in (">&-", "2>&-"):
        line = f"exec {sys.executable} -m pgsub status orders {closed}"
        ended = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True)
        assert (ended.returncode, ended.stderr) == (0, "")


def test_a_full_disk_behind_stdout_is_an_error(environment, store):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "pgsub", "status", "--json"]
        ended = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "pgsub: error: could not write to standard output: No space left on device\n"


@pytest.mark.parametrize(
    ("variables", "args", "coloured"),
    [
        ({}, [], True),
        ({"NO_COLOR": "1"}, [], False),
        ({"NO_COLOR": "1"}, ["--color", "always"], True),
        ({"PG_COLOR": "never"}, [], False),
        ({"TERM": "dumb"}, [], False),
        ({}, ["--color", "never"], False),
    ],
)
def test_colours_on_a_terminal_follow_option_and_environment(environment, store, variables, args, coloured):
    command = [*args, "enable", "nobody"]
    child = terminal(["-m", "pgsub", *command], {**environment, **variables})
    text = child.read()
    child.close()
    assert child.exitstatus == 3
    assert ("\x1b[01;31merror: " in text) is coloured
    assert ("\x1b" in text) is coloured


def test_there_are_no_colours_off_a_terminal(pgsub, store):
    assert "\x1b" not in pgsub("enable", "nobody").stderr
    assert "\x1b" in pgsub("--color", "always", "enable", "nobody").stderr


def _until_open(process, folder):
    """Wait until the process has the state store open: then it is past its start."""
    while process.poll() is None:
        links = Path(f"/proc/{process.pid}/fd")
        if any(os.path.realpath(link) == str(folder / "state.db") for link in links.iterdir()):
            return
        time.sleep(0.02)


def test_no_document_steers_a_terminal_or_turns_text_around(capfd):
    text = "\x1b[2J\x9b31m\x7f\u202e\u2066\u2028 é 🐘\n"
    documents.emit_document("status", {"name": text})
    documents.emit_error(errors.PgsubError(text))
    shown = capfd.readouterr().out
    assert console.printable(shown) == shown
    assert [part["name"] if "name" in part else part["error"]["message"] for part in _documents(shown)] == [text] * 2


def _documents(shown):
    first, brace, second = shown.partition("\n}\n")
    return json.loads(first + brace), json.loads(second)
