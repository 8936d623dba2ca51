"""Manual pages and completions are those of the command tree, and they work."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from manual_pages import PAGES, example_lines

from pgsub.cli.app import program
from pgsub.cli.command_tree.tree import describe
from pgsub.cli.docs import SCRIPTS, files, write

ROOT = Path(__file__).parents[2]
#: Examples in which a shell does something besides: they need no server.
SHELL = [line for page in PAGES for line in example_lines(page) if re.match(r"sqlite3 |source |.* [|>] ", line)]


def test_what_is_committed_is_what_the_command_tree_gives(tmp_path):
    write(tmp_path)
    for folder in ("man", "completions"):
        made = {path.name: path.read_text() for path in (tmp_path / folder).iterdir()}
        committed = {path.name: path.read_text() for path in (ROOT / folder).iterdir()}
        assert made == committed, f"run: {Path(sys.executable).name} -m pgsub.cli.docs"


def test_generating_twice_gives_the_same_bytes():
    assert files() == files()


@pytest.mark.parametrize("command", describe(program()).commands, ids=lambda command: command.name)
def test_every_option_is_in_the_manual_page_and_in_every_completion(command):
    page = (ROOT / "man" / f"pgsub-{command.name}.1").read_text().replace(r"\-", "-")
    scripts = {name: (ROOT / "completions" / name).read_text() for name in SCRIPTS.values()}
    for option in command.options:
        assert option.shared or option.names[0] in page
        assert option.names[0] in scripts["pgsub.bash"] and option.names[0] in scripts["_pgsub"]
        assert f"-l {option.names[0][2:]} " in scripts["pgsub.fish"]


@pytest.mark.parametrize("page", sorted((ROOT / "man").glob("*.1")), ids=lambda page: page.name)
def test_manual_pages_have_the_sections_of_the_server_in_their_order(page):
    sections = [line[4:] for line in page.read_text().splitlines() if line.startswith(".SH ")]
    assert sections == [
        "NAME",
        "SYNOPSIS",
        "DESCRIPTION",
        "OPTIONS",
        "EXIT STATUS",
        "ENVIRONMENT",
        "FILES",
        "EXAMPLES",
        "SEE ALSO",
    ]


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
@pytest.mark.parametrize("page", sorted((ROOT / "man").glob("*.[157]")), ids=lambda page: page.name)
def test_manual_pages_are_formatted_without_a_warning(page):
    ended = subprocess.run(["groff", "-ww", "-man", "-Tutf8", "-z", str(page)], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(("shell", "name"), SCRIPTS.items())
def test_the_completion_command_prints_the_committed_script(pgsub, shell, name):
    assert pgsub("completion", shell).stdout == (ROOT / "completions" / name).read_text()


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_accepts_its_script():
    assert subprocess.run(["zsh", "-n", str(ROOT / "completions" / "_pgsub")]).returncode == 0


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_accepts_its_script():
    assert subprocess.run(["fish", "-n", str(ROOT / "completions" / "pgsub.fish")]).returncode == 0


@pytest.fixture
def shell(environment, tmp_path):
    """Run a script that finds the program by its name."""
    program = tmp_path / "bin" / "pgsub"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m pgsub "$@"\n')
    program.chmod(0o755)
    path = {"PATH": f"{program.parent}{os.pathsep}{environment['PATH']}", "HOME": str(tmp_path)}

    def run(script):
        words = ["bash", "-o", "pipefail", "-c", script]
        return subprocess.run(words, env={**environment, **path}, capture_output=True, text=True)

    return run


@pytest.mark.long
@pytest.mark.parametrize("line", SHELL)
def test_the_examples_that_a_shell_does_more_in_are_run_by_one(shell, store, folder, tmp_path, line):
    if line.startswith("sqlite3 ") and shutil.which("sqlite3") is None:
        pytest.skip("sqlite3 is not installed")
    (tmp_path / ".config" / "fish" / "completions").mkdir(parents=True)
    line = line.replace("~/.local/state/pgsub", str(folder)).replace("/var/lib/node_exporter", str(tmp_path))
    ended = shell(f"{line}; complete -p pgsub" if line.startswith("source ") else line)
    assert (ended.returncode, ended.stderr) == (0, "")
    written = re.search(r" > (\S+)", line)
    file = written and Path(written[1].replace("~", str(tmp_path)))
    said = file.read_text() if file else ended.stdout
    assert {"sqlite3": "public|b|d\n", "source": "complete -F _pgsub"}.get(line.split()[0], "pgsub") in said


@pytest.fixture
def complete(shell):
    """What bash offers for a line."""

    def offer(*words):
        quoted = " ".join(f"'{word}'" for word in words)
        script = (
            f"source {ROOT}/completions/pgsub.bash; compopt() {{ :; }}; COMP_WORDS=({quoted});"
            f' COMP_CWORD={len(words) - 1}; _pgsub; printf "%s\\n" "${{COMPREPLY[@]}}"'
        )
        ended = shell(script)
        assert ended.stderr == ""
        return ended.stdout.split("\n")[:-1]

    return offer


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["pgsub", "st"], ["status"]),
        (["pgsub", "--sta"], ["--state-dir"]),
        (["pgsub", "--color", "a"], ["auto", "always"]),
        (["pgsub", "create", "x", "--streaming", "o"], ["off", "on"]),
        (["pgsub", "create", "x", "--no-co"], ["--no-connect", "--no-copy-data", "--no-copy-atomic"]),
        (["pgsub", "wait", "orders", "--for", "s"], ["synced"]),
        (["pgsub", "status", "--view", "pg_stat_p"], ["pg_stat_progress_copy"]),
        (["pgsub", "completion", ""], ["bash", "zsh", "fish"]),
        (["pgsub", "wait", "--timeout", ""], [""]),
        (["pgsub", "enable", ""], ["bills", "orders"]),
        (["pgsub", "--color", "never", "drop", "o"], ["orders"]),
        (["pgsub", "create", ""], [""]),
        (["pgsub", "conflicts", ""], ["list", "show", "replay", "prune"]),
        (["pgsub", "conflicts", "list", "o"], ["orders"]),
        (["pgsub", "conflicts", "--table", "=", "a.b", "list", "--limit", "5", "o"], ["orders"]),
        (["pgsub", "disable-on-error", "b"], ["bills"]),
        (["pgsub", "disable-on-error", "bills", "o"], ["on", "off"]),
    ],
)
def test_bash_offers_what_fits(complete, store, words, offered):
    assert complete(*words) == offered


def test_bash_offers_the_names_of_the_folder_that_the_line_names(complete, store, folder, tmp_path):
    assert complete("pgsub", "--state-dir", str(tmp_path / "other"), "enable", "") == [""]
    assert not (tmp_path / "other").exists()


def test_a_name_with_special_characters_is_quoted_and_never_run(complete, store, tmp_path):
    store.alter(5, name="a b$(touch x)")
    assert complete("pgsub", "enable", "a") == [r"a\ b\$\(touch\ x\)"]
