"""``pgsub switchover``: the writes move to the target and back."""

from __future__ import annotations

import contextlib
import re
import signal
import sqlite3
import stat
import time
from collections.abc import Callable
from pathlib import Path

import patience
import psycopg
import pytest
from fix_program import Cli, one_error, until, valid
from fix_proxy import Proxy
from fix_switchover import Mover
from forked import Started
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from switching_clients import Clients
from thorough import long

from pgsub.commands.switchover.parties import DATABASE_LOCK


def _insert(mover: Mover, side: int, number: int) -> int:
    """Write as a client does; return the id that the sequence gave."""
    [(id,)] = mover.rows(side, f"INSERT INTO writes (client, number) VALUES (0, {number}) RETURNING id")
    return int(id)


def _refused(mover: Mover, side: int) -> None:
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        _insert(mover, side, 0)


def test_writes_move_with_equal_tables_and_come_back_with_what_was_written_meanwhile(mover: Mover) -> None:
    assert _insert(mover, 0, 1) == 1
    found = mover()
    assert (found["state"], found["giving"], found["taking"]) == ("done", "given", "done")
    assert found["said"] == "All tables were equal at the moment of the switchover."
    assert 0 < found["pause"] < 30 and {"drain", "sequences", "give", "take"} <= found["steps"].keys()
    _refused(mover, 0)
    assert _insert(mover, 1, 2) == 2
    assert [row["subname"] for row in mover.subscriptions()] == ["moved_back"]
    mover.side = 1
    mover.caught_up()
    assert mover.rows(0, "SELECT id, number FROM writes ORDER BY 1") == [(1, 1), (2, 2)]
    assert mover()["state"] == "done"
    mover.side = 0
    _refused(mover, 1)
    assert _insert(mover, 0, 3) == 3
    mover.caught_up()
    assert mover.rows(1, "SELECT id, number FROM writes ORDER BY 1") == [(1, 1), (2, 2), (3, 3)]
    [row] = mover.subscriptions()
    assert (row["subname"], row["subpublications"], row["suborigin"]) == ("moved", ["p"], "any")


