"""kill -9 of ``verify`` and ``verify --repair``, and of who serves the subscription, and crashes of both servers,
at every step of them, with writes all the time: what is said is never a false alarm, what is brought comes
once, and the command is right when it is run again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import patience
import pytest
from fix_faults import Site, until
from fix_servers import Pair
from forked import Started
from thorough import thorough

from pgsub.protocol.lsn import parse_lsn

pytestmark = pytest.mark.long

Make = Callable[..., Site]
#: Table, kind, and id of a row that differs.
Found = set[tuple[str, str, str]]

POINT = ("point.barrier_put", "point.standing", "point.taken")
VERIFY = (*POINT, "verify.at_point", "verify.table_compared")
REPAIR = tuple(f"repair.{name}" for name in ("journalled", "standing", "taken", "before_commit", "committed"))
VICTIMS = ("command", "worker", "launcher", "publisher", "target")
#: Where a start of Spark is paid, or a server has to recover: steps at which something of it lasts.
_LASTING = ("point.standing", "verify.at_point", "repair.taken", "repair.committed")
TABLES = ("audit1", "keyed1", "counter1")

#: Rows that no writer changes.
_PLANT = """
DELETE FROM audit1 WHERE id = 7; INSERT INTO audit1 VALUES (-5, 'extra');
DELETE FROM keyed1 WHERE id = 200; UPDATE keyed1 SET n = -1 WHERE id = 201; INSERT INTO keyed1 VALUES (-5, 0, 'extra');
DELETE FROM counter1 WHERE id = 200; UPDATE counter1 SET pad = 'planted' WHERE id = 201;
INSERT INTO counter1 VALUES (-5, 0, 'extra')
"""
_KEYED = {("missing", "200"), ("different", "201"), ("extra", "-5")}
PLANTED: Found = {
    ("audit1", "missing", "7"),
    ("audit1", "extra", "-5"),
    *(("keyed1", *one) for one in _KEYED),
    *(("counter1", *one) for one in _KEYED),
}
#: What a repair leaves: rows without a key.
LEFT: Found = {one for one in PLANTED if one[0] == "audit1"}
_REPLACED = """
SELECT relname || ' ' || (body ->> 'operation'), count(*) FROM pgsub.skipped_change
 WHERE body ->> 'reason' = 'repaired' GROUP BY 1
