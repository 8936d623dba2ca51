"""``--apply-workers auto``: a worker that finds out how many sessions pay, with a target that is slow for real."""

from __future__ import annotations

import time

import patience
import pytest
from fix_engine import Task
from fix_pair import MakePair, Pair

from pgsub.apply.writers import auto_session_count
from pgsub.apply.writers.auto_session_count import AutoSessionCount
from pgsub.common.subscription import AUTO
from pgsub.target.session import free_sessions

#: Each row takes the target 20 ms, in which others of its sessions can go on.
SLOW = "ALTER TABLE t ADD CHECK (pg_sleep(0.02) IS NOT NULL)"
ROWS = 1000
#: Transactions of one row each.
BACKLOG = f"DO $$ BEGIN FOR n IN 1..{ROWS} LOOP INSERT INTO t VALUES (n); COMMIT; END LOOP; END $$"
_SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s"


@pytest.fixture(autouse=True)
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Decisions within a test's time; why no session was added."""
    monkeypatch.setattr(auto_session_count, "LOOK_SECONDS", 0.3)
    monkeypatch.setattr(auto_session_count, "CALM_SECONDS", 0.6)
    monkeypatch.setattr(auto_session_count, "PAUSE", 3.0)  # another try, where a busy machine spoilt the first
    said: list[str] = []
    refused = AutoSessionCount.refused

    def noted(self: AutoSessionCount, now: float, why: str) -> None:
        said.append(why)
        refused(self, now, why)

    monkeypatch.setattr(AutoSessionCount, "refused", noted)
    return said


def slow(pair: MakePair, mode: str = "batched") -> Pair:
    """A pair with a slow target and a backlog, whose worker has seen the description of the table."""
    p = pair("CREATE TABLE t (id int PRIMARY KEY)", sub=SLOW, apply_workers=AUTO, apply_mode=mode)
    p.apply("INSERT INTO t VALUES (0)", BACKLOG.replace(str(ROWS), "1", 1).replace("VALUES (n)", "VALUES (-n)"))
    p.pubdb.execute(BACKLOG)
    return p


def sessions(p: Pair) -> int:
    """Of the worker, at the target."""
    return int(p.subdb.value(_SESSIONS, f"pgsub {p.subid} apply %"))


def applied(p: Pair, task: Task) -> int:
    """Wait until all is applied; how many sessions there were at most."""
    most, deadline = 0, time.monotonic() + patience.SECONDS
    while p.subdb.value("SELECT count(*) FROM t WHERE id > 0") < ROWS:
        assert not task.done(), task.error
        assert time.monotonic() < deadline
        most = max(most, sessions(p))
        time.sleep(0.02)
    return most


@pytest.mark.long
@pytest.mark.parametrize("mode", ["batched", "transactional"])
def test_a_slow_target_gets_more_sessions_and_one_is_left_when_there_is_nothing_to_do_any_more(
    pair: MakePair, mode: str
) -> None:
    p = slow(pair, mode)
    task = p.start()
    assert applied(p, task) > 1  # how many pay depends on the machine, too
    p.until(_SESSIONS, f"pgsub {p.subid} apply %", value=1, task=task)
    p.stop(task)
    p.same("t")
    assert p.events() == []


@pytest.mark.long
def test_a_target_without_room_keeps_one_session(
    pair: MakePair, refusals: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_sessions, "LEFT_TO_OTHERS", 10_000)
    p = slow(pair)
    task = p.start()
    while not refusals:
        assert not task.done(), task.error
        time.sleep(0.02)
    assert sessions(p) == 1
    p.stop(task)
    assert "sessions are free on the target, which are left to others" in refusals[0]


@pytest.mark.long
def test_a_session_that_cannot_be_opened_after_all_fails_nothing(
    pair: MakePair, refusals: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_sessions, "further_sessions", lambda *own, tagged: (8, ""))  # others were faster
    p = slow(pair)
    query = (
        "SELECT setting::int FROM pg_settings WHERE name IN ('max_active_replication_origins', 'max_replication_slots')"
        " ORDER BY name LIMIT 1"
    )
    taken = int(p.subdb.value(query)) - int(p.subdb.value("SELECT count(*) FROM pg_show_replication_origin_status()"))
    try:
        for number in range(taken):
            p.subdb.rows("SELECT pg_replication_origin_create(%s)", f"other_{number}")
            p.subdb.rows("SELECT pg_replication_origin_advance(%s, '0/1')", f"other_{number}")
        task = p.start()
        assert applied(p, task) <= 2  # it is one while it is looked for an origin
        p.stop(task)
    finally:
        p.subdb.rows("SELECT pg_replication_origin_drop(roname) FROM pg_replication_origin WHERE roname ~ '^other_'")
    assert "No further session could be opened: no replication origin is free" in refusals[0]
    assert len(refusals) < 6  # each pause is twice the one before
    p.same("t")
    assert p.events() == []
