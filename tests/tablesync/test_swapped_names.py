"""A name that another table bears when a copy uses it: no code of that table is run, on either server."""

from __future__ import annotations

from pathlib import Path

import pytest
from fix_failpoints import At
from fix_pair import MakePair
from fix_program import until
from swapped import Swapped

from pgsub.common.errors import PublisherUnavailable, TableReplaced
from pgsub.tablesync.copy import plan

pytestmark = pytest.mark.publishers("15", long=True)

ROWS = "INSERT INTO t SELECT g, md5(g::text), nullif(g % 7, 0) FROM generate_series(1, 3000) g"
TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text, n int)"


@pytest.mark.parametrize("where", ["publisher", "target"])
def test_nothing_of_a_table_that_took_a_name_between_two_chunks_is_run(
    pair: MakePair, at: At, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 80_000)
    monkeypatch.setattr(plan, "CHUNKED_FROM_BYTES", 80_000)
    p = pair(TABLE, pub=ROWS, state="i", copy_workers=1)
    release = tmp_path / "release"
    monkeypatch.setenv("PGSUB_FAILPOINTS_DIR", str(tmp_path))
    at(f"copy.after_commit=pause:{release}@1")
    syncing = p.submit("sync", lambda name: p.sync(name), ["t"])
    until(lambda: (tmp_path / "copy.after_commit").exists())
    swapped = Swapped(p.pubdb if where == "publisher" else p.subdb)
    release.touch()
    with pytest.raises((PublisherUnavailable, TableReplaced), match=r"was rewritten|was replaced"):
        syncing.result()
    assert not swapped.ran
