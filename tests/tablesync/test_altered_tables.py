"""A table that is altered on the target between two chunks of its copy."""

from __future__ import annotations

from pathlib import Path

import pytest
from fix_engine import Task
from fix_failpoints import At
from fix_pair import MakePair, Pair
from fix_program import until

from pgsub.tablesync.copy import plan

ROWS = "INSERT INTO t SELECT g, md5(g::text), g FROM generate_series(1, 3000) g"
TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text, n int)"


def _altered_meanwhile(p: Pair, at: At, folder: Path, monkeypatch: pytest.MonkeyPatch, altering: str) -> Task:
    """Begin the copy of ``t``, and alter the table after the first chunk."""
    monkeypatch.setattr(plan, "CHUNK_BYTES", 80_000)
    monkeypatch.setattr(plan, "CHUNKED_FROM_BYTES", 80_000)
    monkeypatch.setenv("PGSUB_FAILPOINTS_DIR", str(folder))
    release = folder / "release"
    at(f"copy.after_commit=pause:{release}@1")
    syncing = p.submit("sync", lambda name: p.sync(name), ["t"])
    until(lambda: (folder / "copy.after_commit").exists())
    p.subdb.execute(altering)
    release.touch()
    return syncing


def test_text_is_copied_into_a_column_that_got_another_type_meanwhile(
    pair: MakePair, at: At, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = pair(TABLE, pub=ROWS, state="i", copy_workers=1)
    _altered_meanwhile(p, at, tmp_path, monkeypatch, "ALTER TABLE t ALTER n TYPE bigint").result()
    p.same("t")


def test_binary_values_are_not_copied_into_a_column_that_got_another_type_meanwhile(
    pair: MakePair, at: At, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest comes as text: another attempt would find that the ALTER TABLE has written the rows of the first."""
    p = pair(TABLE, pub=ROWS, state="i", copy_workers=1, binary=True)
    _altered_meanwhile(p, at, tmp_path, monkeypatch, "ALTER TABLE t ALTER n TYPE real").result()
    p.same("t")
    assert p.state("t") == "s" and p.subdb.value("SELECT bool_and(n = id) FROM t")
