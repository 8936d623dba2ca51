"""Crashes, damage, full disks, other versions and other processes."""

import contextlib
import os
import signal
import sqlite3
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from pgsub.catalog import database, store_file
from pgsub.catalog.rows import OriginRow, RelationRow
from pgsub.catalog.schema import MIGRATIONS
from pgsub.catalog.store import StateStore
from pgsub.catalog.store_file import APPLICATION_ID, migrate
from pgsub.common.errors import StateStoreError
from pgsub.common.subscription import Subscription
from pgsub.launcher.recorder import Recorder

WRITER = """
import pathlib, sys
from pgsub.catalog.rows import RelationRow
from pgsub.catalog.store import StateStore
store = StateStore.open(pathlib.Path(sys.argv[1]))
number = 0
while number < int(sys.argv[2]):
    number += 1
    with store.batch():
        store.put_origin(5, number, number)
        store.put_relations(5, [RelationRow(table, "s", number, "a", str(table)) for table in range(20)])
        store.add_stats(5, apply_error_count=1)
        store.journal("test", 5, "orders", {"number": number})
    if number in (1, 50):
        print(number, flush=True)
"""
OPENER = """
import pathlib, sys
from pgsub.catalog.store import StateStore
sys.stdin.readline()
with StateStore.open(pathlib.Path(sys.argv[1])) as store:
    store.journal("opened", None, None, {})
"""


def assert_one_state(store: StateStore) -> int:
    """All tables show the same step of the writer; which one."""
    with store.snapshot():
        origin = store.origin(5) or OriginRow(0, 0)
        lsns = {row.srsublsn for row in store.relations(5)}
        assert (origin.remote_lsn, store.stats(5).apply_error_count) == (origin.local_lsn, origin.local_lsn or 0)
        assert lsns == ({origin.remote_lsn} if lsns else set())
        assert len(store.journal_rows(5, 100_000)) == (origin.remote_lsn or 0)
    return origin.remote_lsn or 0


def test_a_reader_sees_whole_batches_while_another_process_writes(store: StateStore, start: Callable) -> None:
    writer = start(WRITER, store.path.parent, 200)
    writer.stdout.readline()
    seen = set()
    while writer.poll() is None:
        seen.add(assert_one_state(store))
    assert writer.returncode == 0, writer.stderr.read()
    assert assert_one_state(store) == 200
    assert len(seen) > 1


def test_two_writing_processes_lose_nothing(store: StateStore, start: Callable) -> None:
    writer = start(WRITER, store.path.parent, 100)
    for _ in range(100):
        store.add_stats(7, apply_error_count=1)
    assert writer.wait() == 0, writer.stderr.read()
    assert (store.stats(5).apply_error_count, store.stats(7).apply_error_count) == (100, 100)


def test_kill_9_in_the_middle_of_writes_leaves_a_readable_store_that_goes_on(
    store: StateStore, start: Callable
) -> None:
    folder = store.path.parent
    store.close()
    for _ in range(3):
        writer = start(WRITER, folder, 10**9)
        assert writer.stdout.readline() == "1\n"
        writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        with StateStore.open(folder) as opened:
            opened.check()
            assert assert_one_state(opened) >= 50
            opened.remove_subscription(5)
            opened.add_subscription(Subscription(5, "orders", "", "", (), None))
            opened._database.run("DELETE FROM pgsub_journal")


def test_processes_that_open_a_new_folder_at_once_all_get_the_same_store(folder: Path, start: Callable) -> None:
    openers = [start(OPENER, folder) for _ in range(4)]
    for opener in openers:
        opener.stdin.write("go\n")
        opener.stdin.flush()
    assert [opener.wait() for opener in openers] == [0] * 4, [opener.stderr.read() for opener in openers]
    with StateStore.open(folder) as store:
        assert len(store.journal_rows()) == 4


def scribble(file: Path, offset: int, data: bytes) -> bytes:
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(data)
    return file.read_bytes()


def assert_no_sqlite_traceback(error: BaseException) -> None:
    assert "sqlite3." not in "".join(traceback.format_exception(error))


def assert_damaged(folder: Path, damaged: bytes) -> None:
    with pytest.raises(StateStoreError, match="is damaged") as error:
        StateStore.open(folder).check()
    assert error.value.exit_code == 10
    assert error.value.hint is not None and error.value.hint.splitlines()[-1].startswith("sqlite3 ")
    assert_no_sqlite_traceback(error.value)
    assert (folder / "state.db").read_bytes() == damaged


