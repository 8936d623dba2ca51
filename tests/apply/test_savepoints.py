"""Subtransactions of transactions in progress, rolled back in any order: also in those that no publisher sends.

Applied early or not, what is left is what the file gives when the aborted ones are left out; where savepoints cannot
give that, the parallel worker gives up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from fix_pair import MakePair, Pair
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from protocol.encoding import encode, text_tuple

from pgsub.apply.parallel import savepoints
from pgsub.apply.parallel.leader import ParallelLeader
from pgsub.apply.rows.table_state_filter import Decision
from pgsub.apply.rows.worker_sessions import TargetSession
from pgsub.apply.stream.spool import Spool, SpooledTransaction
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.apply.worker import start
from pgsub.protocol.decoder import decode_change
from pgsub.protocol.frames import Frames
from pgsub.protocol.messages import Column, Insert, Relation, StreamAbort

TOP = 1000
RELATION = Relation(4711, "public", "t", "d", (Column(1, "id", 23, -1), Column(0, "sub", 23, -1)))
#: A step: changes of a subtransaction (or of the top one), or the abort of one.
Step = tuple[str, int]


class Bench:
    """One transaction after another through a parallel worker; never committed."""

    def __init__(self, p: Pair, spool: Spool) -> None:
        self._spool = spool
        self._spec = p.spec(p.take_over())
        self._relid = p.relid("t")
        self.parallel = ParallelLeader(
            1,
            self._session,
            should_apply=lambda: (1, lambda *_: Decision(self._relid)),
            before_block=lambda: None,
        )

    def _session(self) -> TargetSession:
        return start._session(self._spec)

    def run(self, steps: Sequence[Step], *, blocks: int = 1) -> tuple[list[int] | None, list[int], str | None]:
        """Ids that the open transaction shows (None: gave up), ids that the file gives, the reason."""
        xid = TOP
        spooled = self._spool.open(xid)
        spooled.append(Frames.around([encode(RELATION, xid)]).all())
        inserted = 0
        self.parallel.started(xid, spooled)
        for number, (what, subxid) in enumerate(steps):
            if what == "abort":
                self._stop(xid, spooled)
                self.parallel.aborted(xid, subxid)
                spooled.abort(subxid, Frames.around([encode(StreamAbort(xid, subxid, None, None))]).all())
            else:
                inserted += 1
                row = text_tuple([b"%d" % inserted, b"%d" % subxid])
                spooled.append(Frames.around([encode(Insert(RELATION.relid, row), subxid)]).all())
            if number % blocks == 0:
                self._stop(xid, spooled)
        self._stop(xid, spooled)
        messages = [decode_change(payload, True) for kept in spooled.kept() for payload in kept.payloads()]
        wanted = [int(m.new.values[0] or 0) for m in messages if isinstance(m, Insert)]
        worker = self.parallel.worker_of(xid)
        assert worker is not None
        missing = worker.complete(RemoteTransaction(xid, 1, 2, in_stream=True, spooled=spooled), lambda: None)
        shown = None
        if missing is not None and worker.session is not None:
            rows = worker.session.connection.execute("SELECT id FROM public.t ORDER BY id").fetchall()
            shown = [row[0] for row in rows]
        self.parallel.end(xid)
        while not worker.free:
            time.sleep(0.001)
        spooled.remove()
        return shown, wanted, worker.reason

    def _stop(self, xid: int, spooled: SpooledTransaction) -> None:
        spooled.pause()
        self.parallel.stopped(xid, spooled)


@pytest.fixture
def bench(pair: MakePair, tmp_path: object) -> Iterator[Bench]:
    """A parallel worker on a target with the table t."""
    made = Bench(pair("CREATE TABLE t (id int PRIMARY KEY, sub int)"), Spool(str(tmp_path), "1-0"))
    yield made
    made.parallel.close()


def test_an_order_that_savepoints_do_not_allow_is_left_to_the_file(
    bench: Bench, reached: Callable[[str], None]
) -> None:
    shown, wanted, reason = bench.run(
        [("insert", 1), ("insert", 2), ("insert", TOP), ("abort", 1), ("insert", 2), ("insert", TOP)]
    )
    assert shown is None and wanted == [2, 3, 4, 5]
    assert reason is not None and "order" in reason
    reached("subtransactions in an order that savepoints do not allow")
    # and the session serves the next one
    assert bench.run([("insert", 1), ("abort", 1), ("insert", TOP)])[:2] == ([2], [2])


def test_more_subtransactions_than_savepoints_are_worth_are_left_to_the_file(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(savepoints, "SAVEPOINTS", 5)
    assert bench.run([("insert", number) for number in range(1, 6)])[0] == [1, 2, 3, 4, 5]
    shown, _, reason = bench.run([("insert", number) for number in range(1, 7)])
    assert shown is None and reason is not None and "too many" in reason


STEPS = st.lists(
    st.tuples(st.sampled_from(["insert", "insert", "abort"]), st.integers(1, 4)) | st.just(("insert", TOP)), max_size=14
)


def test_whatever_the_order_the_rows_are_those_of_the_file_or_it_gives_up(bench: Bench) -> None:
    outcomes: set[bool] = set()

    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(steps=STEPS, blocks=st.integers(1, 4))
    # those drawn may all be of one kind
    @example(steps=[("insert", 1), ("insert", TOP), ("abort", 1)], blocks=1)
    @example(steps=[("insert", 1), ("abort", 1), ("insert", TOP)], blocks=1)
    def check(steps: list[Step], blocks: int) -> None:
        aborted: set[int] = set()
        legal: list[Step] = []
        for what, subxid in steps:  # nothing comes of a subtransaction after its abort
            if subxid not in aborted:
                legal.append((what, subxid))
            if what == "abort":
                aborted.add(subxid)
        shown, wanted, _ = bench.run(legal, blocks=blocks)
        assert shown is None or shown == wanted
        outcomes.add(shown is None)

    check()
    assert outcomes == {True, False}
