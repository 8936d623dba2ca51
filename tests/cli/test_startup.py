"""Commands that move no data load nothing that is only needed for it, and may be interrupted while they load it."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pgsub.catalog.rows import RelationRow

HEAVY = ("pyspark", "py4j", "psycopg", "numpy", "rich")

CODE = """
import sys
from pgsub.cli.main import run
code = run(sys.argv[1:])
print(",".join(name for name in %r if name in sys.modules), file=sys.stderr)
sys.exit(code)
"""


def _loaded(environment, *args, code=0):
    ended = subprocess.run(
        [sys.executable, "-c", CODE % (HEAVY,), *args], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == code, ended.stderr
    return ended.stderr.splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["create", "--help"],
        ["status"],
        ["status", "--json"],
        ["status", "orders", "--check"],
        ["enable", "orders"],
        ["disable", "orders"],
        ["--version"],
        ["completion", "bash"],
    ],
    ids=" ".join,
)
def test_commands_that_need_no_server_load_no_driver_and_no_spark(environment, store, served, args):
    assert _loaded(environment, *args) == ""


def test_waiting_for_tables_loads_no_driver(environment, store):
    store.put_relations(5, [RelationRow(1, "d", None, "public", "a")])
    words = ("wait", "orders", "--for", "synced", "--even-if-stopped", "--timeout", "100ms")
    assert _loaded(environment, *words, code=8) == ""


def test_names_for_completion_need_not_even_the_option_parser(environment, store):
    code = (
        "import sys; from pgsub.cli.names import complete; complete(['subscriptions']); print('typer' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ended.stdout.split() == ["bills", "orders", "False"]


def test_dropping_loads_no_spark(environment, store):
    code = CODE % (("pyspark",),)
    args = ["drop", "nobody", "--if-exists", "--yes"]
    ended = subprocess.run([sys.executable, "-c", code, *args], env=environment, capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1] == ""


SCRIPT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]["pgsub"]
#: A sitecustomize.py of a user who interrupts the import of one module.
INTERRUPT = """
import os, signal, sys

class Finder:
    def find_spec(name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize("module", ["pgsub.cli.main", "typer", "pgsub.cli.app"])
@pytest.mark.parametrize(
    "words",
    [["-m", "pgsub"], ["-c", "from {} import {} as main; main()".format(*SCRIPT.split(":"))]],
    ids=["module", "script"],
)
def test_a_command_that_is_interrupted_while_it_is_imported_ends_quietly(environment, tmp_path, words, module):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT.format(module=module))
    ended = subprocess.run(
        [sys.executable, *words, "--version"],
        env={**environment, "PYTHONPATH": f"{tmp_path}:{environment['PYTHONPATH']}"},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
