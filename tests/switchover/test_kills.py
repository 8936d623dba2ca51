"""A switchover that is killed at any step, under clients that write: run again it goes on, or everything is as before.

Audited by each client's own record of what was acknowledged.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
from fix_program import one_error, until
from fix_switchover import Mover
from switching_clients import Clients
from thorough import thorough

pytestmark = pytest.mark.long

#: Steps before the right is given, and those behind it.
_BEFORE = (
    "planned",
    "named",
    "created",
    "prepared",
    "fenced",
    "sessions_ended",
    "drained",
    "sequences",
    "recorded",
    "advanced",
)
_BEHIND = ("given", "taken", "promoted", "disabled", "enabled", "done")
_ALL = (*_BEFORE, *_BEHIND)
#: Steps of one switchover at which run after run is killed, for each of several in a row.
CHAINS = {
    "every other step, and the others on the way back": (_ALL[::2], _ALL[1::2]),
    **dict(
        thorough(
            [
                ("two steps of each", tuple(zip(_BEFORE, itertools.cycle(_BEHIND), strict=False))),
                ("the same step again and again", tuple((step,) * 3 for step in _BEFORE)),
            ]
        )
    ),
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_killed_and_run_again_it_moves_the_writes_and_loses_none(
    mover: Mover, chain: tuple[tuple[str, ...], ...], reached: Callable[[str], None]
) -> None:
    with Clients(mover.conninfos) as clients:
        for steps in chain:
            since, to = time.monotonic(), 1 - mover.side
            for step in steps:
                mover("--no-verify", "--timeout", "2m", kill=step)
                assert mover("--status")["state"] == "under way", step
                reached(f"switchover.{step}")
            assert mover("--no-verify", "--timeout", "2m")["state"] == "done"
            mover.side = to
            until(lambda to=to, since=since: clients.wrote_on(to, since) or clients.faults)
            assert clients.both_wrote(since, to) == []
            mover.caught_up()
    mover.audit(clients)


def test_an_abort_that_is_killed_and_run_again_leaves_everything_as_it_was(
    mover: Mover, reached: Callable[[str], None]
) -> None:
    before = _settings(mover)
    with Clients(mover.conninfos) as clients:
        for step, releasing in (("fenced", "releasing"), ("given", "declined"), ("advanced", "dropped")):
            since = time.monotonic()
            mover("--no-verify", "--timeout", "2m", kill=step)
            mover("--abort", kill=releasing)
            reached(f"switchover.{releasing}")
            assert mover("--abort")["state"] == "as before"
            now = time.monotonic()
            until(lambda now=now: clients.wrote_on(0, now) or clients.faults)
            assert not clients.wrote_on(1, since)
            assert _settings(mover) == before
            assert mover("--status")["state"] == "none"
    mover.audit(clients)


@pytest.mark.parametrize("step", ["planned", "named", "created", "prepared"])
def test_an_abort_before_the_pause_removes_what_was_made(mover: Mover, step: str) -> None:
    before = _settings(mover)
    mover("--no-verify", kill=step)
    assert mover("--abort")["state"] == "as before"
    assert _settings(mover) == before
    assert [row["subname"] for row in mover.subscriptions()] == ["moved"]


@pytest.mark.parametrize("step", ["create.after_ledger", "create.after_slot"])
def test_an_abort_removes_what_an_interrupted_creation_of_the_way_back_left(mover: Mover, step: str) -> None:
    before = _settings(mover)
    killed = mover.cli("switchover", "moved", "--yes", "--no-verify", env={"PGSUB_FAILPOINTS": f"{step}=kill"})
    assert killed.returncode == -9
    assert mover.rows(0, "SELECT subname FROM pgsub.subscription") == [("moved_back",)]
    assert mover("--abort")["state"] == "as before"
    assert _settings(mover) == before
    assert mover.rows(0, "SELECT subname FROM pgsub.subscription") == []
    assert list(mover.cli.state.rglob("creating-*")) == []


def test_an_abort_that_is_killed_once_the_publisher_has_forgotten_the_way_back_is_told_and_ends(mover: Mover) -> None:
    before = _settings(mover)
    mover("--no-verify", kill="fenced")
    words = ("switchover", "moved", "--abort", "--yes")
    assert mover.cli(*words, env={"PGSUB_FAILPOINTS": "drop.after_ledger=kill"}).returncode == -9
    told = "pgsub switchover moved --abort"
    assert [one["command"] for one in mover("--status")["choices"]] == [told]
    one_error(mover.cli("switchover", "moved", "--yes"), 3, "does not know", told)
    assert mover("--abort")["state"] == "as before"
    assert mover("--status")["state"] == "none"
    assert mover.rows(0, "SELECT phase FROM pgsub.switchover") == [("released",)]
    assert _settings(mover) == before
    assert mover("--no-verify")["state"] == "done"


@pytest.mark.parametrize("step", ["prepared", "given"])
def test_a_publisher_that_loses_its_ledger_before_the_right_is_taken_leaves_everything_as_it_was(
    mover: Mover, step: str
) -> None:
    before = _settings(mover)
    mover("--no-verify", kill=step)
    mover.alone(0, "BEGIN READ WRITE; DROP SCHEMA pgsub CASCADE; COMMIT")
    told = "pgsub switchover moved --abort"
    found = mover("--status")
    assert "has lost what was made there" in found["said"]
    assert [one["command"] for one in found["choices"]] == [told]
    one_error(mover.cli("switchover", "moved", "--yes"), 3, "", told)
    ended = mover.cli("switchover", "moved", "--abort", "--yes")
    assert ended.returncode == 0 and "RESET default_transaction_read_only;" in ended.stderr, ended.stderr
    if step == "given":
        mover.alone(0, ended.stderr[ended.stderr.index("BEGIN READ WRITE") :].splitlines()[0])
    assert _settings(mover) == before
    assert [row["subname"] for row in mover.subscriptions()] == ["moved"]
    assert mover("--status")["state"] == "none"
    mover.rows(0, "INSERT INTO writes (client, number) VALUES (0, 1) RETURNING id")
    mover.caught_up()
    assert mover("--no-verify")["state"] == "done"


def _settings(mover: Mover) -> list[list[tuple[object, ...]]]:
    """What a switchover changes: settings of the databases, slots, and subscriptions of the ledgers."""
    queries = (
        "SELECT setconfig FROM pg_db_role_setting s JOIN pg_database d ON d.oid = setdatabase"
        " WHERE datname = current_database()",
        "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()",
        "SELECT datacl::text FROM pg_database WHERE datname = current_database()",
    )
    found = [mover.rows(side, query) for side in (0, 1) for query in queries]
    return [*found, mover.rows(1, "SELECT subname FROM pgsub.subscription")]


def test_a_command_for_the_wrong_direction_does_not_report_that_everything_is_as_it_was(mover: Mover) -> None:
    mover("--no-verify")
    mover.side = 1
    mover.caught_up()
    mover("--no-verify", kill="fenced")
    for words in (("--abort",), ("--no-verify",)):
        ended = mover.cli("switchover", "moved", *words, "--yes")
        one_error(ended, 3, '"moved" takes part in a switchover', "pgsub switchover moved --back --status")
    assert mover("--abort")["state"] == "as before"
    mover.rows(1, "INSERT INTO writes (client, number) VALUES (0, 1) RETURNING id")


def test_a_run_that_is_killed_once_the_target_has_forgotten_the_subscription_goes_on(mover: Mover) -> None:
    killed = mover.cli(
        "switchover", "moved", "--yes", "--no-verify", env={"PGSUB_FAILPOINTS": "drop.after_ledger=kill"}
    )
    assert killed.returncode == -9
    found = mover("--status")
    assert (found["state"], found["taking"]) == ("under way", "done")
    assert [one["command"] for one in found["choices"]] == ["pgsub switchover moved"]
    one_error(mover.cli("switchover", "moved", "--abort", "--yes"), 3, "can no longer be aborted")
    assert mover("--no-verify")["state"] == "done"
    assert [row["subname"] for row in mover.subscriptions()] == ["moved_back"]
    mover.rows(1, "INSERT INTO writes (client, number) VALUES (0, 1) RETURNING id")
    mover.side = 1
    mover.caught_up()
    assert mover.rows(0, "SELECT number FROM writes") == [(1,)]
