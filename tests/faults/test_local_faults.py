"""Whatever befalls the machine of pgsub, its disk above all, apply goes on, success is never claimed, nothing spins."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fix_program import Cli, one_error, until
from fix_servers import Database
from forked import Started
from thorough import only_thorough

pytestmark = [pytest.mark.own_spark, pytest.mark.long]

_names = itertools.count(1)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")


class Home:
    """A state folder and its launcher, for all tests of the module: its Spark is started once.

    :ivar log: the launcher's log file.
    """

    def __init__(self, cli: Cli) -> None:
        self.cli = cli
        self.log = cli.state.parent / "log"
        self.points = cli.state.parent / "points"
        self.points.mkdir()
        self.release = cli.state.parent / "release"
        (self.points / "state.write").touch()  # armed when it is removed
        env = {
            "PGSUB_FAILPOINTS": f"state.write=pause:{self.release}",
            "PGSUB_FAILPOINTS_DIR": str(self.points),
            "PGSUB_RETRY_SECONDS": "0.5",
        }
        self.running: Started = cli.launcher("--log-file", str(self.log), env=env)

    def logged(self, text: str) -> int:
        """How often the log has it, or what stands in for the log."""
        return (self.log.read_text() + self.running.log.read_text()).count(text)  # type: ignore[union-attr]


class Served:
    """A subscription of tables a and b, served by the launcher."""

    def __init__(self, home: Home, name: str, pubdb: Database, subdb: Database) -> None:
        self.home, self.cli, self.name, self.pubdb, self.subdb = home, home.cli, name, pubdb, subdb
        self._numbers = iter(range(1000, 10_000))
        assert self.cli.create(name, "--no-wait").returncode == 0
        assert self.cli("wait", name, "--for", "caught-up", "--timeout", "2m").returncode == 0

    def applied(self) -> None:
        """What is written on the publisher now arrives."""
        number = next(self._numbers)
        self.pubdb.execute("INSERT INTO a VALUES (%s, 'x')", number)
        until(lambda: self.subdb.value("SELECT count(*) FROM a WHERE id = %s", number) == 1)

    def conflict(self) -> int:
        """A conflict that does not stop apply, a missing row, on its way to the records; the transaction's end."""
        number = next(self._numbers)
        self.pubdb.execute("INSERT INTO a VALUES (%s, 'x')", number)
        until(lambda: self.subdb.value("SELECT count(*) FROM a WHERE id = %s", number) == 1)
        self.subdb.execute("DELETE FROM a WHERE id = %s", number)
        self.pubdb.execute("DELETE FROM a WHERE id = %s", number)
        until(lambda: self.unmirrored() or self.recorded())
        return number

    def recorded(self) -> int:
        """Conflicts that the state store has."""
        try:
            return int(self.cli.sql("SELECT count(*) FROM pgsub_conflict WHERE subname = ?", self.name)[0][0])
        except sqlite3.DatabaseError:
            return 0

    def unmirrored(self) -> int:
        """Those that wait in the ledger."""
        return int(self.subdb.value("SELECT count(*) FROM pgsub.event"))

    def confirmed(self) -> str:
        """How far the publisher was told."""
        query = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = %s"
        return str(self.pubdb.value(query, self.name))

    def warned(self, *texts: str) -> bool:
        """Whether ``status`` says that something cannot be written."""
        said = self.cli("status", self.name, "--check")
        return said.returncode == 10 and all(text in said.stderr for text in ("Replication continues", *texts))

    def well(self) -> bool:
        """Whether it says that all is well."""
        return self.cli("status", self.name, "--check").returncode == 0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """The launcher, which is still there after the last test and ends well."""
    base = tmp_path_factory.mktemp("home")
    cli = Cli(base / "state", base, "", "")
    try:
        made = Home(cli)
        yield made
        assert made.running.poll() is None, made.log.read_text()
        assert cli.stop(made.running) == 0
    finally:
        cli.close()


@pytest.fixture
def it(home: Home, tables: tuple[Database, Database]) -> Iterator[Served]:
    """A subscription of its own for each test."""
    home.cli.connection, home.cli.target = (database.conninfo for database in tables)
    served = Served(home, f"s{next(_names)}", *tables)
    yield served
    assert home.cli("drop", served.name, "--yes").returncode == 0


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Somebody keeps the state store, as a program that forgot its transaction does."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