"""


def steps_of(victim: str, steps: tuple[str, ...]) -> tuple[str, ...]:
    """All of them for the command; for others some, unless the thorough variants are wanted."""
    return tuple(step for step in steps if victim == "command" or step in (*_LASTING, *thorough(steps)))


@dataclass
class Struck:
    """A subscription that is served, written to, and wrong in :data:`PLANTED` rows."""

    case: Site
    servers: Pair
    launcher: Started

    def plant(self) -> None:
        """Change rows of the target as nobody notices, once it has them; the writer rests from then on."""
        self.case.wait_equal()
        self._as_replica(_PLANT)

    def write(self) -> None:
        """Let the writer go on."""
        assert self.case.writer is not None
        self.case.writer.resume()

    def mend(self, statements: str) -> None:
        """Take back what a repair leaves."""
        self._as_replica(statements)

    def _as_replica(self, statements: str) -> None:
        self.case.subdb.execute(f"SET session_replication_role = replica; {statements}; RESET session_replication_role")

    def strike(self, victim: str) -> None:
        """Harm somebody else than the command, and see to it that there is one again."""
        case = self.case
        if victim == "worker":
            os.kill(case.worker_pid(), signal.SIGKILL)
        elif victim == "launcher":
            self.launcher.kill()
            self.launcher.wait()
            self.launcher = serve(case)
        else:
            case.crash(getattr(self.servers, victim))

    def struck(self, victim: str, step: str, *words: str) -> tuple[int | None, Found | None]:
        """Run the command, which meets with it at a step."""
        case = self.case
        folder = case.points.parent
        go_on, printed = folder / "go on", folder / "printed"
        (case.points / step).unlink(missing_ok=True)
        go_on.unlink(missing_ok=True)
        action = "kill" if victim == "command" else f"pause:{go_on}"
        command = case.start("verify", case.name, "--json", *words, points={step: action}, printed=printed)
        case.wait_fired(step)
        if victim != "command":
            self.strike(victim)
            go_on.touch()
        code = command.wait(patience.SECONDS)
        if victim == "command":
            assert code == -signal.SIGKILL, case.said()
        return code, _read(printed)

    def run(self, *words: str) -> tuple[int | None, Found]:
        """Run the command once more: it comes to its end."""
        printed = self.case.points.parent / "printed"
        code = self.case.start("verify", self.case.name, "--json", *words, printed=printed).wait(patience.SECONDS)
        found = _read(printed)
        assert found is not None, (code, self.case.said())
        return code, found


def serve(case: Site, points: dict[str, str] | None = None) -> Started:
    """A launcher that has the subscription."""
    process = case.run("--timeout", "10m", points=points)
    until(lambda: bool(case.sqlite("SELECT 1 FROM pgsub_server")), "the launcher does not serve")
    return process


def _read(printed: Path) -> Found | None:
    """What differs; None where the command said nothing, or an error."""
    text = printed.read_text()
    if not text:
        return None
    document: dict[str, Any] = json.loads(text)
    if "tables" not in document:
        return None
    return {(table["relname"], one["kind"], _id(one)) for table in document["tables"] for one in table["differences"]}


def _id(difference: dict[str, Any]) -> str:
    return str((difference["key"] or difference.get("publisher") or difference.get("target"))["id"])


@pytest.fixture
def struck(own_pair: Callable[..., Pair], site: Make) -> Struck:
    """The subscription, served and written to."""
    pair = own_pair(target={"wal_writer_delay": "10s"})
    case = site(pair.pubdb, pair.subdb)
    case.make_ready(*TABLES)
    return Struck(case, pair, serve(case))


@contextmanager
def ended_well(struck: Struck) -> Iterator[None]:
    """Both sides are equal behind it, and nothing of the commands is left over."""
    yield
    case = struck.case
    case.wait_equal()
    case.terminate(struck.launcher)
    case.check()
    assert case.subdb.value("SELECT count(*) FROM pgsub.barrier") == 0
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name ~ %s"
    for database in (case.pubdb, case.subdb):
        database.wait(sessions, f"pgsub|{case.name}", value=0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_verify_that_is_struck_at_any_step_gives_no_false_alarm_and_is_right_when_it_is_run_again(
    struck: Struck, victim: str
) -> None:
    one = struck
    with ended_well(one):
        one.plant()
        one.write()
        for step in steps_of(victim, VERIFY):
            code, found = one.struck(victim, step)
            assert code in (6, 3, 4, 5, -signal.SIGKILL), (step, one.case.said())
            assert found is None or found <= PLANTED, step
            assert code != 6 or found, step
            assert one.run() == (6, PLANTED), step
        one.mend(
            "DELETE FROM audit1 WHERE id = -5; INSERT INTO audit1 VALUES (7, repeat('y', 50));"
            "DELETE FROM keyed1 WHERE id = -5; INSERT INTO keyed1 VALUES (200, 0, repeat('y', 50));"
            "UPDATE keyed1 SET n = 0 WHERE id = 201; DELETE FROM counter1 WHERE id = -5;"
            "INSERT INTO counter1 VALUES (200, 0, repeat('y', 50));"
            "UPDATE counter1 SET pad = repeat('y', 50) WHERE id = 201"
        )
        assert one.run() == (0, set())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_repair_that_is_struck_at_any_step_brings_each_row_once_when_it_is_run_again(
    struck: Struck, victim: str
) -> None:
    one = struck
    repair = ("--repair", "--yes")
    with ended_well(one):
        for times, step in enumerate(steps_of(victim, REPAIR), 1):
            one.plant()
            one.write()
            code, found = one.struck(victim, step, *repair)
            assert code in (6, 3, 4, 5, -signal.SIGKILL), (step, one.case.said())
            assert found is None or found <= PLANTED, step
            assert one.run(*repair) == (6, LEFT), step
            replaced = dict(one.case.subdb.rows(_REPLACED))
            assert replaced == {f"{table} {what}": times for table in ("keyed1", "counter1")
                                for what in ("UPDATE", "DELETE")}, step  # fmt: skip
            one.mend("DELETE FROM audit1 WHERE id = -5; INSERT INTO audit1 VALUES (7, repeat('y', 50))")
        assert one.run() == (0, set())


def test_a_worker_that_is_killed_before_it_says_that_it_stands_at_the_barrier_is_followed_by_one_that_does(
    struck: Struck,
) -> None:
    one, step = struck, "apply.before_barrier_reached"
    with ended_well(one):
        one.case.terminate(one.launcher)
        one.case.disarm(step)
        one.launcher = serve(one.case, {step: "kill"})
        one.plant()
        one.write()
        for words, expected in (((), PLANTED), (("--repair", "--yes"), LEFT)):
            one.case.arm(step)
            assert one.run(*words) == (6, expected)
            assert one.case.fired(step)
        one.mend("DELETE FROM audit1 WHERE id = -5; INSERT INTO audit1 VALUES (7, repeat('y', 50))")
        assert one.run() == (0, set())


def test_a_verify_of_a_large_table_that_is_killed_again_and_again_goes_on_while_it_is_written_to(
    own_pair: Callable[..., Pair], site: Make
) -> None:
    pair = own_pair()
    case, step = site(pair.pubdb, pair.subdb), "verify.ranges_compared"
    case.make_ready("keyedbig")
    one = Struck(case, pair, serve(case))
    small, options = {"PGSUB_CHUNK_BYTES": "16384"}, ("--json", "--resume", "--table", "public.keyedbig")
    with ended_well(one):
        case.wait_equal()
        for database in (pair.pubdb, pair.subdb):
            database.execute("CLUSTER keyedbig USING keyedbig_pkey")  # rows that were updated lie at the end
            database.execute("ANALYZE keyedbig")
        one.write()
        for _ in range(3):
            (case.points / step).unlink(missing_ok=True)
            case.killed(case.start("verify", case.name, *options, points={step: "kill@3"}, **small))
        one.mend("UPDATE keyedbig SET n = -1 WHERE id IN (150, 29900)")  # of which the first was read
        printed = case.points.parent / "printed"
        code = case.start("verify", case.name, *options, printed=printed, **small).wait(patience.SECONDS)
        assert (code, _read(printed)) == (6, {("keyedbig", "different", "29900")}), case.said()
        [table] = json.loads(printed.read_text())["tables"]
        positions = [parse_lsn(part["lsn"]) for part in table["earlier"]]
        assert len(positions) == 3 and positions == sorted(positions) and positions[-1] < parse_lsn(table["lsn"])
        one.mend("UPDATE keyedbig SET n = 0 WHERE id IN (150, 29900)")
        assert one.run() == (0, set())
