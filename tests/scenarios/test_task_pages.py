"""The commands of docs/tasks do what the pages show, typed by somebody who reads them in their order.

Page 13, which needs two versions of PostgreSQL, is in switchover/test_switchover_page.py; docs/spark.md in
spark/test_spark_page.py; README.md in test_readme.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import task_pages
from fix_program import ROOT, Cli, until
from fix_servers import Database, Pair
from installation import copy_sources, run_lines

from pgsub.demo.binaries import find_binaries, identity, server_folder, server_uid
from pgsub.demo.servers import free_port

#: Blocks that nobody types at a shell, by page and first line, and what is behind each.
_NOT_TYPED = {
    ("8-move.md", "sync_replication_slots = on"): "settings of a standby: scenarios/test_standbys.py has them",
    ("13-move-database.md", "#!/bin/sh -e"): "a script: switchover/test_switchover_page.py has a PgBouncer for it",
}
#: Commands in running text that no block of a page has with these options, and the tests that run them.
_IN_TEXT = {
    "alter --connection --publisher-upgraded": "scenarios/test_upgrades.py",
    "completion": "cli/test_docs.py",
    "demo": "demo/test_demo.py",
    "create --failover": "scenarios/test_standbys.py",
    "drop --keep-slot": "commands/test_drop.py",
    "reconcile --force": "commands/test_reconcile.py",
    "reconcile --slot-name": "commands/test_reconcile.py",
    "run --metrics-listen": "launcher/test_metrics.py",
    "status --watch": "cli/test_status.py",
    "switchover --abort --gone": "switchover/test_servers_gone.py",
    "switchover --gone": "switchover/test_servers_gone.py",
    "verify --from --repair": "commands/test_repair.py",
    "verify --rows": "switchover/test_servers_gone.py",
}
_INLINE = re.compile(r"`pgsub ([^`]+)`")
#: What a command does not become another one by.
_ANYWHERE = {"--yes", "--timeout"}
MakeCli = Callable[[str, str], Cli]


def test_every_block_of_the_task_pages_is_run_or_says_why_not() -> None:
    """A block in another language than console would be run by nobody."""
    left = [
        (page.name, block.partition("\n")[0])
        for page in task_pages.PAGES
        if page != task_pages.BEGIN
        for language, block in task_pages.blocks(page)
        if language != "console"
    ]
    unknown = [one for one in left if not any(one[0] == p and one[1].startswith(b) for p, b in _NOT_TYPED)]
    assert unknown == [] and len(left) == len(_NOT_TYPED)


def _form(words: list[str]) -> str:
    """Return a command and its options."""
    options = sorted({word.partition("=")[0] for word in words if word.startswith("--")} - _ANYWHERE)
    return " ".join([words[0], *options])


def test_every_command_in_the_text_of_the_pages_is_run_in_a_block_or_by_a_test_that_is_named() -> None:
    pages = [*task_pages.PAGES, ROOT / "README.md"]
    run = {_form(words) for page in pages for words in task_pages.typed(page)}
    told = {_form(found[1].split()) for page in pages for found in _INLINE.finditer(task_pages.prose(page))}
    # a part of the options stands for a command that is run whole
    left = {one for one in told - run if not any(set(one.split()) < set(other.split()) for other in run)}
    assert left == set(_IN_TEXT)
    for form, test in _IN_TEXT.items():
        text = (ROOT / "tests" / test).read_text()
        assert all(re.search(rf'["= ]{word}["= ]', text) for word in form.split()[1:] or [form]), form


@pytest.fixture
def user(make_cli: MakeCli, own_pair: Callable[..., Pair]) -> tuple[Cli, Pair]:
    """The program between two servers of its own, and the roles that the README creates."""
    pair = own_pair()
    pair.pubdb.execute("CREATE ROLE repl")
    pair.subdb.execute("CREATE ROLE app")
    return make_cli(pair.pubdb.conninfo, pair.subdb.conninfo), pair


@pytest.mark.long
@pytest.mark.own_spark  # its workers read the page's services
@pytest.mark.timeout(600)
def test_the_commands_of_the_task_pages_show_what_the_pages_show(user: tuple[Cli, Pair]) -> None:
    cli, pair = user
    serving = cli.launcher(env={"PGSUB_RETRY_SECONDS": "0.5"})
    servers = {"publisher": pair.pubdb, "promoted": pair.pubdb, "target": pair.subdb}

    def before(line: str) -> None:
        if "pgsub_held_table" in line:
            until(lambda: cli.sql("SELECT 1 FROM pgsub_held_table WHERE kept_changes > 0"))

    last = task_pages.run(cli, servers, task_pages.IN_ORDER, serving, before=before)
    assert last is not None and cli.stop(last) == 0
    assert pair.pubdb.rows("SELECT slot_name FROM pg_replication_slots") == []
    for database in (pair.pubdb, pair.subdb):
        assert database.rows("SELECT rolname FROM pg_roles WHERE rolname IN ('app', 'repl')") == []


@pytest.mark.long
@pytest.mark.own_spark  # its workers read the page's services
def test_the_commands_of_the_pages_of_a_lost_slot_and_a_filled_target_show_what_they_show(
    make_cli: MakeCli, pubdb: Database, subdb: Database
) -> None:
    cli = make_cli(pubdb.conninfo, subdb.conninfo)
    running = cli.launcher(env={"PGSUB_RETRY_SECONDS": "0.5"})
    services = {"publisher": pubdb, "target": subdb}
    task_pages.run(cli, services, [task_pages.PAGES[1], task_pages.SLOT])
    assert cli("drop", "sales", "--yes").returncode == 0
    pubdb.execute("DROP PUBLICATION shop")
    for database in (pubdb, subdb):
        database.execute("DROP TABLE orders")
    task_pages.run(cli, services, [task_pages.TAKE_OVER])
    assert cli("drop", "sales", "--yes").returncode == 0
    assert cli.stop(running) == 0


@pytest.mark.long
@pytest.mark.own_spark  # its workers read the page's services
def test_the_commands_of_the_page_of_a_copy_that_broke_off_show_what_it_shows(
    make_cli: MakeCli, pubdb: Database, subdb: Database, tmp_path: Path
) -> None:
    cli = make_cli(pubdb.conninfo, subdb.conninfo)
    log, go_on, marks = Path(cli.environment["HOME"], "pgsub.log"), tmp_path / "go on", tmp_path / "marks"
    marks.mkdir()
    cli.environment["PGSUB_CHUNK_BYTES"] = str(256 << 10)
    held_up = {
        "PGSUB_RETRY_SECONDS": "0.5",
        "PGSUB_FAILPOINTS": f"copy.after_commit=pause:{go_on}",
        "PGSUB_FAILPOINTS_DIR": str(marks),
    }
    running = cli.launcher("--log-file", str(log), env=held_up)
    fired = marks / "copy.after_commit"

    def before(line: str) -> None:
        if " --no-wait" in line:
            go_on.unlink(missing_ok=True)
            fired.unlink(missing_ok=True)
        elif " --view " in line:
            until(lambda: cli.sql("SELECT 1 FROM pg_stat_progress_copy WHERE chunks_done > 0"))
        elif "pg_terminate_backend" in line or "'mine'" in line:
            until(fired.exists)
        elif "pgsub wait" in line or "--runbook" in line:
            go_on.touch()
        if line.startswith("grep"):
            until(lambda: "continues where" in log.read_text())
        if "--runbook" in line:
            until(lambda: cli.sql("SELECT 1 FROM pgsub_error WHERE message LIKE 'could not continue%'"))

    task_pages.run(cli, {"publisher": pubdb, "target": subdb}, [task_pages.BROKE_OFF], before=before)
    assert cli("drop", "sales", "--yes").returncode == 0
    assert cli.stop(running) == 0


@pytest.fixture
def somebody() -> Iterator[Path]:
    """The home of the user who runs servers, who is not root."""
    folder = server_folder("pgsub-begin-")
    yield folder
    shutil.rmtree(folder)


def _bash(script: str, folder: Path, **variables: str) -> str:
    """Run a script as the servers' user; it may leave servers behind, which keep its streams."""
    (folder / "out").touch()
    os.chown(folder / "out", server_uid(), -1)
    with (folder / "out").open("w") as out:
        environment = {"HOME": str(folder), "LC_ALL": "C", **variables}
        words = ["bash", "-e", "-o", "pipefail", "-c", script]
        ended = subprocess.run(words, cwd=folder, env=environment, stdout=out, stderr=out, check=False, **identity())
    said = (folder / "out").read_text()
    assert ended.returncode == 0, said
    return said


