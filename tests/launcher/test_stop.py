"""A stop is seen at once in every phase of a launcher's start, each held here; what has not begun is not waited for."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import patience
import pytest
from fix_program import Cli, until
from fix_proxy import Link, Proxy
from fix_servers import Database

pytestmark = pytest.mark.own_spark

MakeCli = Callable[[str, str], Cli]
#: The workers' interpreter, which begins once a file is there.
HELD_PYTHON = """#!/bin/sh
: > "{folder}/begun"
while [ ! -e "{folder}/go" ] && kill -0 $PPID; do sleep 0.1; done
exec {python} "$@"
"""


def _stops_without_a_word(cli: Cli, running: object) -> None:
    """The launcher ends well, with no error, and gives up on nothing that it waited for."""
    assert cli.stop(running) == 0  # type: ignore[arg-type]
    log = running.log.read_text()  # type: ignore[attr-defined]
    assert "ERROR" not in log and "did not stop in time" not in log, log


def test_a_stop_is_seen_while_spark_starts(
    cli: Cli, tables: tuple[Database, Database], tmp_path: Path, reached: Callable[[str], None]
) -> None:
    assert cli.create("s", "--no-wait").returncode == 0
    slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database() AND slot_name ~ '_sync_'"
    held = {"PGSUB_FAILPOINTS": f"thread.spark_start=pause:{tmp_path / 'never'}"}
    running = cli.launcher(env=held)
    until(lambda: tables[0].value(slots) > 0)  # the copy is prepared, and waits for Spark; so does apply
    _stops_without_a_word(cli, running)
    reached("thread.spark_start")


@pytest.mark.long
def test_a_stop_is_seen_while_the_process_of_a_worker_starts(
    cli: Cli, tables: tuple[Database, Database], tmp_path: Path
) -> None:
    control = "SELECT epoch, claimed_by FROM pgsub.control WHERE worker = 0"
    assert cli.create("s", "--no-wait").returncode == 0
    python = tmp_path / "python"
    python.write_text(HELD_PYTHON.format(folder=tmp_path, python=sys.executable))
    python.chmod(0o755)
    running = cli.launcher(env={"PYSPARK_PYTHON": str(python)})
    until((tmp_path / "begun").exists)
    [(epoch, _)] = until(lambda: [row for row in tables[1].rows(control) if row[0] > 0])
    running.send_signal(signal.SIGTERM)
    until(lambda: tables[1].rows(control) == [(epoch + 1, None)])  # a process that begins after all is refused
    (tmp_path / "go").touch()
    assert running.wait(patience.SECONDS) == 0


@pytest.mark.long
def test_an_interpreter_that_never_starts_holds_up_no_end_and_is_not_left(
    cli: Cli, tables: tuple[Database, Database], tmp_path: Path
) -> None:
    assert cli.create("s", "--no-wait").returncode == 0
    python, pid_file = tmp_path / "python", tmp_path / "pid"
    python.write_text(f'#!/bin/sh\necho $$ > "{pid_file}"\nexec sleep 100000\n')
    python.chmod(0o755)
    running = cli.launcher(env={"PYSPARK_PYTHON": str(python)})
    until(lambda: pid_file.exists() and pid_file.read_text())
    _stops_without_a_word(cli, running)
    until(lambda: not Path(f"/proc/{pid_file.read_text().strip()}").exists())


def _stalled_target(
    make_cli: MakeCli, proxy: Callable[[str], Proxy], tables: tuple[Database, Database]
) -> tuple[Cli, Proxy]:
    line = proxy(f"{tables[1].conninfo} connect_timeout=0")
    cli = make_cli(tables[0].conninfo, line.conninfo)
    assert cli.create("s", "--no-wait").returncode == 0
    return cli, line


@pytest.mark.long
def test_a_stop_is_seen_while_the_target_is_connected_to(
    make_cli: MakeCli, proxy: Callable[[str], Proxy], tables: tuple[Database, Database]
) -> None:
    cli, line = _stalled_target(make_cli, proxy, tables)
    before = len(line._links)
    line.stall()
    running = cli.launcher()
    until(lambda: len(line._links) > before)
    _stops_without_a_word(cli, running)


@pytest.mark.long
@pytest.mark.parametrize("statement", [b"pg_try_advisory_lock", b"pg_control_system"])
def test_a_stop_is_seen_while_the_target_is_asked_for_the_first_time(
    make_cli: MakeCli, proxy: Callable[[str], Proxy], tables: tuple[Database, Database], statement: bytes
) -> None:
    cli, line = _stalled_target(make_cli, proxy, tables)

    def stall(link: Link, data: bytes) -> str:
        if statement in data:
            line.stall()
            link.notes.add("held")
        return "none"

    line.harm = stall  # type: ignore[assignment]
    running = cli.launcher()
    until(lambda: any("held" in link.notes for link in line._links))
    _stops_without_a_word(cli, running)
