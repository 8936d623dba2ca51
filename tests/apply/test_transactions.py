"""Whole transactions, or nothing of them: batches, subtransactions, streams of unfinished ones, large ones.

Mirrors t/015_stream.pl to t/019_stream_subxact_ddl_abort.pl and t/023_twophase_stream.pl.
"""

from __future__ import annotations

import errno
import os
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import patience
import psycopg
import pytest
from fix_pair import MakePair, Pair

from pgsub.apply.stream import assembler, spool_space
from pgsub.apply.stream import spool as spool_module
from pgsub.apply.stream.spool import Spool, SpooledTransaction, SpoolFailed
from pgsub.apply.stream.spool_space import limit
from pgsub.apply.worker import batch_size
from pgsub.common.errors import ApplyError, Directive, SparkUnusable, UsageError
from pgsub.launcher.retry import Retry
from pgsub.protocol.frames import Frames, Segment

TABLES = (
    "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (a int, b text); ALTER TABLE u REPLICA IDENTITY FULL"
)
#: Every change of an unfinished transaction is sent at once (the server's own tests use it).
AT_ONCE = "debug_logical_replication_streaming = immediate"
SMALL_MEMORY = "logical_decoding_work_mem = '64kB'"
MODES = ["off", "on", "parallel"]


def _decode_with(p: Pair, setting: str) -> None:
    p.pubdb.execute(f"ALTER DATABASE {p.pubdb.name} SET {setting}")


def _streamed(p: Pair) -> int:
    p.pubdb.execute("SELECT pg_stat_clear_snapshot()")
    query = "SELECT stream_count FROM pg_stat_replication_slots WHERE slot_name = %s"
    return int(p.pubdb.value(query, p.sub.slot_name) or 0)


@pytest.mark.parametrize("streaming", MODES)
@pytest.mark.parametrize("setting", [AT_ONCE, SMALL_MEMORY], ids=["immediate", "64kB"])
def test_aborted_subtransactions_leave_nothing(
    pair: MakePair, setting: str, streaming: str, reached: Callable[[str], None]
) -> None:
    p = pair(TABLES, streaming=streaming)
    _decode_with(p, setting)
    many = "SELECT n, repeat(md5(n::text), 5) FROM generate_series"
    p.apply(
        f"""BEGIN;
        INSERT INTO t {many}(1, 300) n;
        SAVEPOINT a; INSERT INTO t {many}(301, 600) n; UPDATE t SET v = 'a' WHERE id < 50;
          SAVEPOINT b; DELETE FROM t WHERE id BETWEEN 100 AND 200; INSERT INTO u {many}(1, 300) n;
          ROLLBACK TO b; INSERT INTO u VALUES (1, 'after b');
          SAVEPOINT c; INSERT INTO u VALUES (2, 'c'); RELEASE c;
        ROLLBACK TO a;
        UPDATE t SET v = 'kept' WHERE id = 7;
        SAVEPOINT d; INSERT INTO u {many}(1000, 1300) n;
          SAVEPOINT e; INSERT INTO u VALUES (3, 'e'); RELEASE e; RELEASE d;
        SAVEPOINT f; TRUNCATE t; ROLLBACK TO f;
        INSERT INTO t VALUES (9999, 'last'); COMMIT""",
        f"BEGIN; INSERT INTO t {many}(5000, 5300) n; SAVEPOINT a; UPDATE t SET v = 'gone'; ROLLBACK",
        "INSERT INTO t VALUES (10000, 'after the abort')",
    )
    p.same("t", "u")
    assert p.subdb.value("SELECT count(*) FROM t") == 302
    assert (_streamed(p) > 0) == (streaming != "off")
    if streaming == "on":
        reached("subtransaction abort in a spool")