@contextlib.contextmanager
def no_room(process: Started) -> Iterator[None]:
    """No file of a process may grow, as on a full disk; nobody else is concerned, and it takes no root."""
    before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def hanging(it: Served) -> Iterator[None]:
    """A write to the state store does not come back."""
    (it.home.points / "state.write").unlink()
    until((it.home.points / "state.write").exists)
    yield
    it.home.release.touch()


def test_a_state_store_that_cannot_be_written_stops_nothing_and_catches_up(
    it: Served, reached: Callable[[str], None]
) -> None:
    """Locked, on a full disk, on one that hangs: apply goes on, conflicts wait in the ledger, and feedback for them."""
    for number, trouble in enumerate((locked(it.cli.state / "state.db"), no_room(it.home.running), hanging(it))):
        it.applied()
        until(lambda: it.well())
        assert it.recorded() == number
        with trouble:
            it.conflict()
            it.applied()
            until(lambda: it.warned("state store"))
            confirmed = it.confirmed()
            it.applied()
            assert (it.unmirrored(), it.recorded(), it.confirmed()) == (1, number, confirmed)
        until(lambda n=number: it.recorded() == n + 1 and it.unmirrored() == 0)
        until(lambda before=confirmed: it.confirmed() != before)
        until(it.well)
    reached("state.write")
    # each once, however often it was tried to record it; without room in any file there is no log either
    assert it.home.logged("conflict detected on relation") == 2
    assert it.home.logged("can be used again") == 3
    assert it.home.logged("records before this could not be written here") >= 1
    it.applied()


def test_a_state_store_that_is_removed_is_made_anew_with_what_is_served(it: Served) -> None:
    for name in ("state.db", "state.db-wal", "state.db-shm"):
        (it.cli.state / name).unlink()
    it.applied()
    until((it.cli.state / "state.db").exists)
    until(lambda: it.cli.states() == {"a": "r", "b": "r"})
    until(it.well)
    assert it.home.logged("was put back into state store") == 1
    it.conflict()
    until(lambda: it.recorded() == 1)


def test_a_state_store_that_is_damaged_stops_nothing_and_may_be_restored_meanwhile(it: Served) -> None:
    path = it.cli.state / "state.db"
    with contextlib.closing(sqlite3.connect(path)) as store, contextlib.closing(sqlite3.connect(":memory:")) as copy:
        store.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        store.backup(copy)
        size = path.stat().st_size
        with path.open("r+b") as file:  # what was checkpointed is read from here
            file.seek(100)
            file.write(b"\xff" * (size - 100))
        it.applied()
        until(lambda: it.home.logged("is damaged"))
        it.conflict()
        it.applied()
        one_error(it.cli("status", it.name), 10, "is damaged")
        restored = path.with_name("restored.db")
        with contextlib.closing(sqlite3.connect(restored)) as file:
            copy.backup(file)
            file.execute("PRAGMA journal_mode = WAL")
    restored.chmod(0o600)
    for name in ("state.db-wal", "state.db-shm"):
        (it.cli.state / name).unlink(missing_ok=True)
    restored.rename(path)
    until(lambda: it.well())
    until(lambda: it.recorded() == 1 and it.unmirrored() == 0)
    it.applied()


def test_a_bounded_run_that_could_not_record_what_it_did_ends_with_the_error_of_the_state_store(
    cli: Cli, tables: tuple[Database, Database]
) -> None:
    assert cli.create("s").returncode == 0
    tables[0].execute("INSERT INTO a VALUES (1000, 'x')")
    with locked(cli.state / "state.db"):
        one_error(cli("run", "s", "--until-caught-up", "--timeout", "2m"), 10, "does not answer")
        assert tables[1].value("SELECT count(*) FROM a") == 101
        one_error(cli("run", "s", "--until-lsn", "FFFF/0", "--timeout", "1s"), 10, "state store")
        tables[1].execute("DELETE FROM a WHERE id = 1000")
        tables[0].execute("DELETE FROM a WHERE id = 1000")  # a conflict that cannot be recorded: feedback waits for it
        one_error(cli("run", "s", "--until-caught-up"), 10, "does not answer")
        assert tables[1].value("SELECT count(*) FROM pgsub.event") == 1
    assert cli("run", "s", "--until-caught-up", "--timeout", "2m").returncode == 0
    assert cli.sql("SELECT conflict_type FROM pgsub_conflict") == [("delete_missing",)]


