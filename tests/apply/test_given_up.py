"""What was received and is not begun, beyond a bound or where a stop comes first: nothing behind it is applied either,
and no position passes it.
"""

from __future__ import annotations

import itertools
import threading

import pytest
from apply.test_held import TWO, hold, release
from fix_pair import MakePair, Pair
from fix_parallel import Parallel, publishing, wait_open

from pgsub.apply.worker.held_release import HeldRelease
from pgsub.apply.worker.worker import ApplyPolicy
from pgsub.protocol.frames import Frames
from pgsub.publisher.stream.walsender import WalSender
from pgsub.target.ledger import worker_takeover
from pgsub.target.ledger.tables import states

_TYPE, _STREAM_COMMIT = 25, b"c"  #: where a CopyData message has pgoutput's type byte
_WRITTEN = "SELECT write_lsn >= %s::pg_lsn FROM pg_stat_replication WHERE application_name = %s"


def _claim(p: Pair, name: str) -> None:
    """As a sync worker does: what apply receives of the table from now on waits."""
    with states.changing(p.session, p.subid):
        p.session.execute(
            "UPDATE pgsub.subscription_rel r SET srsubstate = 'f', handover_lsn = greatest(remote_lsn, '0/1')"
            " FROM pgsub.progress g WHERE r.subid = %s AND srrelid = %s AND g.subid = r.subid AND worker = 0",
            (p.subid, p.relid(name)),
        )


def _give_back(p: Pair, name: str) -> None:
    with states.changing(p.session, p.subid):
        p.session.execute(
            "UPDATE pgsub.subscription_rel SET srsubstate = 'r', handover_lsn = NULL WHERE subid = %s AND srrelid = %s",
            (p.subid, p.relid(name)),
        )


@pytest.fixture
def stopped_at_a_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has to wait for a claim is asked to stop then."""
    refused = ApplyPolicy.refused

    def refuse(self: ApplyPolicy) -> bool:
        worker_takeover.ask_to_stop(self._session.connection, self._subid)
        return refused(self)

    monkeypatch.setattr(ApplyPolicy, "refused", refuse)


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


def test_a_bound_is_not_reached_where_what_lies_before_it_was_given_up(
    pair: MakePair, stopped_at_a_claim: None
) -> None:
    p = pair(TWO)
    p.apply("INSERT INTO b VALUES (1, 'x')")
    _claim(p, "a")
    p.pubdb.execute("INSERT INTO a VALUES (1, 'before')")
    bound = p.published()
    p.pubdb.execute("INSERT INTO b VALUES (2, 'beyond')")
    [result] = p.start(until_lsn=bound).result()
    assert result.outcome == "stopped"
    _give_back(p, "a")
    p.apply()
    p.same("a", "b")


def test_what_was_given_up_before_a_stream_block_is_not_passed_by_the_rest_of_the_burst(
    parallel: Parallel, stopped_at_a_claim: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = parallel(TWO, max_parallel_apply_workers=1, messages=True)
    receive = WalSender.receive
    joined: list[bytes] = []

    def together(self: WalSender, *limits: int) -> Frames:
        """Give everything up to the commit of the last one as one burst."""
        joined.extend(receive(self, *limits))
        last = next((number for number, one in enumerate(joined) if b"behind it" in one), len(joined))
        if not any(one[_TYPE : _TYPE + 1] == _STREAM_COMMIT for one in joined[last:]):
            return Frames.of([])
        monkeypatch.setattr(WalSender, "receive", receive)
        return Frames.of(joined)

    task = p.start()
    with publishing(p, "INSERT INTO b VALUES (1, 'streamed')") as session:
        wait_open(p, task)
        _claim(p, "a")
        monkeypatch.setattr(WalSender, "receive", together)
        p.pubdb.execute("INSERT INTO a VALUES (1, 'waits')")
        session.execute("INSERT INTO b VALUES (2, 'streamed')")
        p.pubdb.execute("SELECT pg_logical_emit_message(false, 'log', 'once')")
        p.pubdb.execute("INSERT INTO b VALUES (3, 'behind it')")
        [result] = task.result()
        assert result.outcome == "stopped"
        assert p.subdb.value("SELECT count(*) FROM b") == 0
        session.execute("COMMIT")
    _give_back(p, "a")
    p.apply()
    p.same("a", "b")
    assert [one["content"] for one in p.events() if one["kind"] == "message" and one["prefix"] == "log"] == ["once"]