@pytest.mark.long
def test_a_rehearsal_changes_nothing_and_measures(mover: Mover) -> None:
    found = mover("--dry-run")
    assert found["state"] == "rehearsed" and found["pause"] > 0
    assert _insert(mover, 0, 1) == 1
    assert mover.rows(1, "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == [(0,)]


@pytest.mark.parametrize("step", ["created", *long(["planned", "fenced", "taken"])])
def test_a_switchover_that_is_under_way_is_not_rehearsed_and_nothing_of_it_is_an_obstacle(
    mover: Mover, step: str
) -> None:
    mover("--no-verify", "--timeout", "2m", kill=step)
    told = one_error(mover.cli("switchover", "moved", "--dry-run"), 3, "under way, so it cannot be rehearsed")
    assert "pgsub switchover moved --status" in told and "drop" not in told
    assert mover("--no-verify", "--timeout", "2m")["state"] == "done"


@pytest.mark.long
def test_rows_that_differ_are_refused_before_anything_is_done(mover: Mover) -> None:
    mover.plant(1, "INSERT INTO writes VALUES (77, 7, 7)")
    ended = mover.cli("switchover", "moved", "--yes")
    one_error(ended, 6, 'the tables of subscription "moved" differ', "pgsub verify moved --repair")
    assert mover("--status")["state"] == "none"
    assert _insert(mover, 0, 1) == 1


@pytest.mark.long
def test_rows_that_differ_at_the_last_moment_are_told_once_clients_write_again(mover: Mover, tmp_path: Path) -> None:
    first = mover.held("prepared", tmp_path, "-v", "--timeout", "2m", verify=True)
    mover.plant(1, "INSERT INTO writes VALUES (77, 7, 7)")
    (tmp_path / "go").touch()
    assert first.wait(patience.SECONDS) == 6
    said = first.log.read_text()  # type: ignore[attr-defined]
    assert "the writes were moved, but" in said and "Tables: public.writes (1 row)." in said
    assert "pgsub verify moved_back --rows" in said
    steps = re.findall(r"LOG:  switchover: (.*)", said)
    assert [step.split()[0] for step in steps] == ["fencing", "waiting", "fencing", "the", "ending"]
    assert _insert(mover, 1, 1) == 1
    assert [row["subname"] for row in mover.subscriptions()] == ["moved_back"]


@pytest.mark.long
def test_a_row_that_a_conflict_lost_is_not_called_equal(mover: Mover) -> None:
    id = _insert(mover, 0, 1)
    mover.caught_up()
    mover.plant(1, f"DELETE FROM writes WHERE id = {id}")
    mover.alone(0, f"UPDATE writes SET number = 2 WHERE id = {id}")
    mover.caught_up()
    ended = mover.cli("switchover", "moved", "--yes")
    one_error(ended, 6, 'the tables of subscription "moved" differ', "public.writes (1 row)", "pgsub verify moved --re")
    assert mover("--status")["state"] == "none"


@pytest.mark.long
def test_rows_that_differ_for_a_known_reason_are_switched_over_only_where_that_is_accepted(mover: Mover) -> None:
    assert mover.cli("alter", "moved", "--on-conflict", "insert_exists=keep_local").returncode == 0
    mover.plant(1, "INSERT INTO writes VALUES (1, 7, 7)")
    _insert(mover, 0, 1)
    mover.caught_up()
    ended = mover.cli("switchover", "moved", "--yes")
    one_error(ended, 6, "public.writes (1 row, 1 of them explained)", "pgsub switchover moved --accept-explained")
    found = mover("--accept-explained")
    assert found["said"] == "All tables were equal at the moment of the switchover, but for 1 explained row."
    assert found["equal"] is False


@pytest.mark.long
def test_changes_that_are_skipped_meanwhile_leave_everything_as_it_was(mover: Mover, tmp_path: Path) -> None:
    assert mover.cli("alter", "moved", "--on-conflict", "insert_exists=skip").returncode == 0
    mover.caught_up()
    first = mover.held("fenced", tmp_path, "--timeout", "2m")
    mover.plant(1, "INSERT INTO writes VALUES (77, 7, 7)")
    mover.plant(0, "INSERT INTO writes VALUES (77, 8, 8)")
    (tmp_path / "go").touch()
    assert first.wait(patience.SECONDS) == 3, first.log.read_text()  # type: ignore[attr-defined]
    assert "were skipped meanwhile" in first.log.read_text()  # type: ignore[attr-defined]
    assert _insert(mover, 0, 1) == 1
    one_error(
        mover.cli("switchover", "moved", "--yes"), 3, "1 skipped change was not replayed", "conflicts replay moved"
    )
    # what is given up is a difference like any other
    assert mover.cli("conflicts", "prune", "moved", "--older-than", "0s", "--yes").returncode == 0
    one_error(mover.cli("switchover", "moved", "--yes"), 6, "public.writes (1 row)", "pgsub verify moved --repair")


@pytest.mark.long
def test_what_comes_into_the_way_after_it_was_looked_for_is_refused_before_the_pause(
    mover: Mover, tmp_path: Path
) -> None:
    first = mover.held("created", tmp_path, "--timeout", "1m")
    mover.alone(1, "BEGIN READ WRITE; ALTER PUBLICATION moved_back SET (publish = 'insert'); COMMIT")
    (tmp_path / "go").touch()
    assert first.wait(patience.SECONDS) == 3, first.log.read_text()  # type: ignore[attr-defined]
    said = first.log.read_text()  # type: ignore[attr-defined]
    assert "does not publish all of insert" in said and "everything is left as it was" in said
    assert _insert(mover, 0, 1) == 1
    assert mover("--status")["state"] == "none"


@pytest.mark.long
def test_a_way_back_that_subscribes_to_other_tables_than_was_looked_at_is_refused_before_the_pause(
    mover: Mover,
) -> None:
    mover.alone(0, "CREATE TABLE secret (id int PRIMARY KEY)")
    mover.alone(1, "BEGIN READ WRITE; CREATE TABLE secret (id int PRIMARY KEY); COMMIT")
    mover.alone(1, "BEGIN READ WRITE; CREATE PUBLICATION more FOR TABLE writes, secret; COMMIT")
    mover(kill="created")
    changed = mover.cli("alter", "moved_back", "--set-publication", "more", "--no-refresh")
    assert changed.returncode == 0, changed.stderr
    one_error(mover.cli("switchover", "moved", "--yes"), 3, 'publishes table "public.secret", which is not subscribed')
    assert _insert(mover, 0, 1) == 1
    assert mover("--status")["state"] == "none"


@pytest.mark.long
def test_a_pause_that_would_be_too_long_leaves_everything_as_it_was(mover: Mover, tmp_path: Path) -> None:
    first = mover.held("prepared", tmp_path, "--timeout", "3s")
    mover.alone(0, "BEGIN; INSERT INTO writes (client, number) VALUES (9, 9); PREPARE TRANSACTION 'undecided'")
    (tmp_path / "go").touch()
    try:
        assert first.wait(patience.SECONDS) == 8
        said = first.log.read_text()  # type: ignore[attr-defined]
        assert "timeout while waiting for prepared transactions" in said and "ROLLBACK PREPARED 'undecided'" in said
        assert "everything is left as it was" in said
        _insert(mover, 0, 1)
        _refused(mover, 1)
        assert [row["subname"] for row in mover.subscriptions()] == ["moved"]
        assert mover.rows(1, "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == [(0,)]
    finally:
        mover.alone(0, "ROLLBACK PREPARED 'undecided'")


@pytest.mark.long
def test_a_lock_that_somebody_holds_does_not_make_the_pause_longer(mover: Mover, tmp_path: Path) -> None:
    first = mover.held("fenced", tmp_path, "--timeout", "3s")
    with mover.databases[1].connect() as holder:
        holder.execute("BEGIN READ WRITE; LOCK TABLE writes")
        (tmp_path / "go").touch()
        assert first.wait(patience.SECONDS) == 8
    said = first.log.read_text()  # type: ignore[attr-defined]
    assert "timeout of the switchover" in said and "what ran then was canceled: " in said
    assert "everything is left as it was" in said
    _insert(mover, 0, 1)
    _refused(mover, 1)


@pytest.mark.long
def test_a_lock_that_comes_behind_the_deadline_does_not_make_the_pause_longer_either(
    mover: Mover, tmp_path: Path
) -> None:
    first = mover.held("sessions_ended", tmp_path, "--timeout", "1s")
    time.sleep(1.5)  # the deadline passes between two statements
    with mover.databases[1].connect() as holder:
        holder.execute("BEGIN READ WRITE; LOCK TABLE writes")
        (tmp_path / "go").touch()
        assert first.wait(patience.SECONDS) == 8
    _insert(mover, 0, 1)


@pytest.mark.long
def test_a_right_that_cannot_be_taken_in_time_is_given_back(mover: Mover, tmp_path: Path) -> None:
    first = mover.held("given", tmp_path, "--timeout", "3s")
    with mover.databases[1].connect() as holder:
        holder.execute("BEGIN READ WRITE; LOCK TABLE pgsub.switchover IN SHARE ROW EXCLUSIVE MODE")
        (tmp_path / "go").touch()
        time.sleep(5)  # the time is over; it cannot even be declined
        assert first.poll() is None
        _refused(mover, 0)
    assert first.wait(60) == 8
    said = first.log.read_text()  # type: ignore[attr-defined]
    assert "timeout of the switchover" in said and "everything is left as it was" in said
    assert _insert(mover, 0, 1) == 1
    _refused(mover, 1)
    assert mover("--status")["state"] == "none"


#: What a target that was restored, or the standby in its place, has of the switchover: see the phases of the journal.
_EARLIER = {
    "prepared": "UPDATE pgsub.switchover SET position = NULL WHERE phase = 'prepared'",
    "planned": "UPDATE pgsub.switchover SET position = NULL, phase = 'planned' WHERE phase = 'prepared'",
    "lost": "DELETE FROM pgsub.switchover",
}


@pytest.mark.parametrize("phase", [*long(["prepared", "planned"]), "lost"])
def test_a_target_that_lost_changes_since_the_right_was_given_does_not_take_it(mover: Mover, phase: str) -> None:
    _insert(mover, 0, 1)
    mover(kill="given")
    mover.alone(1, f"BEGIN READ WRITE; {_EARLIER[phase]}; COMMIT")
    words = ["switchover", mover.name, "--yes"]
    one_error(mover.cli(*words), 3, "the target has lost changes", "pgsub switchover moved --abort")
    assert mover.rows(1, "SELECT phase FROM pgsub.switchover") == ([] if phase == "lost" else [(phase,)])
    status = valid("switchover", mover.cli(*words[:2], "--status", "--json").stdout)
    assert status["state"] == "under way" and status["giving"] == "given" and status["taking"] == "lost"
    assert mover("--abort")["state"] == "as before"
    _insert(mover, 0, 2)
    until(lambda: mover.rows(1, "SELECT count(*) FROM writes") == [(2,)])


_BEFORE_POSITION = "UPDATE pgsub.switchover SET phase = 'prepared', position = NULL"
_BEHIND_POSITION = "UPDATE pgsub.switchover SET phase = 'prepared'"


@pytest.mark.parametrize(
    ("step", "earlier"),
    [
        ("enabled", _EARLIER["lost"]),
        ("enabled", _BEHIND_POSITION),
        *long([(step, to) for step in ("disabled", "promoted") for to in (_EARLIER["lost"], _BEFORE_POSITION)]),
        *long([("enabled", _BEFORE_POSITION)]),
    ],
)
def test_a_target_that_lost_the_switchover_after_it_had_taken_the_right_is_left(
    mover: Mover, step: str, earlier: str
) -> None:
    _insert(mover, 0, 1)
    mover("--no-verify", kill=step)
    read_only = f'ALTER DATABASE "{mover.databases[1].name}" SET default_transaction_read_only = on'
    if earlier == _BEHIND_POSITION:  # only what came back shows that clients wrote there
        _insert(mover, 1, 0)
        until(lambda: mover.rows(0, "SELECT count(*) FROM writes") == [(2,)])
        assert mover.cli("disable", "moved_back").returncode == 0
        mover.alone(1, "DELETE FROM writes WHERE number = 0")
    mover.alone(1, f"SET default_transaction_read_only = off; {earlier}; {read_only}")
    if step == "enabled":
        told = "pgsub switchover moved --abort"
        one_error(mover.cli("reconcile", "moved_back", "--force", "--yes"), 3, "has lost its switchover", told)
    one_error(mover.cli("switchover", "moved", "--yes"), 3, "the target has lost changes", "--abort")
    found = mover("--status")
    assert (found["state"], found["giving"], found["taking"]) == ("under way", "given", "lost")
    if earlier == _BEHIND_POSITION:
        mover("--abort", kill="releasing")
    assert mover("--abort")["state"] == "as before"
    assert mover.rows(0, "SELECT phase FROM pgsub.switchover") == [("released",)]
    assert [(row["subname"], row["subenabled"]) for row in mover.subscriptions()] == [("moved", True)]
    if earlier == _BEHIND_POSITION:  # as the warning says
        mover.alone(0, "SELECT setval('writes_id_seq', 9)")
    _insert(mover, 0, 2)
    if earlier == _EARLIER["lost"]:  # the other one's row has what it had before the fence
        _refused(mover, 1)
    until(lambda: mover.rows(1, "SELECT count(*) FROM writes WHERE number > 0") == [(2,)])
    assert mover.rows(0, "SELECT number FROM writes WHERE number > 0 ORDER BY 1") == [(1,), (2,)]


_BEFORE = {
    "prepared": _BEFORE_POSITION,
    "given": _BEHIND_POSITION,
    "begun": "DELETE FROM pgsub.switchover; INSERT INTO pgsub.subscription"
    " SELECT * FROM json_populate_record(NULL::pgsub.subscription, {})",
    "created": "DROP SCHEMA pgsub CASCADE",
}


@pytest.mark.parametrize("to", ["given", *long(["prepared", "begun", "created"])])
def test_a_target_that_loses_the_switchover_after_its_end_is_left(mover: Mover, to: str) -> None:
    _insert(mover, 0, 1)
    ((subscription,),) = mover.rows(1, "SELECT to_json(s)::text FROM pgsub.subscription s")
    mover("--no-verify")
    read_only = f'ALTER DATABASE "{mover.databases[1].name}" SET default_transaction_read_only = on'
    earlier = _BEFORE[to].format(sql.Literal(subscription).as_string())
    if to in ("created", "given"):  # its owner lets clients write there
        read_only = read_only.replace("SET", "RESET").replace(" = on", "")
    if to == "begun":  # nor is the slot there
        mover.side = 1
        mover.caught_up()
        assert mover.cli("disable", "moved_back").returncode == 0
        until(lambda: mover.rows(1, "SELECT active FROM pg_replication_slots") == [(False,)])
        mover.alone(1, "SELECT pg_drop_replication_slot('moved_back')")
        mover.side = 0
    mover.alone(1, f"SET default_transaction_read_only = off; {earlier}; {read_only}")
    told = "pgsub switchover moved --abort"
    reconcile = ("reconcile", "moved_back", "--force", "--yes")
    if to == "created":  # the server has gone on since, so nobody can say whether it was only its ledger
        said = one_error(mover.cli(*reconcile), 3, "has lost its switchover", "only its schema pgsub was dropped")
        assert "or only its schema pgsub was dropped" in mover.cli("switchover", "moved", "--status").stdout
        mover.alone(0, next(line for line in said.splitlines() if line.startswith("BEGIN READ WRITE")))
        one_error(mover.cli("switchover", "moved", "--yes"), 3, "has been switched over already")
        mover.alone(0, "BEGIN READ WRITE; UPDATE pgsub.switchover SET position = 'FFFF/0'; COMMIT")
    one_error(mover.cli(*reconcile), 3, "has lost its switchover", f"{told}\n")
    found = valid("switchover", mover.cli("switchover", "moved", "--status", "--json").stdout)
    assert (found["giving"], found["taking"]) == ("given", "lost") and "schema pgsub" not in found["said"]
    assert [one["command"] for one in found["choices"]] == [told]
    with mover.databases[1].connect() as other:
        other.execute("SELECT pg_advisory_lock(%s, %s)", DATABASE_LOCK)
        ended = mover.cli("switchover", "moved", "--abort", "--yes")
        one_error(ended, 9, "another switchover of the same database is under way")
    if to == "prepared":  # the publisher alone has what clients wrote on the target
        mover.plant(0, "INSERT INTO writes VALUES (55, 0, 55)")
        for overwriting in (
            ("refresh", "moved_back", "--resync", "public.writes"),
            ("refresh", "moved_back", "--adopt"),
            ("verify", "moved_back", "--repair"),
        ):
            one_error(mover.cli(*overwriting, "--yes"), 3, "has lost its switchover", told)
        mover.plant(0, "DELETE FROM writes WHERE id = 55")
    words = ("switchover", "moved", "--abort", "--yes")
    if to == "given":
        mover.rows(1, "INSERT INTO writes VALUES (66, 0, 66) RETURNING id")
        killed = mover.cli(*words, env={"PGSUB_FAILPOINTS": "switchover.kept_out=kill"})
        assert killed.returncode in (-9, 137)
        _refused(mover, 1)
        for side in (0, 1):  # it may have come back before that ended
            mover.alone(side, "BEGIN READ WRITE; DELETE FROM writes WHERE id = 66; COMMIT")
    killed = mover.cli(*words, env={"PGSUB_FAILPOINTS": "switchover.releasing=kill"})
    assert killed.returncode in (-9, 137)
    assert ("the target was made read-only" in killed.stderr) is (to == "created")
    found = valid("switchover", mover.cli("switchover", "moved", "--status", "--json").stdout)
    assert (found["giving"], [one["command"] for one in found["choices"]]) == ("releasing", [told])
    one_error(mover.cli(*reconcile), 3, "has lost its switchover", told)
    warned = ""
    if to == "prepared":
        killed = mover.cli(*words, env={"PGSUB_FAILPOINTS": "drop.after_ledger=kill"})
        assert killed.returncode in (-9, 137) and mover.rows(0, "SELECT FROM pgsub.subscription") == []
        warned = killed.stderr
        found = valid("switchover", mover.cli("switchover", "moved", "--status", "--json").stdout)
        assert (found["giving"], [one["command"] for one in found["choices"]]) == ("releasing", [told])
        one_error(mover.cli("switchover", "moved", "--yes"), 3, "the abort of the switchover was interrupted", told)
    undone = mover.cli(*words)
    assert undone.returncode == 0 and "Create subscription moved again" in undone.stdout, undone
    assert "sequences of the publisher may be behind" in warned + undone.stderr
    _refused(mover, 1)
    assert mover.subscriptions() == []
    assert mover.rows(0, "SELECT phase FROM pgsub.switchover") == [("released",)]
    if to != "created":
        kept = [] if to == "begun" else [("declined",)]
        assert mover.rows(1, "SELECT phase FROM pgsub.switchover") == kept
        assert mover.rows(1, "SELECT subname FROM pgsub.subscription") == []
    _insert(mover, 0, 2)
    assert mover.cli.create("moved", "--adopt", "--yes", "--no-wait").returncode == 0
    mover.caught_up()
    assert mover.rows(1, "SELECT number FROM writes ORDER BY 1") == [(1,), (2,)]
    if to == "created":
        mover.alone(1, next(line for line in killed.stderr.splitlines() if line.startswith("BEGIN READ WRITE")))
        assert mover.rows(1, "UPDATE writes SET client = 0 RETURNING number") == [(1,), (2,)]


@pytest.mark.parametrize("step", ["enabled", *long(["given"])])
def test_a_target_that_is_restored_to_before_the_subscription_lets_clients_write_on_the_publisher(
    mover: Mover, step: str
) -> None:
    _insert(mover, 0, 1)
    mover("--no-verify", kill=step)
    mover.alone(1, "BEGIN READ WRITE; DROP SCHEMA pgsub CASCADE; COMMIT")
    one_error(mover.cli("switchover", "moved", "--yes"), 3, "the target has lost changes", "switchover moved --abort")
    found = mover("--status")
    assert (found["state"], found["giving"], found["taking"]) == ("under way", "given", "lost")
    found = mover("--abort")
    assert found["state"] == "as before" and "Drop subscription moved, " in found["said"]
    _refused(mover, 1)
    _insert(mover, 0, 2)
    assert mover.cli("drop", "moved", "--yes").returncode == 0
    assert mover.cli.create("moved", "--adopt", "--yes", "--no-wait").returncode == 0
    mover.caught_up()
    assert mover.rows(1, "SELECT number FROM writes ORDER BY 1") == [(1,), (2,)]


def _kept(mover: Mover, make_cli: Callable[[str, str], Cli]) -> Cli:
    """Copy the state folder as it is now."""
    older = make_cli("", "")
    older.state.mkdir(mode=0o700)
    with (
        contextlib.closing(sqlite3.connect(mover.cli.state / "state.db")) as store,
        contextlib.closing(sqlite3.connect(older.state / "state.db")) as copy,
    ):
        store.backup(copy)
    (older.state / "state.db").chmod(0o600)
    return older


def test_a_state_folder_from_before_a_switchover_is_not_told_to_make_the_subscription_again(
    mover: Mover, make_cli: Callable[[str, str], Cli]
) -> None:
    older = _kept(mover, make_cli)
    mover("--no-verify")
    slots = mover.rows(1, "SELECT slot_name FROM pg_replication_slots")
    said = "was switched over, and the state store is older"
    for words in (
        ("verify", "moved"),
        ("refresh", "moved"),
        ("switchover", "moved", "--yes"),
        ("switchover", "moved", "--status"),
        ("switchover", "moved", "--abort", "--yes"),
        ("run", "moved", "--until-caught-up", "--timeout", "2m"),
    ):
        told = one_error(older(*words), 3, said, "pgsub run moved_back --from-target")
        assert "--adopt" not in told
    assert older("drop", "moved", "--yes").returncode == 0
    assert mover.rows(1, "SELECT slot_name FROM pg_replication_slots") == slots
    id = _insert(mover, 1, 1)
    mover.side = 1
    mover.caught_up()
    assert mover.rows(0, "SELECT id FROM writes") == [(id,)]


def test_a_state_folder_from_the_middle_of_a_switchover_that_has_ended_does_not_say_that_it_leads_back(
    mover: Mover, make_cli: Callable[[str, str], Cli]
) -> None:
    mover("--no-verify", "--timeout", "2m", kill="fenced")
    older = _kept(mover, make_cli)
    mover("--no-verify", "--timeout", "2m")
    told = one_error(older("switchover", "moved", "--yes"), 3, "the state store is older than the ledger")
    assert "pgsub drop moved_back --yes\npgsub run moved_back --from-target" in told
    assert older("drop", "moved_back", "--yes").returncode == 0
    id = _insert(mover, 1, 1)
    mover.side = 1
    mover.caught_up()
    assert mover.rows(0, "SELECT id FROM writes") == [(id,)]


@pytest.mark.long
def test_another_subscription_of_the_name_does_not_hide_that_a_switchover_is_lost(mover: Mover) -> None:
    mover("--no-verify")
    mover.alone(1, f"BEGIN READ WRITE; {_BEHIND_POSITION}; COMMIT")
    made = mover.cli.create("moved", "--no-copy-data", "--no-wait", "--slot-name", "second")
    assert made.returncode == 0, made.stderr
    assert [one["command"] for one in mover("--status")["choices"]] == ["pgsub switchover moved --abort"]
    assert mover("--abort")["state"] == "as before"
    _insert(mover, 0, 1)
    assert [row["subname"] for row in mover.subscriptions()] == ["moved"]


@pytest.mark.long
def test_an_abort_changes_no_server_that_is_not_the_target(mover: Mover) -> None:
    mover("--no-verify")
    mover.alone(1, "UPDATE pgsub.switchover SET phase = 'prepared', position = NULL")
    other = mover.databases[1].conninfo.replace(mover.databases[1].name, "postgres")
    assert mover.cli("disable", "moved_back").returncode == 0
    [(before,)] = mover.cli.sql("SELECT subconninfo FROM pg_subscription")
    settings = (
        "SELECT count(*) FROM pg_db_role_setting s JOIN pg_database d ON d.oid = setdatabase WHERE datname = 'postgres'"
    )
    for kill in ("releasing", None):  # the second run need not ask the target what it has lost
        _lead_to(mover, other)
        try:
            one_error(mover.cli("switchover", "moved", "--abort", "--yes"), 7, "database is a different one")
        finally:
            _lead_to(mover, before)
        assert mover.rows(1, settings) == [(0,)]
        mover("--abort", kill=kill)


def _lead_to(mover: Mover, conninfo: str) -> None:
    """Let both subscriptions find another server, as a name that resolves to another address does."""
    with contextlib.closing(sqlite3.connect(mover.cli.state / "state.db", isolation_level=None)) as store:
        store.execute("UPDATE pg_subscription SET subconninfo = ? WHERE subname = 'moved_back'", (conninfo,))
        store.execute("UPDATE pg_subscription SET pgsub_target = ? WHERE subname = 'moved'", (conninfo,))


@pytest.mark.parametrize("kill", [None, *long(["given", "enabled"])])
def test_where_another_server_has_the_place_of_the_target_clients_can_be_let_write_on_the_publisher(
    mover: Mover, kill: str | None
) -> None:
    mover("--no-verify", kill=kill)
    _lead_to(mover, mover.databases[0].server.conninfo())
    gone = "pgsub switchover moved --abort --gone target"
    shows = "pgsub switchover moved --status"
    found = valid("switchover", mover.cli("switchover", "moved", "--status", "--json").stdout)
    assert (found["state"], found["giving"]) == ("done" if kill is None else "under way", "given")
    assert "Another database answers in place of the target" in found["said"]
    assert [one["command"] for one in found["choices"]] == [gone]
    moved = mover.cli("switchover", "moved", "--yes", "--no-verify")
    one_error(moved, *((7, "the target is a different database system", gone) if kill is None else (3, shows)))
    one_error(
        mover.cli("switchover", "moved", "--abort", "--yes"), 7, "the target is a different database system", gone
    )
    for words in (("reconcile", "moved_back", "--force", "--yes"), ("drop", "moved_back", "--yes")):
        if kill is None:
            assert "--adopt" not in one_error(mover.cli(*words), 7, "is a different database system", shows)
    if kill != "given":
        runbook = ("status", "moved_back", "--runbook")
        until(lambda: "different database system" in mover.cli(*runbook).stdout)
        assert "--adopt" not in mover.cli(*runbook).stdout
    _refused(mover, 0)
    killed = mover.cli(*gone.split()[1:], "--yes", env={"PGSUB_FAILPOINTS": "switchover.releasing=kill"})
    assert killed.returncode in (-9, 137) and "another database answers in place of the target" in killed.stderr
    one_error(mover.cli("switchover", "moved", "--abort", "--yes"), 7, "is a different database system", gone)
    undone = mover.cli(*gone.split()[1:], "--yes")
    assert undone.returncode == 0, undone.stderr
    _insert(mover, 0, 1)
    assert [row["subname"] for row in mover.subscriptions()] == ["moved"] * (kill is not None)
    assert mover.cli("drop", "moved", "--if-exists", "--keep-target", "--yes").returncode == 0


def test_a_role_that_may_not_read_the_journal_of_the_target_does_not_hide_that_it_is_lost(mover: Mover) -> None:
    role = f"reads_{mover.databases[1].name}"
    mover.alone(1, f"BEGIN READ WRITE; CREATE ROLE {role} LOGIN REPLICATION; GRANT SELECT ON writes TO {role}; COMMIT")
    way = make_conninfo(mover.conninfos[1], user=role)
    try:
        ended = mover.cli("switchover", "moved", "--yes", "--no-verify", "--back-connection", way)
        assert ended.returncode == 0 and "may not read the journal" in ended.stderr, ended
        one_error(mover.cli("switchover", "moved", "--yes"), 3, "has been switched over already")
        mover.alone(1, "UPDATE pgsub.switchover SET phase = 'prepared', position = NULL")
        grant = f'GRANT SELECT ON pgsub.switchover, pgsub.subscription TO "{role}"'
        one_error(mover.cli("reconcile", "moved_back", "--force", "--yes"), 11, "could not read the journal", grant)
        shown = mover.cli("switchover", "moved", "--status").stdout
        assert "is not known" in shown and grant in shown
        mover.alone(1, f'GRANT USAGE ON SCHEMA pgsub TO "{role}"; {grant}')
        assert "--abort" in mover.cli("switchover", "moved", "--status").stdout
    finally:
        assert mover.cli("drop", "moved_back", "--yes", "--keep-target").returncode == 0
        mover.alone(1, f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_way_back_whose_slot_goes_back_in_a_crash_brings_nothing_back(mover: Mover) -> None:
    mover("--no-verify")
    mover.side = 1
    mover("--no-verify", kill="created")
    # the slot is before it, and the way back takes changes of any origin
    moved = _insert(mover, 1, 1)
    mover.caught_up()
    copied = "SELECT pg_copy_logical_replication_slot('{}', '{}')"
    mover.alone(0, copied.format("moved", "as_it_was"))
    mover("--no-verify", kill="given")
    mover.alone(0, f"SELECT pg_drop_replication_slot('moved'); {copied.format('as_it_was', 'moved')}")
    mover.alone(0, "SELECT pg_drop_replication_slot('as_it_was')")
    assert mover("--no-verify")["state"] == "done"
    mover.side = 0
    new = _insert(mover, 0, 2)
    mover.caught_up()
    assert mover.rows(1, "SELECT id, number FROM writes ORDER BY 1") == [(moved, 1), (new, 2)]
    assert mover.cli.sql("SELECT count(*) FROM pgsub_conflict") == [(0,)]


#: What a publisher that was restored, or the standby in its place, has of the switchover, and what it lacks.
_OPEN = "ALTER DATABASE {} RESET default_transaction_read_only"
_UNGIVEN = {
    "fenced": "UPDATE pgsub.switchover SET phase = 'fenced', position = NULL",
    "open": f"UPDATE pgsub.switchover SET (phase, position, saved, fenced_at) = ('open', NULL, NULL, NULL); {_OPEN}",
    "no row": f"DELETE FROM pgsub.switchover; {_OPEN}",
    "no way back": f"DELETE FROM pgsub.switchover; DELETE FROM pgsub.subscription; {_OPEN}",
}


def _go_back_in_time(mover: Mover, to: str, *, running: bool = False) -> None:
    """Let the publisher lose what the target has taken, and have a client write there if it can.

    :param running: the way back runs already, whose own position is no part of this.
    """
    lost = _UNGIVEN[to].format(f'"{mover.databases[0].name}"')
    position = "" if running else "UPDATE pgsub.progress SET remote_lsn = '0/0', reported_lsn = '0/0';"
    mover.alone(0, f"BEGIN READ WRITE; {lost}; {position} COMMIT")
    if to == "fenced":
        _refused(mover, 0)
    else:
        mover.alone(0, "INSERT INTO writes VALUES (77, 0, 77)")


@pytest.mark.parametrize(
    ("step", "to"), [("taken", "no row"), *long([("taken", "fenced"), ("taken", "open"), ("done", "open")])]
)
def test_a_publisher_that_lost_its_fence_since_the_target_took_the_right_is_fenced_again_and_told(
    mover: Mover, step: str, to: str
) -> None:
    _insert(mover, 0, 1)
    mover("--no-verify", kill=step)
    _go_back_in_time(mover, to, running=step == "done")
    _insert(mover, 1, 2)
    one_error(mover.cli("switchover", "moved", "--abort", "--yes"), 3, "can no longer be aborted")
    assert "so clients may write there, too" in mover("--status")["said"]
    words = ("switchover", "moved", "--yes", "--no-verify")
    for _ in range(2):  # nor is the next run content
        one_error(mover.cli(*words), 3, "the publisher has lost changes since", "pgsub verify moved_back --rows")
        _refused(mover, 0)
        found = mover("--status")
        assert (found["state"], found["giving"], found["taking"]) == ("under way", "given", "done")
    assert mover.cli("status", "moved", "--check").returncode == 3
    compared = mover.cli("verify", "moved_back", "--rows")
    left = step == "done"  # until it was disabled, apply brought what clients wrote there
    found = re.search(r"\b77\b", compared.stdout)  # not in a position
    assert (compared.returncode, found is not None) == ((6, True) if left else (0, False)), compared
    assert mover.cli("drop", "moved", "--yes").returncode == 0
    mover.side = 1
    mover.caught_up()
    assert mover.rows(0, "SELECT number FROM writes WHERE id < 77 ORDER BY 1") == [(1,), (2,)]
    one_error(mover.cli("switchover", "moved", "--yes"), 3, "has been switched over already")


def test_a_publisher_that_loses_its_fence_after_the_switchover_is_fenced_again_and_made_equal(mover: Mover) -> None:
    _insert(mover, 0, 1)
    mover("--no-verify")
    mover.side = 1
    mover.caught_up()
    _go_back_in_time(mover, "open", running=True)
    sessions = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ~ '^pgsub .* apply'"
    mover.alone(0, sessions)  # which end with the server that fails
    until(lambda: "has not moved the writes" in mover.cli("status", "moved_back", "--runbook").stdout)
    _insert(mover, 1, 2)
    found = valid("switchover", mover.cli("switchover", "moved", "--status", "--json").stdout)
    assert "so clients may write there, too" in found["said"]
    assert [one["command"] for one in found["choices"]] == ["pgsub switchover moved"]
    words = ("switchover", "moved", "--yes")
    with mover.databases[1].connect() as other:
        other.execute("SELECT pg_advisory_lock(%s, %s)", DATABASE_LOCK)
        one_error(mover.cli(*words), 9, "another switchover of the same database is under way")
    one_error(mover.cli(*words), 3, "the publisher has lost changes since", "pgsub reconcile moved_back")
    _refused(mover, 0)
    made = mover.cli("reconcile", "moved_back", "--force", "--yes")
    assert made.returncode == 0, made.stderr
    until(lambda: mover.rows(0, "SELECT number FROM writes ORDER BY 1") == [(1,), (2,)])
    one_error(mover.cli(*words), 3, "has been switched over already")


def test_a_publisher_that_loses_all_of_the_switchover_after_its_end_is_told_and_not_changed(mover: Mover) -> None:
    mover("--no-verify")
    mover.side = 1
    mover.caught_up()
    _go_back_in_time(mover, "no way back", running=True)
    mover.alone(0, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name ~ '^pgsub .* apply'")
    told = "pgsub drop moved_back --keep-target --yes"
    one_error(mover.cli("switchover", "moved", "--yes"), 3, "clients may write on both servers", told)
    one_error(mover.cli("switchover", "moved", "--abort", "--yes"), 3, "clients may write on both servers", told)
    shown = mover.cli("switchover", "moved", "--status").stdout
    assert "so clients may write there, too" in shown and told in shown
    until(lambda: mover.cli("status", "moved_back", "--check").returncode in (3, 6))
    assert "pgsub switchover moved --status" in mover.cli("status", "moved_back", "--runbook").stdout
    assert mover.rows(0, "SELECT count(*) FROM pgsub.switchover") == [(0,)]
    assert mover.cli(*told.split()[1:]).returncode == 0


@pytest.mark.long
def test_a_publisher_that_lost_all_of_the_switchover_is_told_and_not_changed(mover: Mover) -> None:
    mover("--no-verify", kill="taken")
    _go_back_in_time(mover, "no way back")
    words = ("switchover", "moved", "--yes", "--no-verify")
    for _ in range(2):
        one_error(mover.cli(*words), 3, "clients may write on both servers", "pgsub switchover moved --gone publisher")
        assert "so clients may write there, too" in mover("--status")["said"]
    assert mover.rows(0, "SELECT count(*) FROM pgsub.switchover") == [(0,)]


@pytest.mark.long
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_publisher_that_loses_its_fence_under_the_run_that_took_the_right_is_fenced_again_and_told(
    mover: Mover, tmp_path: Path, interrupted: bool
) -> None:
    first = mover.held("taken", tmp_path, "--timeout", "2m")
    _go_back_in_time(mover, "open")
    if interrupted:
        first.send_signal(signal.SIGINT)  # type: ignore[attr-defined]
    else:
        (tmp_path / "go").touch()
    assert first.wait(patience.SECONDS) == 3
    said = first.log.read_text()  # type: ignore[attr-defined]
    assert "the publisher has lost changes since" in said and "everything is left as it was" not in said
    _refused(mover, 0)
    _insert(mover, 1, 1)


@pytest.mark.long
def test_sessions_that_began_behind_a_fence_do_not_stay_read_only_when_it_is_lifted(
    mover: Mover, tmp_path: Path
) -> None:
    """As those of a pool, which gives them to one client after the other."""
    for step, options, side, code in (("fenced", ("--timeout", "1s"), 0, 8), ("drained", ("--timeout", "2m"), 1, 0)):
        folder = tmp_path / step
        folder.mkdir()
        first = mover.held(step, folder, *options)
        with mover.databases[side].connect() as pooled:
            with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
                pooled.execute("INSERT INTO writes (client, number) VALUES (0, 1)")
            time.sleep(1.2 if code else 0.0)  # its time is over
            (folder / "go").touch()
            assert first.wait(60) == code, first.log.read_text()  # type: ignore[attr-defined]
            with pytest.raises(psycopg.OperationalError):
                pooled.execute("INSERT INTO writes (client, number) VALUES (0, 1)")
        _insert(mover, side, 1)


@pytest.mark.long
def test_a_command_that_leads_clients_to_the_target_is_not_left_out_by_the_next_run(
    mover: Mover, tmp_path: Path
) -> None:
    told = ("--promote-command", f"echo $PGSUB_SWITCHOVER >> {tmp_path}/told")
    for step in ("prepared", "taken"):
        mover("--no-verify", *told, kill=step)
        one_error(mover.cli("switchover", "moved", "--yes", "--no-verify"), 2, "was begun with --promote-command")
        assert mover("--status")["choices"][0]["command"] == "pgsub switchover moved --promote-command COMMAND"
        if step == "prepared":
            assert mover("--abort")["state"] == "as before"
    assert mover("--no-verify", *told)["state"] == "done"
    assert (tmp_path / "told").read_text() == "promote\n"


@pytest.mark.long
def test_who_interrupts_it_behind_the_pause_reads_that_it_is_not_finished_and_what_goes_on(
    mover: Mover, tmp_path: Path
) -> None:
    (script := tmp_path / "lead").write_text("touch $0.began; while [ ! -e $0.may_end ]; do sleep 0.1; done")
    go_on = f"pgsub switchover moved --promote-command 'sh {script}'"
    first = mover.cli.start(*go_on.split()[1:4], f"sh {script}", "--yes", "--no-verify")
    until((tmp_path / "lead.began").exists)
    said = _interrupted(first)
    assert "interrupted and is not finished: clients may write on the target" in said
    assert "--promote-command has not run to its end" in said and f"Let it finish:\n{go_on}\n" in said
    (tmp_path / "lead.may_end").touch()
    (behind := tmp_path / "behind").mkdir()
    said = _interrupted(mover.held("disabled", behind, "--promote-command", f"sh {script}"))
    assert "is not finished" in said and "has not run to its end" not in said and go_on in said
    assert mover("--no-verify")["state"] == "done"


@pytest.mark.long
def test_who_interrupts_it_in_the_pause_does_not_read_that_it_failed(mover: Mover, tmp_path: Path) -> None:
    said = _interrupted(mover.held("fenced", tmp_path, "--timeout", "2m"))
    assert "was interrupted before the target had taken the right to write: everything is left as it was" in said
    assert _insert(mover, 0, 1) == 1


@pytest.mark.long
def test_who_interrupts_the_undoing_too_reads_what_is_left(mover: Mover, tmp_path: Path) -> None:
    started = mover.held("fenced", tmp_path, "--timeout", "2m")
    with mover.databases[0].connect() as session:
        session.execute("BEGIN READ WRITE")
        session.execute("LOCK TABLE pgsub.switchover")
        started.send_signal(signal.SIGINT)  # type: ignore[attr-defined]
        until(lambda: mover.rows(0, "SELECT count(*) FROM pg_locks WHERE NOT granted")[0][0])
        said = _interrupted(started)
    assert "was not undone" in said and "pgsub switchover moved --abort" in said, said
    assert mover("--abort")["state"] == "as before"
    assert _insert(mover, 0, 1) == 1


def _interrupted(started: Started) -> str:
    """Type Ctrl-C; return what is said."""
    started.send_signal(signal.SIGINT)  # type: ignore[attr-defined]
    assert started.wait(patience.SECONDS) == 130
    return str(started.log.read_text())  # type: ignore[attr-defined]


@pytest.mark.long
@pytest.mark.parametrize(
    ("step", "commands"),
    [
        ("created", ["", " --abort"]),
        ("fenced", ["", " --abort"]),
        ("given", ["", " --abort"]),
        ("taken", [""]),
        ("done", [""]),
    ],
)
def test_status_says_what_can_be_done_in_each_step(mover: Mover, step: str, commands: list[str]) -> None:
    mover("--no-verify", kill=step)
    found = [choice["command"] for choice in mover("--status")["choices"]]
    assert found == [f"pgsub switchover moved{words}" for words in commands]
    checked = mover.cli("status", "moved", "--check")
    warned = 'subscription "moved": a switchover is under way\nHINT:  The next command is:\n'
    assert checked.returncode == 3 and f"{warned}pgsub switchover moved --status\n" in checked.stderr, checked
    shown = mover.cli("switchover", "moved", "--status").stdout
    assert all(f"\n  {command}\n" in shown for command in found), shown
    ended = mover.cli(*found[-1].split()[1:], "--yes")  # what it says can be done
    assert ended.returncode == 0, ended.stderr
    assert mover("--status")["choices"] == []


@pytest.mark.parametrize("mover", [{"target_session_attrs": "read-write"}], indirect=True, ids=["read-write"])
@pytest.mark.parametrize("told", ["--abort", *long([""])])
def test_servers_that_are_read_only_for_clients_are_connected_to_though_read_write_is_asked_for(
    mover: Mover, told: str
) -> None:
    """The target is read-only from the beginning, and both servers are while nobody has the right to write."""
    mover("--dry-run")
    mover("--no-verify", kill="drained")
    for side in (0, 1):
        _refused(mover, side)
    if told:
        assert mover(told)["state"] == "as before"
    else:
        assert mover("--no-verify")["state"] == "done"
        _insert(mover, 1, 1)
        mover.side = 1
        mover.caught_up()
        assert mover("--no-verify")["state"] == "done"
        mover.side = 0
    _insert(mover, 0, 2)
    mover.caught_up()
    [stored] = mover.cli.sql("SELECT subconninfo, pgsub_target FROM pg_subscription")
    assert all(conninfo_to_dict(one)["target_session_attrs"] == "read-write" for one in stored)


@pytest.mark.long
def test_a_run_that_only_undoes_what_was_begun_does_not_end_as_if_the_writes_had_moved(mover: Mover) -> None:
    mover("--no-verify", kill="fenced")
    mover("--abort", kill="releasing")
    ended = mover.cli("switchover", "moved", "--yes", "--no-verify")
    one_error(ended, 3, "has been undone: everything is as it was before", "To begin anew")
    assert mover("--status")["state"] == "none"
    assert mover("--no-verify")["state"] == "done"


@pytest.mark.long
def test_a_server_that_vanishes_in_the_pause_does_not_hold_the_command(
    mover: Mover, tmp_path: Path, proxy: Callable[[str], Proxy]
) -> None:
    way = proxy(mover.conninfos[0])
    first = mover.held("sessions_ended", tmp_path, "--timeout", "3s", "--back-target", way.conninfo)
    way.stall()
    (tmp_path / "go").touch()
    assert first.wait(patience.SECONDS) == 4, first.log.read_text()  # type: ignore[attr-defined]
    _refused(mover, 0)  # nobody could lift the fence there
    way.resume()
    ended = mover.cli("switchover", "moved", "--yes", "--no-verify", "--timeout", "3s")
    assert ended.returncode == 8, ended.stderr
    _insert(mover, 0, 1)


@pytest.mark.long
def test_a_pause_whose_limit_nobody_watches_leaves_everything_as_it_was(
    mover: Mover, reached: Callable[[str], None]
) -> None:
    words = ("switchover", "moved", "--yes", "--no-verify")
    ended = mover.cli(*words, env={"PGSUB_FAILPOINTS": "thread.pause_limit=die"})
    one_error(ended, 12, "limit of the pause", "--status")
    reached("thread.pause_limit")
    _insert(mover, 0, 1)


@pytest.mark.long
def test_a_run_after_the_time_is_over_goes_back(mover: Mover) -> None:
    mover("--no-verify", kill="fenced")
    _refused(mover, 0)
    time.sleep(0.2)  # the fence lasts longer than the next run allows, however fast that is
    undo, longer = mover("--status", "--timeout", "100ms")["choices"]
    assert undo["command"] == "pgsub switchover moved --abort" and "the time of the pause is over" in undo["what"]
    assert re.fullmatch(r"pgsub switchover moved --timeout \d+s", longer["command"])
    ended = mover.cli("switchover", "moved", "--yes", "--no-verify", "--timeout", "100ms")
    assert ended.returncode == 8 and "timeout of the switchover" in ended.stderr, ended.stderr
    assert _insert(mover, 0, 1) == 1
    assert mover("--status")["state"] == "none"


@pytest.mark.long
def test_nothing_is_aborted_once_clients_may_write_on_the_target(mover: Mover) -> None:
    mover("--no-verify", kill="taken")
    ended = mover.cli("switchover", "moved", "--abort", "--yes")
    one_error(ended, 3, "can no longer be aborted", "pgsub switchover moved --back")
    assert mover("--status")["said"] == "Clients may write on the target."
    assert mover("--no-verify")["state"] == "done"
    mover.side = 1
    ended = mover.cli("switchover", "moved", "--yes")
    one_error(ended, 3, "has been switched over already", "pgsub switchover moved --back")


@pytest.mark.long
def test_commands_of_the_user_fence_and_promote(mover: Mover, tmp_path: Path) -> None:
    log, script = tmp_path / "log", tmp_path / "pool"
    script.write_text(f'#!/bin/sh\necho "$PGSUB_SWITCHOVER|$PGSUB_GIVING|$PGSUB_TAKING" >> {log}\n')
    script.chmod(stat.S_IRWXU)
    mover("--no-verify", "--fence-command", str(script), "--promote-command", str(script))
    lines = [line.split("|") for line in log.read_text().splitlines()]
    assert [line[0] for line in lines] == ["fence", "promote"]
    assert all(mover.databases[0].name in giving and mover.databases[1].name in taking for _, giving, taking in lines)
    assert _insert(mover, 0, 1) == 1  # nothing else kept clients from it


@pytest.mark.long
def test_sessions_of_the_target_end_with_a_fence_that_is_a_command_too(mover: Mover) -> None:
    """What they have of a sequence's cache was given out by the publisher meanwhile."""
    mover.alone(1, "BEGIN READ WRITE; ALTER SEQUENCE writes_id_seq CACHE 20; COMMIT")
    with mover.databases[1].connect() as caching:
        caching.execute("SET default_transaction_read_only = off")
        assert caching.execute("SELECT nextval('writes_id_seq')").fetchone() == (1,)
        caching.commit()
        _insert(mover, 0, 1)
        mover("--no-verify", "--fence-command", "true")
        with pytest.raises(psycopg.OperationalError):
            caching.execute("SELECT nextval('writes_id_seq')")


@pytest.mark.long
def test_clients_that_write_on_the_target_are_not_ended_by_the_next_run(mover: Mover) -> None:
    one_error(mover.cli("switchover", "moved", "--yes", "--no-verify", "--promote-command", "false"), 1, "to promote")
    with mover.databases[1].connect() as client:
        client.execute("INSERT INTO writes (client, number) VALUES (0, 1)")
        client.commit()
        assert mover("--no-verify", "--promote-command", "true")["state"] == "done"
        client.execute("INSERT INTO writes (client, number) VALUES (0, 2)")


@pytest.mark.long
def test_a_user_whom_a_service_names_may_connect_behind_the_fence(mover: Mover, tmp_path: Path) -> None:
    for database in mover.databases:
        database.execute("BEGIN READ WRITE; CREATE ROLE sw_service LOGIN SUPERUSER; COMMIT")
    names = {**conninfo_to_dict(mover.conninfos[1]), "user": "sw_service"}
    file = tmp_path / "services"
    file.write_text("[sw]\n" + "".join(f"{name}={value}\n" for name, value in names.items()))
    env = {"PGSERVICEFILE": str(file)}
    words = ("switchover", "moved", "--yes", "--no-verify", "--fence", "connect", "--back-connection", "service=sw")
    ended = mover.cli(*words, env={**env, "PGSUB_FAILPOINTS": "switchover.fenced=kill"})
    assert ended.returncode == -9, ended.stderr
    [(granted,)] = mover.rows(0, "SELECT saved ->> 'granted' FROM pgsub.switchover")
    assert "sw_service" in granted
    ended = mover.cli("switchover", "moved", "--abort", "--yes", env=env)
    assert ended.returncode == 0, ended.stderr
    for side in (0, 1):
        mover.alone(side, "BEGIN READ WRITE; DROP ROLE sw_service; COMMIT")


@pytest.mark.long
def test_a_fence_command_that_fails_is_told_to_release(mover: Mover, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = f'echo "$PGSUB_SWITCHOVER" >> {log}; test "$PGSUB_SWITCHOVER" = release'
    ended = mover.cli("switchover", "moved", "--yes", "--no-verify", "--fence-command", command)
    one_error(ended, 1, "the command to fence failed with exit code 1")
    assert log.read_text().split() == ["fence", "release"]
    assert [row["subname"] for row in mover.subscriptions()] == ["moved"]


@pytest.mark.long
def test_a_fence_command_that_takes_too_long_is_killed_with_all_that_it_started(mover: Mover) -> None:
    command = 'test "$PGSUB_SWITCHOVER" = release || { sleep 3601.25 & wait; }'
    ended = mover.cli("switchover", "moved", "--yes", "--no-verify", "--fence-command", command, "--timeout", "500ms")
    one_error(ended, 8, "timeout while running the command to fence")
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(line.startswith(b"sleep\x003601.25") for line in lines)


@pytest.mark.long
def test_roles_that_may_not_connect_are_let_in_again(mover: Mover) -> None:
    query = "SELECT has_database_privilege('pg_monitor', current_database(), 'CONNECT')"
    before = mover.rows(1, "SELECT datacl::text FROM pg_database WHERE datname = current_database()")
    mover("--no-verify", "--fence", "connect")
    assert (mover.rows(0, query), mover.rows(1, query)) == ([(False,)], [(True,)])
    _insert(mover, 1, 1)  # though its owner had made it read-only until then
    mover.side = 1
    mover.caught_up()
    mover("--no-verify", "--fence", "connect")
    mover.side = 0
    assert (mover.rows(0, query), mover.rows(1, query)) == ([(True,)], [(False,)])
    mover.caught_up()
    assert before == [(None,)]


@pytest.mark.long
def test_a_subscription_that_was_renamed_meanwhile_leads_back_to_a_server_that_is_open(mover: Mover) -> None:
    mover("--no-verify", "--fence", "connect")
    mover.side = 1
    mover.caught_up()
    assert mover.cli("alter", "moved_back", "--rename-to", "other").returncode == 0
    ended = mover.cli("switchover", "other", "--yes", "--no-verify", "--back-publication", "p")
    assert ended.returncode == 0, ended.stderr
    query = "SELECT has_database_privilege('pg_monitor', current_database(), 'CONNECT')"
    assert mover.rows(0, query) == [(True,)]
    _insert(mover, 0, 1)


@pytest.mark.long
def test_two_runs_at_once_are_one_too_many(mover: Mover, tmp_path: Path) -> None:
    first = mover.held("drained", tmp_path, "--timeout", "2m")
    ended = mover.cli("switchover", "moved", "--yes", "--no-verify")
    one_error(ended, 9, "another switchover of the same database is under way", "pg_terminate_backend")
    (tmp_path / "go").touch()
    assert first.wait(patience.SECONDS) == 0, first.log.read_text()  # type: ignore[attr-defined]
    assert _insert(mover, 1, 1) == 1


@pytest.mark.long
def test_a_session_that_sets_itself_writable_is_found_out(mover: Mover) -> None:
    publisher = mover.conninfos[0]
    with Clients((publisher, publisher), options="-c default_transaction_read_only=off"):
        ended = mover.cli("switchover", "moved", "--yes", "--no-verify", "--timeout", "20s")
    one_error(ended, 3, "clients still write to the fenced publisher", "pg_stat_activity")
    assert _insert(mover, 0, 1) > 1


@pytest.mark.long
def test_what_stands_in_the_way_is_refused_with_what_to_run_and_shown_by_a_rehearsal(mover: Mover) -> None:
    with mover.databases[1].connect() as session:
        session.execute("SET default_transaction_read_only = off")
        session.execute("ALTER PUBLICATION moved_back DROP TABLE writes")
    ended = mover.cli("switchover", "moved", "--yes", "--no-verify")
    statement = 'ALTER PUBLICATION "moved_back" SET TABLE "public"."writes"'
    one_error(
        ended, 3, "1 thing must be corrected before the switchover", statement, "pgsub switchover moved --dry-run"
    )
    found = mover("--dry-run", code=3)
    assert found["pause"] is None and statement in found["obstacles"][0]["hint"]
    assert statement in mover.cli("switchover", "moved", "--dry-run").stdout
    assert _insert(mover, 0, 1) == 1
    assert mover("--status")["state"] == "none"


@pytest.mark.long
def test_the_way_back_leads_to_the_publisher_and_nowhere_else(mover: Mover) -> None:
    other = mover.databases[0].conninfo.replace(mover.databases[0].name, "postgres")
    ended = mover.cli("switchover", "moved", "--yes", "--no-verify", "--back-target", other)
    assert ended.returncode == 3 and "another database" in ended.stderr, ended.stderr
    assert _insert(mover, 0, 1) == 1
    _refused(mover, 1)


@pytest.mark.long
def test_a_subscription_of_the_name_of_the_way_back_stays(mover: Mover) -> None:
    assert mover.cli("alter", "moved", "--rename-to", "moved_back").returncode == 0
    ended = mover.cli.create("moved", "--no-copy-data", "--no-wait", "--slot-name", "second")
    assert ended.returncode == 0, ended.stderr
    ended = mover.cli("switchover", "moved", "--yes", "--no-verify")
    one_error(ended, 3, 'subscription "moved_back" already exists')
    mover("--abort")
    assert {row["subname"] for row in mover.subscriptions()} == {"moved", "moved_back"}


@pytest.mark.long
def test_several_subscriptions_to_one_database_are_refused(mover: Mover) -> None:
    ended = mover.cli.create("second", "--no-copy-data", "--no-wait")
    assert ended.returncode == 0, ended.stderr
    ended = mover.cli("switchover", "moved", "--yes", "--no-verify")
    one_error(ended, 3, "with one subscription, and there are 2", "second")


@pytest.mark.long
def test_neither_subscription_is_dropped_or_renamed_while_the_switchover_is_under_way(mover: Mover) -> None:
    mover("--no-verify", kill="taken")
    for name in ("moved_back", "moved"):
        for words in (
            ("drop", name, "--yes"),
            ("alter", name, "--rename-to", "x"),
            ("alter", name, "--slot-name", "x"),
        ):
            _taking_part(mover, name, *words)
    mover("--no-verify", kill="enabled")
    _taking_part(mover, "moved_back", "drop", "moved_back", "--yes")
    assert mover("--no-verify")["state"] == "done"


def _taking_part(mover: Mover, name: str, *words: str) -> None:
    said = f'subscription "{name}" takes part in a switchover that is under way'
    one_error(mover.cli(*words), 3, said, "pgsub switchover moved --status")


@pytest.mark.long
def test_no_command_takes_from_the_target_what_clients_write_there_once_they_may(mover: Mover) -> None:
    mover("--no-verify", kill="taken")
    id = _insert(mover, 1, 1)
    _taking_part(mover, "moved", "refresh", "moved", "--resync", "public.writes", "--yes")
    _taking_part(mover, "moved", "refresh", "moved", "--sequences", "--allow-backward", "--yes")
    _taking_part(mover, "moved", "alter", "moved", "--set-publication", "p", "--refresh")
    _taking_part(mover, "moved", "verify", "moved", "--repair", "--yes")
    assert mover.rows(1, "SELECT id FROM writes") == [(id,)]
    assert mover("--no-verify")["state"] == "done"
    mover.side = 1
    mover.caught_up()
    assert mover.rows(0, "SELECT id FROM writes") == [(id,)]


@pytest.mark.long
def test_no_subscription_of_a_switchover_is_enabled_at_the_wrong_time(mover: Mover) -> None:
    epoch = "SELECT epoch FROM pgsub.control WHERE worker = 0"
    mover("--no-verify", "--timeout", "2m", kill="prepared")
    one_error(mover.cli("enable", "moved_back"), 3, "leads back from a switchover that has not moved the writes")
    [(before,)] = mover.rows(1, epoch)
    mover("--no-verify", "--timeout", "2m", kill="disabled")
    [(fenced,)] = mover.rows(1, epoch)
    assert fenced > before
    one_error(mover.cli("enable", "moved"), 3, "was switched over", "pgsub switchover moved --status")
    assert mover("--no-verify")["state"] == "done"


@pytest.mark.long
def test_a_way_back_that_somebody_has_disabled_since_is_not_enabled_by_the_next_run(mover: Mover) -> None:
    mover("--no-verify", "--timeout", "2m", kill="done")
    assert mover.cli("disable", "moved_back").returncode == 0
    ended = mover.cli("switchover", "moved", "--yes", "--no-verify")
    assert ended.returncode == 0 and "which leads back, is disabled" in ended.stderr, ended.stderr
    assert [(row["subname"], row["subenabled"]) for row in mover.subscriptions()] == [("moved_back", False)]
    assert mover.cli("enable", "moved_back").returncode == 0
    mover.side = 1
    mover.caught_up()
    assert mover.cli("disable", "moved_back").returncode == 0  # nor does that keep it from being changed or dropped
    for name, other in (("moved_back", "x"), ("x", "moved_back")):
        ended = mover.cli("alter", name, "--rename-to", other)
        assert ended.returncode == 0, ended.stderr


@pytest.mark.long
def test_a_way_back_that_would_copy_a_table_leaves_everything_as_it_was(mover: Mover, tmp_path: Path) -> None:
    first = mover.held("prepared", tmp_path, "--timeout", "1m")
    mover.alone(0, "UPDATE pgsub.subscription_rel SET srsubstate = 'i'")
    (tmp_path / "go").touch()
    assert first.wait(patience.SECONDS) == 3, first.log.read_text()  # type: ignore[attr-defined]
    assert "has not every table, or would copy one" in first.log.read_text()  # type: ignore[attr-defined]
    assert _insert(mover, 0, 1) == 1


@pytest.mark.long
def test_a_fence_that_is_a_command_is_not_left_out_by_the_next_run(mover: Mover) -> None:
    mover("--no-verify", "--fence-command", "true", kill="prepared")
    for option in ("--no-verify", "--abort"):
        ended = mover.cli("switchover", "moved", "--yes", option)
        abort = " --abort" if option == "--abort" else ""
        one_error(ended, 2, "was begun with --fence-command", f"switchover moved{abort} --fence-command COMMAND")
    assert mover("--abort", "--fence-command", "true")["state"] == "as before"


@pytest.mark.long
def test_a_table_that_is_published_no_more_in_the_pause_leaves_everything_as_it_was(
    mover: Mover, tmp_path: Path
) -> None:
    first = mover.held("sessions_ended", tmp_path, "--timeout", "2m")
    mover.alone(0, "BEGIN READ WRITE; ALTER PUBLICATION p DROP TABLE writes; COMMIT")
    (tmp_path / "go").touch()
    assert first.wait(patience.SECONDS) == 3
    assert "does not publish every table" in first.log.read_text()  # type: ignore[union-attr]
    _insert(mover, 0, 1)
    assert [row["subname"] for row in mover.subscriptions()] == ["moved"]


@pytest.mark.long
def test_a_table_that_is_held_meanwhile_leaves_everything_as_it_was(mover: Mover, tmp_path: Path) -> None:
    first = mover.held("fenced", tmp_path, "--timeout", "2m")
    assert mover.cli("alter", "moved", "--hold", "public.writes").returncode == 0
    (tmp_path / "go").touch()
    assert first.wait(patience.SECONDS) == 3, first.log.read_text()  # type: ignore[attr-defined]
    assert "are synchronized, or some are held" in first.log.read_text()  # type: ignore[attr-defined]
    assert _insert(mover, 0, 1) == 1
    assert mover("--status")["state"] == "none"


@pytest.mark.long
def test_a_publication_of_all_tables_is_no_sign_of_writers(mover: Mover) -> None:
    mover.alone(0, "DROP PUBLICATION p; CREATE PUBLICATION p FOR ALL TABLES")
    mover.alone(
        1, "BEGIN READ WRITE; DROP PUBLICATION moved_back; CREATE PUBLICATION moved_back FOR ALL TABLES; COMMIT"
    )
    for back in (), ("--back",), ():
        ended = mover.cli("switchover", "moved", *back, "--yes", "--no-verify")
        assert ended.returncode == 0, ended.stderr
        assert "were committed on the publisher after" not in ended.stderr, ended.stderr
        mover.side = 0 if back else 1
        _insert(mover, mover.side, len(back))
        mover.caught_up()


@pytest.mark.long
def test_another_way_on_the_way_back_lets_everybody_in_again(mover: Mover) -> None:
    connects = "SELECT has_database_privilege('pg_monitor', current_database(), 'CONNECT')"
    mover("--no-verify", "--fence", "connect")
    mover.side = 1
    mover.caught_up()
    mover("--no-verify")
    mover.side = 0
    assert mover.rows(0, connects) == [(True,)]
    assert _insert(mover, 0, 1) > 0
    mover.caught_up()


@pytest.mark.long
def test_a_subscription_of_somebody_else_is_never_taken_for_the_way_back(mover: Mover) -> None:
    mover("--no-verify", kill="named")
    cli, (publisher, target) = mover.cli, mover.databases
    made = cli(
        *("create", "moved_back", "--connection", target.conninfo, "--target", publisher.conninfo),
        *("--publication", "moved_back", "--slot-name", "foreign", "--no-copy-data", "--no-wait", "--no-enabled"),
    )
    assert made.returncode == 0, made.stderr
    ended = cli("switchover", "moved", "--yes", "--no-verify")
    one_error(ended, 3, 'subscription "moved_back" already exists', "--rename-to")
    assert mover("--abort")["state"] == "as before"
    assert [row["subname"] for row in mover.subscriptions()] == ["moved", "moved_back"]
    assert _insert(mover, 0, 1) == 1


@pytest.mark.long
def test_what_a_row_of_the_target_names_as_the_way_back_is_neither_enabled_nor_dropped(mover: Mover) -> None:
    cli, (publisher, target) = mover.cli, mover.databases
    made = cli(
        *("create", "moved_back", "--connection", target.conninfo, "--target", publisher.conninfo),
        *("--publication", "moved_back", "--slot-name", "foreign", "--no-copy-data", "--no-wait", "--no-enabled"),
    )
    assert made.returncode == 0, made.stderr
    [(moved,), (other,)] = cli.sql("SELECT oid FROM pg_subscription ORDER BY subname")
    row = f"gen_random_uuid(), 'taking', {moved}, 'moved', 'moved_back', {other}, 'done', 'read-only', '{{}}'"
    columns = "id, side, subid, subname, back_name, back_subid, phase, fence, saved"
    mover.alone(1, f"BEGIN READ WRITE; INSERT INTO pgsub.switchover ({columns}) VALUES ({row}); COMMIT")
    ended = cli("switchover", "moved", "--yes", "--no-verify")
    one_error(ended, 3, 'subscription "moved_back", which is to lead back, is not the one that was made')
    for phase in "planned", "declined":
        mover.alone(1, f"BEGIN READ WRITE; UPDATE pgsub.switchover SET phase = '{phase}'; COMMIT")
        assert mover("--abort")["state"] == "as before"
    shown = cli.sql("SELECT subname, subenabled FROM pg_subscription ORDER BY 1")
    assert shown == [("moved", 1), ("moved_back", 0)]


@pytest.mark.long
def test_a_target_does_not_let_clients_write_on_a_publisher_that_gave_the_right_to_another_one(mover: Mover) -> None:
    mover("--no-verify")
    mover.side = 1
    cli = mover.cli
    made = cli.create("second", "--no-copy-data", "--no-wait", "--no-enabled")
    assert made.returncode == 0, made.stderr
    [(second,)] = cli.sql("SELECT oid FROM pg_subscription WHERE subname = 'second'")
    mover.alone(1, f"UPDATE pgsub.switchover SET subid = {second}, phase = 'declined'")
    assert cli("switchover", "second", "--abort", "--yes").returncode == 0
    _refused(mover, 0)
    assert mover.rows(0, "SELECT subname FROM pgsub.subscription") == [("moved_back",)]
    mover.caught_up()