@pytest.mark.parametrize("streaming", MODES)
def test_unfinished_transactions_are_applied_in_the_order_of_their_commits(pair: MakePair, streaming: str) -> None:
    p = pair(TABLES, streaming=streaming)
    _decode_with(p, AT_ONCE)
    task = p.start()
    with closing(p.pubdb.connect()) as one, closing(p.pubdb.connect()) as two, closing(p.pubdb.connect()) as three:
        for session in (one, two, three):
            session.execute("BEGIN")
        for number in range(20):
            one.execute("INSERT INTO t VALUES (%s, 'one')", (number,))
            two.execute("INSERT INTO t VALUES (%s, 'two')", (100 + number,))
            three.execute("INSERT INTO t VALUES (%s, 'three')", (200 + number,))
            p.pubdb.execute(f"INSERT INTO u VALUES ({number}, 'small')")
        p.until("SELECT count(*) = 20 FROM u", task=task)
        assert p.subdb.value("SELECT count(*) FROM t") == 0
        two.execute("COMMIT")
        p.pubdb.execute("UPDATE t SET v = 'changed' WHERE id = 100")
        one.execute("INSERT INTO t VALUES (500, 'one, late')")
        three.execute("ROLLBACK")
        one.execute("COMMIT")
    p.until("SELECT count(*) = 41 FROM t", task=task)
    assert p.stop(task).outcome == "stopped"
    p.same("t", "u")


class _Session:
    """A publisher session that does random things to keys of its own, in savepoints of any depth."""

    def __init__(self, connection: psycopg.Connection, first_key: int, chance: random.Random) -> None:
        self.connection, self._first_key, self._chance = connection, first_key, chance
        self._savepoints = -1  # none, and no transaction either

    def step(self) -> None:
        if self._savepoints < 0:
            self._execute("BEGIN", 0)
            return
        action, to = self._chance.random(), self._chance.randrange(self._savepoints or 1)
        if action < 0.5:
            self._change()
        elif action < 0.65:
            self._execute(f"SAVEPOINT s{self._savepoints}", self._savepoints + 1)
        elif action < 0.75 and self._savepoints:
            self._execute(f"ROLLBACK TO s{to}", to + 1)
        elif action < 0.85 and self._savepoints:
            self._execute(f"RELEASE s{to}", to)
        elif action < 0.92:
            self._execute(self._chance.choice(["COMMIT", "COMMIT", "ROLLBACK"]), -1)

    def _change(self) -> None:
        text = self._chance.choice(
            [
                "INSERT INTO t VALUES (%(key)s, %(v)s) ON CONFLICT (id) DO UPDATE SET v = EXCLUDED.v",
                "DELETE FROM t WHERE id = %(key)s",
                "INSERT INTO u VALUES (%(key)s, %(v)s)",
                "DELETE FROM u WHERE a = %(key)s",
                "UPDATE u SET b = %(v)s WHERE a = %(key)s",
            ]
        )
        key = self._first_key + self._chance.randrange(60)
        self.connection.execute(text.encode(), {"key": key, "v": "x" * self._chance.randrange(200)})

    def _execute(self, text: str, savepoints: int) -> None:
        self.connection.execute(text.encode())
        self._savepoints = savepoints

    def end(self) -> None:
        self.connection.execute("COMMIT")


def _random_work(p: Pair, chance: random.Random) -> None:
    with closing(p.pubdb.connect()) as one, closing(p.pubdb.connect()) as two, closing(p.pubdb.connect()) as three:
        sessions = [_Session(c, number * 1000, chance) for number, c in enumerate((one, two, three))]
        for _ in range(200):
            chance.choice(sessions).step()
        for session in sessions:
            session.end()