def test_a_bounded_run_ends_although_the_state_of_sequences_cannot_be_recorded(
    cli: Cli, tables: tuple[Database, Database]
) -> None:
    for database in tables:
        database.execute("CREATE SEQUENCE q; ALTER TABLE b ADD q int DEFAULT nextval('q')")
    assert cli.create("s", "--sequences", "--no-copy-data", "--no-wait").returncode == 0
    tables[0].execute("SELECT setval('q', 7)")
    with locked(cli.state / "state.db"):
        one_error(cli("run", "s", "--until-caught-up"), 10, "does not answer")
        assert tables[1].value("SELECT last_value FROM q") == 7


def test_a_disabling_that_cannot_be_recorded_stops_the_work_all_the_same(it: Served) -> None:
    assert it.cli("disable-on-error", it.name, "on").returncode == 0
    # the launcher has read it once the ledger has it
    it.subdb.wait("SELECT options ->> 'disable_on_error' FROM pgsub.definition", value="true")
    it.subdb.execute("INSERT INTO a VALUES (5000, 'in the way')")
    with locked(it.cli.state / "state.db"):
        until(lambda: it.warned("state store"))
        it.pubdb.execute("INSERT INTO a VALUES (5000, 'x')")
        until(lambda: it.home.logged("conflict=insert_exists"))
        it.subdb.execute("DELETE FROM a WHERE id = 5000")
        it.pubdb.execute("INSERT INTO a VALUES (5001, 'x')")
        epoch = it.subdb.value("SELECT epoch FROM pgsub.control WHERE worker = 0")
        until(lambda: it.warned("state store"))
        assert it.subdb.value("SELECT epoch FROM pgsub.control WHERE worker = 0") == epoch
    until(lambda: it.cli.sql("SELECT subenabled FROM pg_subscription") == [(0,)])
    assert it.subdb.value("SELECT count(*) FROM a WHERE id > 1000") == 0
    assert it.cli.sql("SELECT count(*) FROM pgsub_error") == [(1,)]


def test_a_launcher_without_a_file_descriptor_to_spare_goes_on_and_says_what_it_lacks(it: Served) -> None:
    pid = it.home.running.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        it.applied()  # it opens nothing that it needs for that
        until(lambda: it.home.logged("out of file descriptors: Too many open files"))
        it.subdb.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity, pgsub.subscription"
            " WHERE datname = current_database() AND application_name = 'pgsub ' || subid || ' launcher 0'"
        )
        until(lambda: it.home.logged("could not connect to the target: out of file descriptors: Too many open files"))
        assert it.home.running.poll() is None
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    it.applied()
    until(it.well)


@only_thorough
def test_a_full_log_stops_nothing_and_its_records_go_to_standard_error(
    cli: Cli, tables: tuple[Database, Database]
) -> None:
    assert cli.create("s", "--no-wait").returncode == 0
    running = cli.launcher("--log-file", "/dev/full")
    assert cli("wait", "s", "--for", "caught-up", "--timeout", "2m").returncode == 0
    said = cli("status", "s", "--json")
    assert "could not write to log file" in said.stdout and said.returncode == 0
    stderr = running.log.read_text()  # type: ignore[attr-defined]
    assert stderr.count("could not write to log file") == 1
    assert 'apply worker for subscription "s" has started' in stderr
    assert cli.stop(running) == 0
    assert "could not write" not in cli("status", "s").stderr


