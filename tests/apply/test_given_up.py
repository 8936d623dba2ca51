"""What was received and is not begun, beyond a bound or where a stop comes first: nothing behind it is applied either,
and no position passes it.
"""

from __future__ import annotations

import itertools
import threading

import pytest
from apply.test_held import TWO, hold, release
from fix_pair import MakePair

from pgsub.apply.worker.held_release import HeldRelease

_WRITTEN = "SELECT write_lsn >= %s::pg_lsn FROM pg_stat_replication WHERE application_name = %s"


def test_a_bounded_run_that_goes_on_with_a_release_acknowledges_nothing_beyond_its_bound(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = pair(TWO)
    step, go, rounds = HeldRelease.step, threading.Event(), itertools.count()
    late = 3  # rounds of the loop after the publisher has said where it is
    monkeypatch.setattr(HeldRelease, "step", lambda self, lsn: go.is_set() and next(rounds) > late and step(self, lsn))
    hold(p, "a")
    p.apply("INSERT INTO a VALUES (1, 'kept')")
    release(p, "a")
    bound = p.published()
    p.pubdb.execute("INSERT INTO b VALUES (99, 'beyond')")
    p.pubdb.execute("CREATE TABLE more (id int)")  # WAL behind it without a transaction that is sent
    end = p.pubdb.value("SELECT pg_current_wal_flush_lsn()::text")
    task = p.start(until_lsn=bound)
    p.pubdb.wait(_WRITTEN, end, p.sub.name)
    go.set()
    [result] = task.result()
    assert result.outcome == "reached"
    p.same("a")
    assert p.subdb.value("SELECT count(*) FROM b") == 0
    p.apply()
    p.same("b")
