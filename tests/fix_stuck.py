"""A subscription of the program's own state store whose workers run in threads of the test: it gets stuck at will."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from fix_engine import Task
from fix_program import Cli, valid

from pgsub.apply.worker import feedback, worker
from pgsub.apply.worker.loop import WorkerResult
from pgsub.apply.worker.start import WorkerSpec
from pgsub.catalog.rows import ErrorRow
from pgsub.catalog.store import StateStore
from pgsub.cli import main
from pgsub.cli.general_options import current
from pgsub.common.errors import PgsubError
from pgsub.protocol.lsn import format_lsn, parse_lsn
from pgsub.target.ledger import worker_takeover
from pgsub.target.session import connect as target

if TYPE_CHECKING:
    from fix_servers import Database


def in_process(state: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a command line without a process of its own, which is most of the time that one takes."""
    out, err = io.StringIO(), io.StringIO()
    given = {"PGSUB_STATE_DIR": str(state)}  # with --state-dir every command to paste would name it
    with (
        mock.patch.dict(os.environ, given),
        mock.patch.object(current, "state_dir_option", None),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = main.run(args)
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


class Stuck:
    """Subscription ``s``, disabled, every table ``r``.

    :ivar cli: the program with its state store.
    """

    def __init__(self, cli: Cli, pubdb: Database, subdb: Database, *options: str) -> None:
        self.cli, self.pubdb, self.subdb = cli, pubdb, subdb
        self.ok(*cli.words("s", "--no-copy-data", "--no-wait", *options))
        self.ok("disable", "s")
        self.subid = int(subdb.value("SELECT subid FROM pgsub.subscription"))

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run a command line of the program."""
        return in_process(self.cli.state, *args)

    def ok(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run a command line that ends well."""
        ended = self.run(*args)
        assert ended.returncode == 0, ended.stderr
        return ended

    def start(self, **more: Any) -> Task:
        """An apply worker under a new epoch."""
        with StateStore.open(self.cli.state) as store:
            sub = store.subscription("s")
        with target.connect(sub.target, f"pgsub {self.subid} launcher 0") as session:
            claim = worker_takeover.take_over(session, self.subid, worker_takeover.APPLY)
        assert sub.slot_name is not None
        return Task(worker.run, [WorkerSpec(sub, claim, sub.slot_name, sub.name, **more)])

    def apply(self, *statements: str) -> PgsubError | None:
        """Run on the publisher, each string in a transaction of its own; then apply until now, or until an error.

        The error is recorded as the launcher does.
        """
        for statement in statements:
            self.pubdb.execute(statement)
        now = parse_lsn(str(self.pubdb.value("SELECT pg_current_wal_flush_lsn()")))
        task = self.start(until_lsn=now)
        try:
            result: list[WorkerResult] = task.result()
        except PgsubError as error:
            with StateStore.open(self.cli.state) as store:
                store.record_error(self.subid, ErrorRow.of(error, "apply"))
            return error
        assert result[0].outcome == "reached"
        return None

    def ends(self, statement: str) -> tuple[int, int]:
        """Run one transaction on the publisher; where WAL was before and after it."""
        before = self.wal()
        self.pubdb.execute(statement)
        return before, self.wal()

    def wal(self) -> int:
        """Where the publisher's WAL ends."""
        return parse_lsn(str(self.pubdb.value("SELECT pg_current_wal_flush_lsn()")))

    def preview(self, *words: str, code: int, command: str = "skip-lsn") -> dict[str, Any]:
        """The validated document of a preview, which ends with this code."""
        ended = self.run(command, "s", *words, "--preview", "--json")
        assert ended.returncode == code, ended.stderr
        return valid(command, ended.stdout)

    def position(self) -> str:
        """The ledger's remote_lsn."""
        return str(self.subdb.value("SELECT remote_lsn FROM pgsub.progress WHERE worker = 0"))

    def journal(self, action: str) -> list[dict[str, Any]]:
        """What the journal has of one command, oldest first."""
        rows = self.cli.sql("SELECT detail FROM pgsub_journal WHERE action = ? ORDER BY id", action)
        return [json.loads(text) for (text,) in rows]


MakeStuck = Callable[..., Stuck]


@pytest.fixture
def stuck(cli: Cli, tables: tuple[Database, Database], monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStuck]:
    """Makes :class:`Stuck` between the test's two databases, with options of ``create``."""
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)  # there is no launcher to wait for
    pubdb, subdb = tables

    def make(*options: str) -> Stuck:
        return Stuck(cli, pubdb, subdb, *options)

    yield make
    for database in (pubdb, subdb):
        for (gid,) in database.rows("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"):
            database.execute(f"ROLLBACK PREPARED '{gid}'")


def lsn(value: int) -> str:
    """As the command line takes it."""
    return format_lsn(value)