@pytest.mark.parametrize(("page", "offset"), [(0, 0), (0, 100), (1, 0), (2, 0), (3, 0)])
def test_a_damaged_file_is_refused_and_kept(store: StateStore, page: int, offset: int) -> None:
    store.put_relations(5, [RelationRow(table, "i", None, "a", "b" * 50) for table in range(200)])
    store.close()
    assert_damaged(store.path.parent, scribble(store.path, page * 4096 + offset, b"\xee" * 64))


def test_a_truncated_file_is_refused_and_kept(store: StateStore) -> None:
    store.close()
    os.truncate(store.path, store.path.stat().st_size // 2)
    assert_damaged(store.path.parent, store.path.read_bytes())


def test_an_empty_file_is_refused_and_kept_and_not_taken_for_a_new_store(store: StateStore) -> None:
    store.close()
    os.truncate(store.path, 0)
    assert_damaged(store.path.parent, b"")
    with pytest.raises(StateStoreError, match="is damaged"):  # by commands that read what can be read, too
        StateStore.open(store.path.parent, readable=True)


def test_a_damaged_schema_whose_words_are_no_text_is_refused_and_kept(store: StateStore) -> None:
    store.close()
    place = store.path.read_bytes().index(b"CREATE TABLE") + len(b"CREATE ")
    assert_damaged(store.path.parent, scribble(store.path, place, b"\xff" * 5))


def test_a_launcher_knows_what_it_serves_though_its_store_became_empty(store: StateStore) -> None:
    with contextlib.closing(Recorder(store, lambda level, text: None)) as recorder:
        known = recorder.subscriptions()
        os.truncate(store.path, 0)
        for _ in range(2):  # the file that is open, and the one that is opened anew
            recorder._again = 0.0
            with pytest.raises(StateStoreError):
                recorder.run(lambda: store.journal("test", 5, "orders", {}))
            assert recorder.subscriptions() == known
        assert store.path.read_bytes() == b""


def test_a_file_that_is_no_database_is_refused_and_kept(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    file = folder / "state.db"
    file.touch(mode=0o600)
    file.write_bytes(b"something else entirely\n" * 1000)
    assert_damaged(folder, file.read_bytes())


def test_damage_in_the_history_is_found_by_the_full_check(store: StateStore) -> None:
    with store.batch():
        for number in range(2000):
            store.journal("test", 5, "orders", {"number": number, "text": "x" * 100})
    store.close()
    damaged = scribble(store.path, store.path.stat().st_size - 4096, b"\xee" * 64)
    assert_damaged(store.path.parent, damaged)


def test_a_database_of_another_application_is_refused_and_kept(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    file = folder / "state.db"
    file.touch(mode=0o600)
    other = sqlite3.connect(file)
    other.execute("CREATE TABLE bookmarks (url)")
    other.close()
    before = file.read_bytes()
    with pytest.raises(StateStoreError, match="is not a pgsub state store"):
        StateStore.open(folder)
    assert file.read_bytes() == before


def test_a_newer_schema_is_refused_and_kept(store: StateStore) -> None:
    newest = MIGRATIONS[-1][0]
    store._database.rows(f"PRAGMA user_version = {newest + 1}")
    store.close()
    before = store.path.read_bytes()
    with pytest.raises(StateStoreError, match=f"schema version {newest + 1}, this pgsub knows versions up to {newest}"):
        StateStore.open(store.path.parent)
    assert store.path.read_bytes() == before


def test_an_upgrade_keeps_all_rows_and_a_backup_of_the_old_file(store: StateStore) -> None:
    store.put_relations(5, [RelationRow(1, "r", 7, "a", "b")])
    store.close()
    old = MIGRATIONS[-1][0]
    connection = sqlite3.connect(store.path, isolation_level=None)
    migrate(connection, store.path, (*MIGRATIONS, (old + 1, "ALTER TABLE pgsub_origin ADD COLUMN extra TEXT;")))
    assert connection.execute("PRAGMA user_version").fetchone() == (old + 1,)
    assert connection.execute("SELECT srsubstate FROM pg_subscription_rel").fetchall() == [("r",)]
    assert connection.execute("SELECT extra FROM pgsub_origin").fetchall() == []
    connection.close()
    backup = store.path.with_name(f"state.db.v{old}.bak")
    assert backup.stat().st_mode & 0o777 == 0o600
    backup.rename(store.path)
    with StateStore.open(store.path.parent) as restored:
        assert restored.relations(5) == [RelationRow(1, "r", 7, "a", "b")]


def test_a_failed_upgrade_changes_nothing(store: StateStore) -> None:
    store.close()
    old = MIGRATIONS[-1][0]
    connection = sqlite3.connect(store.path, isolation_level=None)
    steps = (*MIGRATIONS, (old + 1, "CREATE TABLE half (a);"), (old + 2, "CREATE TABLE half (a);"))
    with pytest.raises(sqlite3.OperationalError, match="already exists"):
        migrate(connection, store.path, steps)
    assert connection.execute("PRAGMA user_version").fetchone() == (old,)
    assert connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'half'").fetchall() == []
    connection.close()
    StateStore.open(store.path.parent).close()


@pytest.fixture
def next_version(monkeypatch: pytest.MonkeyPatch) -> int:
    """Make the program under test one version newer, by a step that cannot be done twice.

    :return: that version.
    """
    number = MIGRATIONS[-1][0] + 1
    steps = (*MIGRATIONS, (number, "CREATE TABLE newer (a);"))
    monkeypatch.setattr(database, "_NEWEST", number)
    monkeypatch.setattr(store_file, "migrate", partial(migrate, steps=steps))
    return number


def test_an_older_store_is_upgraded_once_by_those_who_open_it_at_once(store: StateStore, next_version: int) -> None:
    store.journal("before", None, None, {})
    store.close()

    def version(_: int) -> object:
        with StateStore.open(store.path.parent) as opened:
            assert [row.action for row in opened.journal_rows()] == ["before"]
            return opened._database.rows("PRAGMA user_version")[0][0]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(version, range(4))) == [next_version] * 4
    with contextlib.closing(sqlite3.connect(store.path.with_name(f"state.db.v{next_version - 1}.bak"))) as backup:
        assert backup.execute("SELECT action FROM pgsub_journal").fetchall() == [("before",)]


def test_a_store_that_another_process_upgrades_is_left_alone(
    store: StateStore, next_version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_file, "BUSY_SECONDS", 0.1)
    store.close()
    with store_file.changing_alone(store.path, "upgraded"):
        with pytest.raises(StateStoreError, match="is being upgraded by another process"):
            StateStore.open(store.path.parent)
    with contextlib.closing(sqlite3.connect(store.path)) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (next_version - 1,)
    assert list(store.path.parent.glob("*.bak")) == []


def test_the_file_says_what_it_is_and_is_written_with_care(store: StateStore) -> None:
    values = {
        name: store._database.rows(f"PRAGMA {name}")[0][0]
        for name in ("application_id", "user_version", "journal_mode", "synchronous", "foreign_keys", "trusted_schema")
    }
    assert values == {
        "application_id": APPLICATION_ID,
        "user_version": MIGRATIONS[-1][0],
        "journal_mode": "wal",
        "synchronous": 2,
        "foreign_keys": 1,
        "trusted_schema": 0,
    }
    assert store._database.rows("PRAGMA busy_timeout") == [(5000,)]


def test_migrations_are_numbered_without_gaps() -> None:
    assert [number for number, _ in MIGRATIONS] == list(range(1, len(MIGRATIONS) + 1))


def test_a_full_disk_is_a_state_store_error_and_the_store_works_once_there_is_space(store: StateStore) -> None:
    used = store._database.rows("PRAGMA page_count")[0][0]
    store._database.rows(f"PRAGMA max_page_count = {used}")
    with pytest.raises(StateStoreError, match="disk is full") as error:
        store.journal("test", 5, "orders", {"text": "x" * 1_000_000})
    assert error.value.hint is not None and error.value.hint.splitlines()[-1].startswith("df ")
    assert_no_sqlite_traceback(error.value)
    store._database.rows("PRAGMA max_page_count = 1000000")
    store.journal("test", 5, "orders", {"text": "x" * 1_000_000})
    assert len(store.journal_rows()) == 1


def test_a_store_that_cannot_be_written_is_a_state_store_error_and_can_be_read(store: StateStore) -> None:
    store._database.rows("PRAGMA query_only = ON")
    with pytest.raises(StateStoreError, match="readonly") as error:
        store.put_origin(5, 1, None)
    assert error.value.hint is not None and error.value.hint.splitlines()[-1].startswith("ls ")
    assert store.subscription("orders").subid == 5


def test_a_store_that_another_process_keeps_locked_is_a_state_store_error(store: StateStore) -> None:
    store._database.rows("PRAGMA busy_timeout = 20")
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StateStoreError, match="is locked"):
        store.put_origin(5, 1, None)
    assert store.origin(5) is None
    other.close()
    store.put_origin(5, 1, None)


def test_opening_and_closing_a_second_store_in_one_process_keeps_the_locks_of_the_first(
    store: StateStore, start: Callable
) -> None:
    code = """
import sqlite3, sys
try:
    sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None).execute("BEGIN IMMEDIATE")
except sqlite3.OperationalError as error:
    print(error)
"""
    with store.batch():
        StateStore.open(store.path.parent).close()
        other = start(code, store.path)
        assert other.stdout.readline() == "database is locked\n"
