"""The network between worker and target fails at the COMMIT, where nobody can know what happened but the ledger."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fix_faults import Site, until
from fix_proxy import Harm, Link, Proxy

pytestmark = pytest.mark.long


class AtCommit:
    """Harm to the next COMMIT of apply's data (not of ``reported_lsn``, which asks for a durable commit)."""

    def __init__(self) -> None:
        self.armed: Harm = "none"

    def __call__(self, link: Link, data: bytes) -> Harm:
        if " apply " not in link.application_name:
            return "none"
        if b"BEGIN\0" in data:
            link.notes.clear()
        if b"SET LOCAL synchronous_commit" in data:
            link.notes.add("durable")
        if b"COMMIT\0" not in data or "durable" in link.notes:
            return "none"
        harm, self.armed = self.armed, "none"
        return harm


def test_a_lost_reply_to_commit_neither_loses_nor_repeats_the_transaction(
    site: Callable[[], Site], proxy: Callable[[str], Proxy], reached: Callable[[str], None]
) -> None:
    case = site()
    between = proxy(case.subdb.conninfo)
    between.harm = commits = AtCommit()
    case.target = between.conninfo
    writer = case.make_ready("keyed1", "counter1", "audit1")
    process = case.serve(points={"apply.commit_reply_lost": "error@3"})
    case.wait_equal()
    for round_ in (1, 2):
        writer.resume()
        epoch = case.epoch()
        commits.armed = "lose reply"
        until(lambda n=round_: len(between.replies) == n, "no COMMIT came by")
        assert b"COMMIT\0" in between.replies[-1]  # the command tag: it was committed
        until(lambda before=epoch: case.epoch() > before, "no new worker")
        reached("commit reply lost")
        case.wait_equal()

        writer.resume()
        epoch = case.epoch()
        commits.armed = "swallow"
        until(lambda n=round_: len(between.swallowed) == n, "no COMMIT came by")
        until(lambda before=epoch: case.epoch() > before, "no new worker")
        reached("commit never arrived")
        case.wait_equal()
    writer.resume()
    writer.some(20)
    between.cut()
    writer.some(20)
    case.wait_equal()
    case.terminate(process)
    case.check()