@pytest.mark.parametrize("streaming", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_random_subtransactions_in_several_sessions(pair: MakePair, streaming: str, seed: int) -> None:
    p = pair(TABLES, streaming=streaming)
    _decode_with(p, AT_ONCE)
    _random_work(p, random.Random(seed))
    p.apply()
    p.same("t", "u")
    assert p.events() == []


@pytest.mark.parametrize("streaming", MODES)
def test_columns_may_change_in_the_middle_of_a_transaction(
    pair: MakePair, streaming: str, reached: Callable[[str], None]
) -> None:
    p = pair(TABLES, streaming=streaming)
    _decode_with(p, AT_ONCE)
    p.subdb.execute("ALTER TABLE t ADD c int, ADD renamed text")  # additive changes go to the subscriber first
    p.apply(
        "INSERT INTO t VALUES (1, 'old')",
        """BEGIN; INSERT INTO t VALUES (2, 'before'); ALTER TABLE t ADD c int; INSERT INTO t VALUES (3, 'with c', 30);
        SAVEPOINT a; ALTER TABLE t DROP c; INSERT INTO t VALUES (4, 'never'); ROLLBACK TO a;
        UPDATE t SET c = 10 WHERE id = 1; SAVEPOINT b; ALTER TABLE t RENAME v TO renamed;
        INSERT INTO t VALUES (5, 'renamed', 50); RELEASE b; INSERT INTO t VALUES (6, 'too', 60); COMMIT""",
        "INSERT INTO t VALUES (7, 'later', 70)",
        "ALTER TABLE t DROP c; INSERT INTO t VALUES (8, 'without c')",
    )
    found = p.subdb.rows("SELECT id, v, c, renamed FROM t ORDER BY id")
    assert found == [
        (1, "old", 10, None),
        (2, "before", None, None),
        (3, "with c", 30, None),
        (5, None, 50, "renamed"),
        (6, None, 60, "too"),
        (7, None, 70, "later"),
        (8, None, None, "without c"),
    ]
    reached("barrier: new columns inside a batch")


def test_a_truncate_in_a_batch_stands_between_what_was_before_and_what_comes_after(
    pair: MakePair, reached: Callable[[str], None]
) -> None:
    p = pair(TABLES)
    insert = "INSERT INTO t SELECT g, 'x' FROM generate_series(1, 100) g"
    p.apply(insert, "UPDATE t SET v = 'y'", "TRUNCATE t", insert, "TRUNCATE t, u; INSERT INTO t VALUES (1, 'last')")
    assert p.subdb.rows("SELECT * FROM t") == [(1, "last")]
    assert p.subdb.value("SELECT count(DISTINCT xmin::text) FROM t") == 1
    reached("barrier: TRUNCATE inside a batch")


def test_messages_and_origins_are_no_changes(pair: MakePair) -> None:
    p = pair(TABLES)
    _decode_with(p, AT_ONCE)
    p.pubdb.execute("SELECT pg_replication_origin_create('upstream')")
    with closing(p.pubdb.connect()) as session:
        session.execute("SELECT pg_replication_origin_session_setup('upstream')")
        session.execute("BEGIN")
        session.execute("SELECT pg_replication_origin_xact_setup('0/ABCDEF', now())")
        session.execute("SELECT pg_logical_emit_message(true, 'prefix', 'in the transaction')")
        session.execute("INSERT INTO t VALUES (1, 'from upstream')")
        session.execute("SELECT pg_logical_emit_message(false, 'prefix', 'at once')")
        session.execute("COMMIT")
    p.apply("SELECT pg_logical_emit_message(true, 'alone', 'x')", "INSERT INTO t VALUES (2, 'own')")
    p.same("t")


def test_origin_none_leaves_what_came_from_elsewhere(pair: MakePair) -> None:
    p = pair(TABLES, origin="none")
    p.pubdb.execute("SELECT pg_replication_origin_create('upstream')")
    with closing(p.pubdb.connect()) as session:
        session.execute("SELECT pg_replication_origin_session_setup('upstream')")
        session.execute("INSERT INTO t VALUES (1, 'from upstream')")
    p.apply("INSERT INTO t VALUES (2, 'own')")
    assert p.subdb.rows("SELECT id FROM t") == [(2,)]


def test_batched_shares_target_commits_and_transactional_has_one_each(pair: MakePair) -> None:
    p = pair(TABLES)
    p.apply(*[f"INSERT INTO t VALUES ({n}, 'batched')" for n in range(50)])
    assert p.subdb.value("SELECT count(DISTINCT xmin::text) FROM t") < 25
    p.set(apply_mode="transactional")
    p.apply(*[f"INSERT INTO t VALUES ({n}, 'single')" for n in range(100, 150)])
    assert p.subdb.value("SELECT count(DISTINCT xmin::text) FROM t WHERE id >= 100") == 50
    p.same("t")


def test_a_batch_never_cuts_a_transaction(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "BATCH_BYTES", 2000)
    p = pair(TABLES)
    for start in range(0, 3000, 100):
        p.pubdb.execute(f"INSERT INTO t SELECT g, 'x' FROM generate_series({start}, {start + 99}) g")
    p.apply()
    p.same("t")
    whole = "SELECT count(*) FROM (SELECT id / 100 FROM t GROUP BY 1 HAVING count(DISTINCT xmin::text) > 1) AS cut"
    assert p.subdb.value(whole) == 0


@pytest.mark.parametrize("streaming", ["off", "on"])
def test_a_transaction_larger_than_memory_waits_in_a_file(
    pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: str
) -> None:
    monkeypatch.setattr(assembler, "MEMORY_LIMIT", 10_000)
    written: list[int] = []
    monkeypatch.setattr(SpooledTransaction, "kept", _watched(written))
    p = pair(TABLES, streaming=streaming)
    _decode_with(p, SMALL_MEMORY)
    p.pubdb.execute("INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(1, 2000) g")
    p.pubdb.execute("UPDATE t SET v = 'y' WHERE id % 2 = 0; INSERT INTO u SELECT 1, 'dup' FROM generate_series(1, 500)")
    p.pubdb.execute("INSERT INTO u VALUES (2, 'small')")
    task = p.start(spool_dir=str(tmp_path))
    p.until("SELECT count(*) = 1 FROM u WHERE a = 2", task=task)
    deadline = time.monotonic() + patience.SECONDS
    while list(tmp_path.rglob("*.changes")):  # the commit shows a moment before the files go
        assert time.monotonic() < deadline
    p.stop(task)
    p.same("t", "u")
    assert written and max(written) > 100_000
    assert list(tmp_path.iterdir()) == []


def _watched(sizes: list[int]) -> object:
    original = SpooledTransaction.kept

    def kept(self: SpooledTransaction) -> object:
        sizes.append(self.size)
        return original(self)

    return kept


def test_a_spool_left_by_a_killed_worker_is_removed_by_the_next(pair: MakePair, tmp_path: Path) -> None:
    p = pair(TABLES)
    mine, other = tmp_path / f"pgsub-spool-{p.subid}-0-dead", tmp_path / f"pgsub-spool-{p.subid}1-0-alive"
    for folder in (mine, other):
        folder.mkdir()
        (folder / "1.changes").write_bytes(b"x")
    p.pubdb.execute("INSERT INTO t VALUES (1, 'a')")
    task = p.start(spool_dir=str(tmp_path))
    p.until("SELECT count(*) = 1 FROM t", task=task)
    p.stop(task)
    assert list(tmp_path.iterdir()) == [other]


def test_an_unfinished_transaction_stops_with_the_worker_and_comes_again(pair: MakePair, tmp_path: Path) -> None:
    p = pair(TABLES, streaming="on")
    _decode_with(p, AT_ONCE)
    task = p.start(spool_dir=str(tmp_path))
    with closing(p.pubdb.connect()) as session:
        session.execute("BEGIN")
        session.execute("INSERT INTO t SELECT g, 'unfinished' FROM generate_series(1, 100) g")
        p.pubdb.execute("INSERT INTO u VALUES (1, 'x')")
        p.until("SELECT count(*) = 1 FROM u", task=task)
        p.stop(task)
        assert p.confirmed() >= p.progress()[0]  # the slot is not held back by it
        assert list(tmp_path.iterdir()) == []
        task = p.start(spool_dir=str(tmp_path))
        session.execute("COMMIT")
    p.until("SELECT count(*) = 100 FROM t", task=task)
    p.stop(task)


def test_a_fault_inside_a_streamed_transaction_is_located(pair: MakePair) -> None:
    p = pair(TABLES, streaming="parallel")
    _decode_with(p, AT_ONCE)
    p.subdb.execute("INSERT INTO t VALUES (60, 'mine')")
    p.pubdb.execute(
        "BEGIN; INSERT INTO t SELECT g, 'x' FROM generate_series(1, 55) g; SAVEPOINT a;"
        "INSERT INTO t SELECT g, 'x' FROM generate_series(56, 155) g; COMMIT"
    )
    with pytest.raises(ApplyError, match="conflict=insert_exists") as caught:
        p.catch_up()
    assert caught.value.relation == "public.t" and caught.value.xid and caught.value.finish_lsn
    assert p.subdb.value("SELECT count(*) FROM t") == 1
    p.subdb.execute("DELETE FROM t")
    p.apply()
    p.same("t")


def test_a_change_that_the_publisher_cannot_decode_is_not_blamed_on_the_target(pair: MakePair) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY, n int)")
    if p.pubdb.connection.info.server_version < 150000:
        pytest.skip("publications have no row filters")
    filtered = "CREATE PUBLICATION p FOR TABLE t WHERE (10 / n > 1) WITH (publish = 'insert')"
    p.pubdb.execute(f"DROP PUBLICATION p; {filtered}")
    with pytest.raises(ApplyError, match="division by zero") as caught:
        p.apply("INSERT INTO t VALUES (1, 0)")
    assert caught.value.finish_lsn is None
    hint = caught.value.hint or ""
    assert "row filter" in hint and hint.endswith("pgsub reconcile NAME --force")


