"""A pair whose publisher ends transactions, and sends them, in one of the ways that there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fix_pair import MakePair, Pair

KINDS = ("plain", "streamed", "parallel", "prepared", "prepared and streamed")
TABLE = "CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE, v text)"


@pytest.fixture
def pair_of_kind(pair: MakePair) -> Iterator[Callable[..., Pair]]:
    """``pair_of_kind(kind, ddl, **options of Subscription)``; nothing stays prepared."""
    made: list[Pair] = []

    def build(kind: str = "plain", ddl: str = TABLE, **options: Any) -> Pair:
        streaming = "off" if kind in ("plain", "prepared") else "on" if kind == "streamed" else "parallel"
        state = "p" if "prepared" in kind else "d"
        p = pair(ddl, streaming=streaming, two_phase=state, **options)
        if streaming != "off":
            p.pubdb.execute(f"ALTER DATABASE {p.pubdb.name} SET debug_logical_replication_streaming = immediate")
        made.append(p)
        return p

    yield build
    for one in made:
        for database in (one.pubdb, one.subdb):
            for (gid,) in database.rows("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"):
                database.execute(f"ROLLBACK PREPARED '{gid}'")
