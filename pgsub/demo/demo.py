"""``pgsub demo``: two private servers, a subscription, continuous changes, and a proof that both sides are equal.

The order of events is that of the server's own test, ``src/test/subscription/t/001_rep_changes.pl``. The ordinary
commands create, serve and show the subscription.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg

from pgsub.commands.reporter import Reporter
from pgsub.commands.signals import undone_by_signals
from pgsub.commands.status.status import status
from pgsub.commands.status.wait import WaitOptions, wait
from pgsub.commands.subscription.create import create
from pgsub.commands.subscription.definition import CreateOptions
from pgsub.commands.verify.result import EQUAL, TableVerdict, Verification
from pgsub.commands.verify.verify import VerifyOptions, verify
from pgsub.common import server_words
from pgsub.common.errors import PgsubError, TimeoutExpired
from pgsub.demo import schema
from pgsub.demo.binaries import find_binaries, own_program
from pgsub.demo.stage import Stage
from pgsub.demo.workload import Workload

NAME = "demo"  #: name of the subscription and its slot
SYNC_WORKERS = 3

_NOTE_SECONDS = 2.0  #: seconds between two lines about live changes
_CATCH_UP_SECONDS = 600.0
_CHECK_SECONDS = 5.0
_NAMED = 3  #: maximum number of differing rows per table in an error
_END = "Stop everything and remove its files"

_BEHIND = """
SELECT pg_size_pretty(pg_wal_lsn_diff(pg_current_wal_flush_lsn(), replay_lsn))
  FROM pg_stat_replication WHERE application_name = %s AND replay_lsn IS NOT NULL