def mounted(place: Path, kind: str) -> None:
    """Mount a small file system: one where folders need no room, or one like most disks, where they do."""
    place.mkdir(mode=0o700)
    words = ["-t", "tmpfs", "-o", "size=32m,mode=0700", "tmpfs"]
    if kind == "ext4":  # which becomes read-only by an error
        image = place.with_name("image")
        with image.open("wb") as file:
            file.truncate(96 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
        words = ["-o", "loop,errors=remount-ro", str(image)]
    done = subprocess.run(["mount", *words, place], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"NOT TESTED: no file system can be mounted here: {done.stderr.strip()}")
    place.chmod(0o700)


def break_disk(place: Path) -> None:
    """Let a file system find an error, so that it becomes read-only under those who use it."""
    found = subprocess.run(["findmnt", "-no", "SOURCE", place], capture_output=True, text=True, check=True)
    trigger = Path("/sys/fs/ext4", Path(found.stdout.strip()).name, "trigger_fs_error")
    if not trigger.exists():
        pytest.skip("NOT TESTED: no error can be injected into a file system here")
    trigger.write_text("1")
    with pytest.raises(OSError, match="Read-only"):
        (place / "probe").touch()


@needs_root
def test_a_state_folder_that_becomes_read_only_is_one_failure_and_no_bug(
    cli: Cli, tables: tuple[Database, Database], tmp_path: Path
) -> None:
    mounted(cli.state, "ext4")
    pubdb, subdb = tables
    log = tmp_path / "log"
    with contextlib.ExitStack() as stack:
        stack.callback(subprocess.run, ["umount", "-l", cli.state], check=True)
        running = cli.launcher("--log-file", str(log), env={"PGSUB_RETRY_SECONDS": "0.5"})
        assert cli.create("s", "--no-wait").returncode == 0
        assert cli("wait", "s", "--for", "caught-up", "--timeout", "2m").returncode == 0
        break_disk(cli.state)
        subdb.execute("DELETE FROM a WHERE id = 1")
        pubdb.execute("DELETE FROM a WHERE id = 1")
        for number in range(1000, 1005):
            pubdb.execute("INSERT INTO a VALUES (%s, 'x')", number)
            subdb.wait("SELECT count(*) = 1 FROM a WHERE id = %s", number)
            until(lambda: "Replication continues" in log.read_text())
            said = cli("status", "s", "--check")
            assert said.returncode == 10 and "the state store cannot be written" in said.stderr, said.stderr
        assert subdb.value("SELECT count(*) FROM pgsub.event") == 1
        assert log.read_text().count("Replication continues") <= 2, log.read_text()  # SQLite's words for it change once
        assert "can be used again" not in log.read_text()
        assert cli.stop(running) == 0, running.log.read_text()  # type: ignore[union-attr]


@contextlib.contextmanager
def frozen(place: Path) -> Iterator[None]:
    """Let every write to a file system hang, as a snapshot of a volume does, or a disk that does not answer."""
    done = subprocess.run(["fsfreeze", "-f", place], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"NOT TESTED: no file system can be frozen here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", place], check=True)


@needs_root
def test_a_worker_that_ends_is_started_again_while_the_file_system_of_the_state_folder_hangs(
    cli: Cli, tables: tuple[Database, Database], tmp_path: Path
) -> None:
    """The scratch folder of Spark is elsewhere: without it Spark starts no task."""
    mounted(cli.state, "ext4")
    pubdb, subdb = tables
    log, scratch = tmp_path / "log", tmp_path / "scratch"
    scratch.mkdir(mode=0o700)
    with contextlib.ExitStack() as stack:
        stack.callback(subprocess.run, ["umount", "-l", cli.state], check=True)
        options = ("--log-file", str(log), "--conf", f"spark.local.dir={scratch}")
        running = cli.launcher(*options, env={"PGSUB_RETRY_SECONDS": "0.5"})
        assert cli.create("s", "--no-wait").returncode == 0
        assert cli("wait", "s", "--for", "caught-up", "--timeout", "2m").returncode == 0
        with frozen(cli.state):
            until(lambda: "does not answer" in log.read_text())
            for number in (1000, 1001):
                subdb.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                    " AND application_name LIKE 'pgsub % apply %'"
                )
                pubdb.execute("INSERT INTO a VALUES (%s, 'x')", number)
                subdb.wait("SELECT count(*) = 1 FROM a WHERE id = %s", number)
        until(lambda: cli("status", "s", "--check").returncode == 0)
        until(lambda: "can be used again" in log.read_text())
        assert cli.stop(running) == 0, running.log.read_text()  # type: ignore[union-attr]


@needs_root
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_run_begins_and_applies_on_a_state_folder_without_any_room(
    cli: Cli, tables: tuple[Database, Database], kind: str
) -> None:
    mounted(cli.state, kind)
    with contextlib.ExitStack() as stack:
        stack.callback(subprocess.run, ["umount", "-l", cli.state], check=True)
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        assert cli.create("s").returncode == 0
        with contextlib.suppress(OSError), (cli.state / "fill").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        assert shutil.disk_usage(cli.state).free < 4096
        tables[0].execute("INSERT INTO a VALUES (1000, 'x')")
        ended = cli("run", "s", "--until-caught-up", "--timeout", "2m", env={"TMPDIR": str(temporary)})
        one_error(ended, 10, "state store")
        assert list(temporary.glob("pgsub-*")) == []
        assert tables[1].value("SELECT count(*) FROM a") == 101
        said = cli("status", "s")
        assert said.returncode == 0, said.stderr
        (cli.state / "fill").unlink()
        assert cli("run", "s", "--until-caught-up", "--timeout", "2m").returncode == 0