def test_a_full_disk_under_the_spool_is_retried(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), "1-0")
    transaction = spool.open(7)
    transaction._path = Path("/dev/full")
    with pytest.raises(SpoolFailed) as caught:
        transaction.append(Frames.around([b"x" * (4 << 20)]).all())
    assert caught.value.directive is Directive.RETRY
    assert "No space left" in caught.value.message
    transaction._path = tmp_path / "gone"
    spool.close()


@pytest.mark.parametrize("how", ["removed", "replaced", "emptied", "emptied while it is written", "overwritten"])
@pytest.mark.parametrize("recent", [0, 1 << 20], ids=["read from the file", "read from memory, too"])
def test_a_spool_file_that_was_removed_or_changed_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, recent: int
) -> None:
    """What comes after it would be read in the place of what it had."""
    monkeypatch.setattr(spool_module, "_RECENT", recent)
    spool = Spool(str(tmp_path), "1-0")
    transaction = spool.open(7)
    rows = [Frames.around([b"%06d" % number * 10]).all() for number in range(60_000)]
    transaction.append(rows[0])
    if "while" not in how:
        transaction.pause()
    transaction.follow()
    [file] = tmp_path.rglob("7.changes")
    if how in ("removed", "replaced"):
        file.unlink()
    if how != "removed":
        file.write_bytes(bytes(rows[0].size) if how == "overwritten" else b"")
    with pytest.raises(SpoolFailed, match=r"7\.changes.* was removed or changed") as caught:
        assert _written_and_read(transaction, rows[1:]) == b"".join(bytes(row.wire) for row in rows), "other rows"
    assert caught.value.directive is Directive.RETRY and "from the publisher again" in str(caught.value.hint)
    transaction.remove()
    spool.close()