"""


Say = Callable[[str], None]  #: writes a line for the user
ShowTable = Callable[[Sequence[str], Sequence[Mapping[str, Any]]], None]  #: writes columns and rows as a result


def run_demo(*, keep: bool, rows: int, reporter: Reporter, say: Say, show_table: ShowTable) -> None:
    """Run the demo, and remove everything at the end.

    :param keep: leave the servers and the subscription, and print how to use them.
    :param rows: rows of the largest table.
    :raises PgsubError: both sides are not equal, or a step failed.
    """
    with undone_by_signals(), Stage() as stage:
        show = _Show(stage, schema.sizes(rows), reporter, say, show_table)
        try:
            show.servers()
            with Workload(stage.conninfo("publisher"), show.sizes) as writers:
                show.synchronize(writers)
                show.live(writers)
            found = show.verify()
        except KeyboardInterrupt:
            show.step(_END)
            raise
        except psycopg.Error as error:
            raise PgsubError("a server of the demo failed", detail=server_words.said(error).message) from error
        if keep:
            show.keep()
        else:
            show.step(_END)
    _judge(found)


class _Show:
    """The numbered steps."""

    def __init__(
        self, stage: Stage, sizes: Mapping[str, int], reporter: Reporter, say: Say, show_table: ShowTable
    ) -> None:
        self.sizes = sizes
        self._stage = stage
        self._reporter = reporter
        self._say = say
        self._show_table = show_table
        self._number = 0

    def step(self, text: str) -> None:
        """Announce a step."""
        self._number += 1
        self._say(f"{self._number}. {text}")

    def _note(self, text: str) -> None:
        self._say(f"   {text}")

    def servers(self) -> None:
        """Start two servers with tables on both and rows on one. Spark starts meanwhile."""
        stage = self._stage
        self.step(f"Start two PostgreSQL servers in {stage.folder}")
        stage.start_launcher()
        stage.start_servers()
        for side, server in stage.servers.items():
            self._note(f"{side:9} (PostgreSQL {server.version}): {stage.conninfo(side)}")
        with stage.connect("publisher") as publisher, stage.connect("target") as target:
            schema.create(publisher, target)
            self.step("Create the tables on both sides, fill them on the publisher")
            rows = schema.fill(publisher, self.sizes)
            (tables,) = publisher.execute("SELECT count(*) FROM pg_publication_tables").fetchone() or (0,)
        self._note(f"{rows:,} rows in {tables} tables")

    def synchronize(self, writers: Workload) -> None:
        """Create the subscription while the writers are running."""
        stage = self._stage
        self.step(f'Create subscription "{NAME}" and synchronize, while writers change the publisher')
        self._note(f"{program()} run --state-dir {stage.state_dir} &")
        self._note(f"{program()} create {NAME} --state-dir {stage.state_dir} \\")
        self._note(f"    --connection '{stage.conninfo('publisher')}' \\")
        self._note(f"    --target '{stage.conninfo('target')}' \\")
        self._note(f"    --publication {schema.PUBLICATION} --max-sync-workers {SYNC_WORKERS}")
        stage.await_launcher()
        began = time.monotonic()
        options = CreateOptions(
            name=NAME,
            connection=stage.conninfo("publisher"),
            target=stage.conninfo("target"),
            publications=(schema.PUBLICATION,),
            state_dir=stage.state_dir,
            settings={"max_sync_workers": SYNC_WORKERS},
        )
        try:
            create(options, reporter=self._reporter)
        except PgsubError:
            stage.check_launcher()  # its log says why it ended
            raise
        if any(relation["srsubstate"] != "r" for relation in status(stage.state_dir, NAME)[0].relations):
            raise KeyboardInterrupt  # create ends normally when it is stopped
        writers.check()
        self._note(f"all tables ready after {time.monotonic() - began:.1f} s; meanwhile {writers.tally.text()}")

    def live(self, writers: Workload) -> None:
        """Show live changes for a while, stop the writers, and wait until everything is applied."""
        seconds = 2 + min(self.sizes["orders"] / 10_000, 10)
        self.step(f"Apply live changes for {seconds:.0f} s")
        before, began = writers.rounds(), time.monotonic()
        note_at = began + _NOTE_SECONDS
        # The current round has begun before, so a whole one is awaited.
        while time.monotonic() < began + seconds or writers.rounds() < before + 2:
            time.sleep(0.1)
            writers.check()
            self._stage.check_launcher()
            if time.monotonic() >= note_at:
                note_at += _NOTE_SECONDS
                self._note(f"{writers.tally.rows():,} rows changed since the start, {self._behind()}")
        writers.stop()
        self._note(f"since the start {writers.tally.text()}")
        self.step("Stop the writers and wait until everything is applied")
        began = time.monotonic()
        self._catch_up()
        self._note(f"caught up after {time.monotonic() - began:.1f} s")

    def _behind(self) -> str:
        """Return how far the subscription is behind, as the publisher sees it."""
        with self._stage.connect("publisher") as publisher:
            row = publisher.execute(_BEHIND.encode(), (NAME,)).fetchone()
        return "apply is not connected" if row is None else f"apply is {row[0]} of WAL behind"

    def _catch_up(self) -> None:
        deadline = time.monotonic() + _CATCH_UP_SECONDS
        while True:
            try:
                return wait(WaitOptions(NAME, self._stage.state_dir, "caught-up", timeout=_CHECK_SECONDS))
            except TimeoutExpired:
                self._stage.check_launcher()
                if time.monotonic() > deadline:
                    raise

    def verify(self) -> Verification:
        """Show the status, and whether both sides have the same rows."""
        stage = self._stage
        command = ["status", NAME, "--state-dir", str(stage.state_dir)]
        self.step(f"{program()} {' '.join(command)}")
        subprocess.run(**own_program(*command), check=False)
        self.step(f"{program()} verify {NAME} --state-dir {stage.state_dir}")
        began = time.monotonic()
        found = verify(VerifyOptions(NAME, stage.state_dir), reporter=self._reporter)
        columns, rows = ("table", "publisher", "target", "result"), []
        for table in found.tables:
            result = f"{table.differing} rows differ" if table.differing else table.outcome
            counts = (0, 0) if table.result is None else (table.result.publisher_rows, table.result.target_rows)
            rows.append(dict(zip(columns, (table.name, *counts, result))))
        self._show_table(columns, rows)
        self._note(f"compared in {time.monotonic() - began:.1f} s")
        return found

    def keep(self) -> None:
        """Leave the servers running and print how to use them."""
        stage = self._stage
        self.step("Stop the launcher; the servers go on")
        script = stage.keep()
        state = f"--state-dir {stage.state_dir}"
        psql = find_binaries() / "psql"
        paragraphs = [
            ("serve the subscription again (Ctrl-C ends it)", f"{program()} run {state}"),
            ("see where it stands", f"{program()} status {NAME} {state}"),
            *(
                (f"query the {side}", f"{shlex.quote(str(psql))} '{stage.conninfo(side)}'")
                for side in stage.servers
                if psql.is_file()
            ),
            ("drop the subscription and its slot", f"{program()} drop {NAME} {state} --yes"),
            ("stop the servers and remove all their files", f"sh {script}"),
        ]
        for side in stage.servers:
            self._note(f"{side}: {stage.conninfo(side)}")
        for purpose, command in paragraphs:
            self._note(f"To {purpose}:")
            self._note(f"  {command}")


def _judge(found: Verification) -> None:
    different = [table for table in found.tables if table.outcome != EQUAL or table.differing]
    if different:
        lines = [line for table in different for line in _lines(table)]
        compared = all(table.result is not None for table in different)
        said = f"{len(different)} of {len(found.tables)} tables differ" + ("" if compared else ", or were not compared")
        raise found.error or PgsubError(said, detail="\n".join(lines))


def _lines(table: TableVerdict) -> Iterator[str]:
    """Yield lines with the reason why a table was not compared, and with its first differing rows."""
    if table.reason:
        yield f"{table.name}: {table.reason}"
    for one in table.result.differences.listed[:_NAMED] if table.result is not None else ():
        rows = (("publisher", one.publisher), ("target", one.target))
        yield f"{table.name}: {'; '.join(f'on the {side}: {row}' for side, row in rows if row is not None)}"


def program() -> str:
    """Return how the user can call this program, for commands to paste."""
    script = Path(sys.argv[0])
    if script.name != "pgsub":
        return f"{shlex.quote(sys.executable)} -m pgsub"
    found = shutil.which("pgsub")
    on_path = found is not None and script.exists() and script.samefile(found)
    return "pgsub" if on_path else shlex.quote(str(script.absolute()))