@pytest.mark.long
def test_the_servers_of_the_first_page_start_can_be_reached_by_its_services_and_are_removed(somebody: Path) -> None:
    starting, services, stopping, _installing = task_pages.blocks(task_pages.BEGIN)
    first, rest = starting[1].split("\n", 1)
    python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shown = subprocess.run(
        ["bash", "-c", f"{first}\necho $PATH"], env={"PATH": python}, capture_output=True, text=True, check=True
    )
    found = Path(shown.stdout.partition(":")[0])
    assert {path.name for path in found.iterdir()} >= {"initdb", "pg_ctl", "psql", "pg_dump"}

    ports = {"5441": str(free_port()), "5442": str(free_port())}

    def here(text: str) -> str:
        return re.sub("|".join(ports), lambda port: ports[port[0]], text)

    path = f"{find_binaries()}:{os.environ['PATH']}"  # where this user may read them
    (somebody / ".pg_service.conf").write_text(here(services[1]))
    try:
        _bash(here(rest), somebody, PATH=path)
        for name in "publisher", "target":
            said = _bash(f"psql service={name} -Atc 'SHOW wal_level'", somebody, PATH=path)
            assert said == "logical\n"
    finally:
        _bash(here(stopping[1]), somebody, PATH=path)
    assert list(somebody.glob("server-*")) == []


@pytest.mark.long
def test_the_installation_of_the_first_page_gives_the_program(tmp_path: Path) -> None:
    """What the wheel needs is not fetched again: that of this interpreter has to do."""
    [installing] = [block for _, block in task_pages.blocks(task_pages.BEGIN) if "pip install" in block]
    copy_sources(tmp_path / "source")
    run_lines(installing.replace("/opt/pgsub", str(tmp_path / "pgsub")), tmp_path / "source")
    assert (tmp_path / "pgsub" / "bin" / "pgsub").exists()