def _written_and_read(transaction: SpooledTransaction, rows: list[Segment]) -> bytes:
    for row in rows:
        transaction.append(row)
    transaction.pause()
    return b"".join(bytes(segment.wire) for segment in transaction.segments(0, transaction.end))


def test_a_spool_folder_that_was_removed_fails_only_a_transaction_that_is_kept_there(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), "1-0")
    assert list(tmp_path.iterdir()) == [], "most transactions need none"
    transaction = spool.open(7)
    [made] = tmp_path.iterdir()
    made.rmdir()
    with pytest.raises(SpoolFailed, match=r"7\.changes.* was removed or changed"):
        transaction.append(Frames.around([b"x"]).all())


def test_a_spool_that_cannot_be_made_is_retried(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpoolFailed, match="could not create a spool folder") as caught:
        Spool(str(tmp_path / "file"), "1-0").open(7)
    assert caught.value.directive is Directive.RETRY


def test_a_spool_on_a_full_disk_fails_only_a_transaction_that_is_kept_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**options: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkdtemp", full)
        spool = Spool(str(tmp_path), "1-0")
        with pytest.raises(SpoolFailed, match=r"could not create a spool folder.*No space left"):
            spool.open(7)
    spool.open(7).append(Frames.around([b"x"]).all())  # once there is room
    [made] = tmp_path.iterdir()
    assert made.stat().st_mode & 0o777 == 0o700
    spool.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "fault", ["owner", "mode", "owner of parent", "mode of parent", "link", "owner above", "mode above", "link above"]
)
def test_a_spool_folder_that_somebody_else_could_exchange_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    folder = tmp_path / "above" / "parent" / "spool"
    folder.mkdir(parents=True)
    place = {"parent": folder.parent, "above": folder.parent.parent}.get(fault.split()[-1], folder)
    if "mode" in fault:
        place.chmod(0o777)
    elif fault == "link":
        folder = tmp_path / "link"
        folder.symlink_to(place)
    elif fault == "link above":
        others = tmp_path / "others"
        others.mkdir()
        others.chmod(0o777)
        (others / "link").symlink_to(place)
        folder = others / "link" / "parent" / "spool"
    elif os.geteuid() == 0:
        os.chown(place, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(SparkUnusable, match=str(folder)):
        Spool(str(folder), "1-0")
    assert list(place.rglob("pgsub-spool-*")) == []


def test_a_spool_folder_that_others_may_write_to_is_used_where_they_can_exchange_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    spool = Spool(str(tmp_path), "1-0")
    spool.open(7)
    [made] = tmp_path.iterdir()
    assert made.stat().st_mode & 0o777 == 0o700
    spool.close()


def test_a_spool_ends_at_its_limit_before_anything_is_written_and_what_is_removed_counts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGSUB_SPOOL_LIMIT", "3 MB")
    spool = Spool(str(tmp_path), "1-0", limit())
    first, second = spool.open(7), spool.open(8)
    block = Frames.around([b"x" * (1 << 20)]).all()
    first.append(block)
    second.append(block)
    with pytest.raises(SpoolFailed, match="need more space"):
        second.append(block)
    second.pause()
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.changes")) < 3 << 20
    first.remove()
    second.remove()
    third = spool.open(9)
    third.append(block)
    third.append(block)
    monkeypatch.setenv("PGSUB_SPOOL_LIMIT", "much")
    with pytest.raises(UsageError, match="not a valid size"):
        limit()
    spool.close()


def test_a_spool_leaves_room_to_others_on_its_disk(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction waits until there is some, and is applied then."""
    p = pair("CREATE TABLE t (id int PRIMARY KEY, v text)", streaming="on")
    _decode_with(p, SMALL_MEMORY)
    p.pubdb.execute("INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(1, 20000) g")
    found = os.statvfs(tempfile.gettempdir())
    monkeypatch.setattr(spool_space, "SPARE", found.f_blocks * found.f_frsize)
    monkeypatch.setattr(spool_space, "SPARE_PART", 1)
    with pytest.raises(SpoolFailed, match="too little free space is left") as caught:
        p.catch_up()
    retry = Retry()
    waits = []
    for _ in range(9):
        retry.failed(caught.value)
        waits.append(round(retry.not_before - time.monotonic()))
    assert waits == sorted(waits) and waits[0] == 5 and waits[-1] == 300
    monkeypatch.setattr(spool_space, "SPARE", 0)
    p.catch_up()
    p.same("t")
