"""A backlog in whose middle a table changes hands: what its sync worker had is left out, what follows is applied."""

from __future__ import annotations

import pytest
from fix_pair import MakePair, Pair

_ROWS = "SELECT count(*), min(n), max(n) FROM {}"
_EACH = "DO $$ BEGIN FOR i IN {}..{} LOOP INSERT INTO t VALUES (i); INSERT INTO u VALUES (i); COMMIT; END LOOP; END $$"
_HAND = "UPDATE pgsub.subscription_rel SET srsubstate = 's', srsublsn = %s WHERE relname = 'u'"


@pytest.fixture
def two(pair: MakePair) -> Pair:
    """Tables without keys: what is lost or comes twice shows."""
    return pair("CREATE TABLE t (n int); CREATE TABLE u (n int)")


def _written(p: Pair, first: int, last: int) -> str:
    """So many transactions of an insert into each; where the WAL is then."""
    p.pubdb.execute(_EACH.format(first, last))
    return str(p.pubdb.value("SELECT pg_current_wal_insert_lsn()"))


@pytest.mark.parametrize("before", [1, 15, 100, 700])
def test_of_a_backlog_only_what_lies_behind_the_hand_over_is_applied(two: Pair, before: int) -> None:
    position = _written(two, 1, before)
    _written(two, before + 1, 1000)
    two.subdb.execute(_HAND, position)
    two.apply()
    assert two.subdb.rows(_ROWS.format("t")) == [(1000, 1, 1000)]
    assert two.subdb.rows(_ROWS.format("u")) == [(1000 - before, before + 1, 1000)]
    _written(two, 1001, 1100)
    two.apply()
    assert two.subdb.rows(_ROWS.format("u")) == [(1100 - before, before + 1, 1100)]


def test_a_backlog_that_the_sync_worker_had_is_left_out(two: Pair) -> None:
    two.subdb.execute(_HAND, _written(two, 1, 1000))
    two.apply()
    assert two.subdb.rows(_ROWS.format("t")) == [(1000, 1, 1000)]
    assert two.subdb.value("SELECT count(*) FROM u") == 0
