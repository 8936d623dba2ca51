"""A table that is altered on the target, or on the publisher, between two chunks of its copy."""

from __future__ import annotations

from pathlib import Path

import pytest
from fix_engine import Task
from fix_failpoints import At
from fix_pair import MakePair, Pair
from fix_program import until

from pgsub.common.errors import ApplyError, PublisherUnavailable, TableAltered
from pgsub.tablesync.copy import plan

ROWS = "INSERT INTO t SELECT g, md5(g::text), g FROM generate_series(1, 3000) g"
TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text, n int)"
TWO_ALIKE = "CREATE TABLE t (id int PRIMARY KEY, a text, b text)"
ROWS_OF_TWO = "INSERT INTO t SELECT g, md5(g::text), md5('b' || g) FROM generate_series(1, 3000) g"
#: Statements after which the name of a column is that of another one, in the same file.
RENAMING = {
    "replaced": "ALTER TABLE t RENAME a TO a_old; ALTER TABLE t ADD a text DEFAULT 'new'",
    "swapped": "ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b",
}


def _altered_meanwhile(
    p: Pair, at: At, folder: Path, monkeypatch: pytest.MonkeyPatch, altering: str, where: str = "target"
) -> Task:
    """Begin the copy of ``t``, and alter the table after the first chunk."""
    monkeypatch.setattr(plan, "CHUNK_BYTES", 80_000)
    monkeypatch.setattr(plan, "CHUNKED_FROM_BYTES", 80_000)
    monkeypatch.setenv("PGSUB_FAILPOINTS_DIR", str(folder))
    release = folder / "release"
    at(f"copy.after_commit=pause:{release}@1")
    syncing = p.submit("sync", lambda name: p.sync(name), ["t"])
    until(lambda: (folder / "copy.after_commit").exists())
    (p.subdb if where == "target" else p.pubdb).execute(altering)
    release.touch()
    return syncing


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_no_chunk_fills_a_column_that_got_another_type_and_perhaps_other_values_meanwhile(
    pair: MakePair, at: At, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, binary: bool
) -> None:
    p = pair(TABLE, pub=ROWS, state="i", copy_workers=1, binary=binary)
    altering = "ALTER TABLE t ALTER n TYPE real USING n / 100"
    with pytest.raises(TableAltered):
        _altered_meanwhile(p, at, tmp_path, monkeypatch, altering).result()
    # the ALTER TABLE has written the rows of the first chunk, so they are not known as copied
    with pytest.raises(ApplyError, match="could not continue the interrupted copy") as raised:
        p.sync("t")
    assert "--resync" in (raised.value.hint or "")
    assert p.subdb.value("SELECT count(*) FROM t WHERE n = id") == 0


@pytest.mark.parametrize(
    ("renaming", "binary"), [("replaced", False), ("swapped", True)], ids=["replaced", "swapped-binary"]
)
def test_no_chunk_reads_another_column_of_the_publisher_by_the_name_of_the_first_chunks(
    pair: MakePair, at: At, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renaming: str, binary: bool
) -> None:
    p = pair(TWO_ALIKE, pub=ROWS_OF_TWO, state="i", copy_workers=1, binary=binary)
    syncing = _altered_meanwhile(p, at, tmp_path, monkeypatch, RENAMING[renaming], "publisher")
    with pytest.raises(PublisherUnavailable, match="its columns were renamed"):
        syncing.result()
    if renaming == "replaced":
        p.subdb.execute("ALTER TABLE t ADD a_old text")
    p.sync("t")
    _same_by_name(p)


@pytest.mark.parametrize(
    ("renaming", "binary"), [("replaced", False), ("swapped", True)], ids=["replaced", "swapped-binary"]
)
def test_no_chunk_fills_another_column_of_the_target_by_the_name_of_the_first_chunks(
    pair: MakePair, at: At, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renaming: str, binary: bool
) -> None:
    p = pair(TWO_ALIKE, pub=ROWS_OF_TWO, state="i", copy_workers=1, binary=binary)
    syncing = _altered_meanwhile(p, at, tmp_path, monkeypatch, RENAMING[renaming])
    with pytest.raises(TableAltered):
        syncing.result()
    p.sync("t")
    _same_by_name(p)


@pytest.mark.parametrize("where", ["publisher", "target"])
def test_a_column_that_is_added_meanwhile_does_not_end_the_copy(
    pair: MakePair, at: At, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    p = pair(TWO_ALIKE, pub=ROWS_OF_TWO, state="i", copy_workers=1)
    _altered_meanwhile(p, at, tmp_path, monkeypatch, "ALTER TABLE t ADD c text DEFAULT 'new'", where).result()
    _same_by_name(p)


def _same_by_name(p: Pair) -> None:
    copied = "SELECT id, a, b FROM t ORDER BY id"
    assert p.state("t") == "s" and p.subdb.rows(copied) == p.pubdb.rows(copied)
