"""Whatever the publisher sends, a worker's memory stays within its bounds; measured in a process of its own.

``PGSUB_TEST_STREAM_MB`` and ``PGSUB_TEST_VALUE_MB`` make the large transactions and values larger: docs/performance.md
tells of 5000 and 500.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from fix_pair import MakePair, Pair

from pgsub.protocol.lsn import lsn_or_none

pytestmark = pytest.mark.long

MB = 1 << 20
STREAM_MB = int(os.environ.get("PGSUB_TEST_STREAM_MB", "160"))
VALUE_MB = int(os.environ.get("PGSUB_TEST_VALUE_MB", "100"))
#: Of the process of one worker, interpreter and libraries included.
LIMIT = 200 << 20
TABLES = (
    "CREATE TABLE t (id int PRIMARY KEY, v text); ALTER TABLE t ALTER v SET STORAGE EXTERNAL;"
    "CREATE TABLE u (id int PRIMARY KEY, n int)"
)
_WORKER = r"""
import json, pickle, re, sys
from pgsub.apply.worker import feedback, worker
feedback.MIRROR_SECONDS = 0.0
result = worker.run(pickle.load(sys.stdin.buffer))
# ru_maxrss would be that of whoever forked this process, where that was larger
peak = int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) * 1024
print(json.dumps([result.outcome, peak]))
"""
_ROOT = Path(__file__).parents[2]


def _peak(p: Pair, spool: Path) -> int:
    """Apply everything that is there now in a process of its own; its peak memory in bytes."""
    position = p.pubdb.value("SELECT pg_current_wal_flush_lsn()")
    spec = p.spec(p.take_over(), until_lsn=lsn_or_none(position), spool_dir=str(spool))
    ended = subprocess.run(
        [sys.executable, "-c", _WORKER],
        input=pickle.dumps(spec),
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        timeout=60 + 2 * STREAM_MB,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode()[-3000:]
    outcome, peak = json.loads(ended.stdout)
    assert outcome == "reached"
    assert [file for file in spool.rglob("*") if file.is_file()] == []
    print(f"\npeak {peak / MB:.0f} MB")
    return int(peak)


def _count(p: Pair, table: str = "t") -> list[tuple[object, ...]]:
    return p.subdb.rows(f"SELECT count(*), min(id), max(id) FROM {table}")


@pytest.mark.parametrize(("streaming", "part"), [("off", 4), ("on", 4), ("parallel", 1)])
def test_a_transaction_larger_than_memory(pair: MakePair, tmp_path: Path, streaming: str, part: int) -> None:
    p = pair(TABLES, streaming=streaming)
    rows = STREAM_MB * 100 // part
    p.pubdb.execute(f"INSERT INTO t SELECT g, repeat('x', 10000) FROM generate_series(1, {rows}) g")
    assert _peak(p, tmp_path) < LIMIT
    assert _count(p) == [(rows, 1, rows)]


def test_very_many_rows_that_are_missing(pair: MakePair, tmp_path: Path) -> None:
    p = pair(TABLES, streaming="on")
    rows = STREAM_MB * 130
    p.pubdb.execute(f"INSERT INTO u SELECT g, 0 FROM generate_series(1, {rows}) g")
    p.apply()
    p.subdb.execute("TRUNCATE u")
    p.pubdb.execute("UPDATE u SET n = 1; DELETE FROM u")
    assert _peak(p, tmp_path) < 95 * MB  # one takes little, and a larger test would take too long
    assert p.subdb.value("SELECT count(*) FROM pgsub.event") == 2 * rows


def test_very_many_subtransactions(pair: MakePair, tmp_path: Path) -> None:
    p = pair(TABLES, streaming="parallel")
    p.pubdb.execute(f"ALTER DATABASE {p.pubdb.name} SET logical_decoding_work_mem = '64kB'")
    p.pubdb.execute(
        "DO $$ BEGIN FOR i IN 1..100000 LOOP BEGIN INSERT INTO u VALUES (i, 0);"
        " IF i % 4 = 0 THEN RAISE division_by_zero; END IF;"
        " EXCEPTION WHEN division_by_zero THEN END; END LOOP; END $$"
    )
    assert _peak(p, tmp_path) < LIMIT
    assert _count(p, "u") == [(75_000, 1, 99_999)]


def test_very_many_tables(pair: MakePair, tmp_path: Path) -> None:
    tables = 150
    columns = ", ".join(f"c{n} int" for n in range(40))
    p = pair("".join(f"CREATE TABLE x{n} (id int PRIMARY KEY, {columns});" for n in range(tables)))
    for number in range(tables):
        p.pubdb.execute(
            f"INSERT INTO x{number} (id) SELECT g FROM generate_series(1, 20) g; UPDATE x{number} SET c0 = id;"
            f"UPDATE x{number} SET c1 = 1, c2 = id WHERE id < 4; DELETE FROM x{number} WHERE id = 9"
        )
    assert _peak(p, tmp_path) < LIMIT
    p.same("x0", f"x{tables - 1}")


def test_a_long_backlog_of_small_transactions(pair: MakePair, tmp_path: Path) -> None:
    p = pair(TABLES)
    p.pubdb.execute(
        "DO $$ BEGIN FOR i IN 1..30000 LOOP INSERT INTO t VALUES (i, repeat('x', 1000)); COMMIT; END LOOP; END $$"
    )
    assert _peak(p, tmp_path) < LIMIT
    assert _count(p) == [(30_000, 1, 30_000)]


def test_updates_of_large_values(pair: MakePair, tmp_path: Path) -> None:
    # their statements wait for the target's answers, and hold their values meanwhile
    p = pair(TABLES)
    p.pubdb.execute("INSERT INTO t SELECT g, 'x' FROM generate_series(1, 25) g")
    p.pubdb.execute("UPDATE t SET v = repeat(chr(64 + id), 4000000)")
    assert _peak(p, tmp_path) < LIMIT
    assert p.subdb.value("SELECT count(*) FROM t WHERE v = repeat(chr(64 + id), 4000000)") == 25


@pytest.mark.parametrize(("binary", "part"), [(False, 1), (True, 4)], ids=["text", "binary"])
def test_a_large_value_takes_a_few_times_its_size(pair: MakePair, tmp_path: Path, binary: bool, part: int) -> None:
    p = pair(TABLES, binary=binary)
    size = VALUE_MB * MB // part
    p.pubdb.execute("INSERT INTO t SELECT g, 'small' FROM generate_series(1, 99) g")
    p.pubdb.execute(f"INSERT INTO t VALUES (100, repeat('x', {size})); UPDATE t SET id = -id WHERE id > 98")
    assert _peak(p, tmp_path) < LIMIT + 5 * size  # one copy more or less, as the bytes come
    assert p.subdb.value(f"SELECT v = repeat('x', {size}) FROM t WHERE id = -100")
