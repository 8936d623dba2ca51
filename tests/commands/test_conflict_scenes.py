"""Every type of conflict from end to end: one launcher, two servers, the program's own words, the server's beside it.

The server's own subscription meets the same transactions on the same target server. Mirrors t/035_conflicts.pl and
t/029_on_error.pl.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fix_program import Cli, until, valid
from fix_servers import Database
from fix_stuck import in_process

if TYPE_CHECKING:
    import subprocess

    from embedded import Server

TABLES = """
CREATE TABLE one (id int PRIMARY KEY, v text);
CREATE TABLE two (a int PRIMARY KEY, b int UNIQUE, v text);
CREATE TABLE late (id int PRIMARY KEY, v text)
"""
_RECORD = re.compile(
    r"^\S+ \S+(?: UTC)? \[\d+\] (?:pgsub |native |logical replication \w+ worker )?(\w+):  (.*(?:\n\t.*)*)",
    re.MULTILINE,
)
_COUNTERS = "apply_error_count", "sync_error_count", "sync_table_error_count"


class Scene:
    """Subscription ``s`` of pgsub and ``native`` of the server, with ``disable_on_error``: one attempt, then they wait.

    :ivar since: where both logs ended when the present scene began.
    """

    def __init__(self, launcher: Cli, log: Path, pubdb: Database, subdb: Database, native: Database) -> None:
        self.cli, self._log = launcher, log
        self.pubdb, self.subdb, self.native = pubdb, subdb, native
        self.since = (0, 0)

    def ok(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a command line that ends with this code."""
        ended = in_process(self.cli.state, *words)
        assert ended.returncode == code, ended.stderr
        return ended

    def document(self, *words: str, code: int = 0) -> dict[str, Any]:
        """What a command prints with --json, validated."""
        return valid(words[0], self.ok(*words, "--json", code=code).stdout)

    def status(self) -> dict[str, Any]:
        """The subscription object of s."""
        return self.document("status", "s")["subscriptions"][0]

    def begin(self, local: str) -> None:
        """A new scene: somebody writes on both targets."""
        assert self.settled(), "the scene before has not ended"
        self.since = (self._log.stat().st_size, self.native.server.log.stat().st_size)
        for database in (self.subdb, self.native):
            database.execute(local)

    def settled(self) -> bool:
        """Whether both subscribers have everything."""
        self.ok("wait", "s", "--for", "caught-up", "--timeout", "1m")
        self.pubdb.wait(
            "SELECT confirmed_flush_lsn >= pg_current_wal_flush_lsn() FROM pg_replication_slots WHERE slot_name = %s",
            self.native.name,
        )
        return self.status()["last_error"] is None

    def stopped(self) -> dict[str, Any]:
        """Both were disabled; the subscription object of s."""
        self.ok("wait", "s", "--for", "disabled", "--timeout", "1m")
        self.native.wait("SELECT NOT subenabled FROM pg_subscription WHERE subname = 'native'")
        return self.status()

    def told(self) -> tuple[list[str], list[str]]:
        """Conflicts and errors in the log of the launcher and of the server since the scene began."""
        ours = _records(self._log.read_bytes()[self.since[0] :].decode())
        return ours, _records(self.native.server.log.read_bytes()[self.since[1] :].decode())

    def counted(self) -> tuple[dict[str, int], dict[str, int]]:
        """Errors and conflicts as pgsub and as the server count them."""
        ours = self.document("status", "s", "--view", "pg_stat_subscription_stats")["rows"][0]
        query = "SELECT to_jsonb(s) FROM pg_stat_subscription_stats s WHERE subname = 'native'"
        theirs = {
            name: n for name, n in self.native.value(query).items() if name.startswith("confl_") or name in _COUNTERS
        }
        return {name: ours[name] for name in theirs}, theirs

    def typed(self, line: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a line as the program prints it for an operator."""
        program, *words = shlex.split(line)
        assert program == "pgsub"
        return self.ok(*words, code=code)

    def same(self, table: str) -> bool:
        """Whether both targets have the same rows."""
        query = f"SELECT * FROM {table} ORDER BY 1"
        return self.subdb.rows(query) == self.native.rows(query)

    def newest(self) -> dict[str, Any]:
        """The conflict that was met last."""
        return self.document("conflicts", "list", "s", "--limit", "1")["conflicts"][0]

    def runbook(self) -> list[dict[str, Any]]:
        """The steps for the present state."""
        return list(self.document("status", "s", "--runbook")["runbook"])


def _records(log: str) -> list[str]:
    """Conflicts and errors without what differs between two targets: names of origins, their transactions, times."""
    found: list[list[str]] = []
    for level, text in _RECORD.findall(log):
        if level in ("ERROR", "LOG"):
            found.append([level, text])
        elif level in ("DETAIL", "CONTEXT") and found:
            found[-1].append(text)
    wanted = ["\n".join(parts) for parts in found if parts[0] == "ERROR" or "conflict detected" in parts[1]]
    return [_plain(text) for text in wanted]


def _plain(text: str) -> str:
    text = re.sub(r"(modified (?:.* )?in transaction) \d+( at \S+ \S+)?(?=[.:])", r"\1 N", text)
    return re.sub(r'origin "\w+"', 'origin "O"', text)


@pytest.fixture(scope="module")
def databases(publisher: Server, target: Server) -> Iterator[tuple[Database, Database, Database]]:
    """Publisher, target of pgsub, target of the server's own subscription."""
    made = [Database(publisher, f"pub_scenes_{os.getpid()}")]
    made += [Database(target, f"{name}_scenes_{os.getpid()}") for name in ("sub", "native")]
    yield made[0], made[1], made[2]
    for database in reversed(made):
        database.drop()


@pytest.fixture(scope="module")
def scene(launcher: Cli, databases: tuple[Database, Database, Database]) -> Iterator[Scene]:
    """Both subscriptions, caught up, between tables of one row."""
    pubdb, subdb, native = databases
    for database in databases:
        database.execute(TABLES)
    pubdb.execute("CREATE PUBLICATION p FOR TABLE one, two")
    launcher.connection, launcher.target = pubdb.conninfo, subdb.conninfo
    it = Scene(launcher, launcher.state.parent / "stderr.0", *databases)
    it.ok(*launcher.words("s", "--no-wait", "--disable-on-error"))
    native.execute(
        f"CREATE SUBSCRIPTION native CONNECTION '{pubdb.conninfo}' PUBLICATION p"
        f" WITH (slot_name = {native.name}, disable_on_error = true)"
    )
    it.ok("wait", "s", "--for", "synced", "--timeout", "1m")
    native.wait("SELECT bool_and(srsubstate = 'r') FROM pg_subscription_rel")
    pubdb.execute("INSERT INTO one VALUES (1, 'a')")  # what the server copied is none of its apply worker's own
    yield it
    for (name,) in launcher.sql("SELECT subname FROM pg_subscription"):
        it.ok("drop", name, "--yes")


STOPPING = {
    "insert_exists": ("INSERT INTO one VALUES (2, 'mine')", "INSERT INTO one VALUES (2, 'theirs')"),
    "update_exists": ("INSERT INTO one VALUES (3, 'mine')", "UPDATE one SET id = 3 WHERE id = 1"),
    "multiple_unique_conflicts": (
        "INSERT INTO two VALUES (2, 20), (3, 30)",
        "INSERT INTO two VALUES (2, 30); INSERT INTO one VALUES (4, 'rest')",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "way"),
    [("insert_exists", "row"), ("update_exists", "whole"), ("multiple_unique_conflicts", "conflicting")],
)
def test_what_stops_apply_is_told_as_by_the_server_and_left_by_the_steps_of_the_runbook(
    scene: Scene, kind: str, way: str
) -> None:
    local, change = STOPPING[kind]
    scene.begin(local)
    before = scene.counted()[1]
    scene.pubdb.execute(change)
    stopped = scene.stopped()
    ours, theirs = scene.told()
    assert ours == theirs and len(ours) == 1 and f"conflict={kind}" in ours[0]
    assert (stopped["last_error"]["conflict"], stopped["state"]) == (kind, "disabled")
    lsn = stopped["last_error"]["finish_lsn"]
    met = scene.newest()
    assert (met["conflict_type"], met["action"], met["finish_lsn"], met["attempts"]) == (kind, "stopped", lsn, 1)
    ours_counted, counted = scene.counted()
    assert ours_counted == counted == {**before, **{n: before[n] + 1 for n in (f"confl_{kind}", "apply_error_count")}}

    show, change_row, preview, skip, hold, enable, wait = scene.runbook()[1:]
    assert "remote\tlocal\tdiffers\n" in scene.typed(show["commands"][0]).stdout
    assert hold["commands"][0].startswith("pgsub alter s --hold public.")
    part, all_of_it = (scene.typed(command, code=6).stdout for command in preview["commands"])
    assert "skipping its conflicting rows would lose" in part and "skipping the transaction would lose" in all_of_it
    if way == "row":
        for database in (scene.subdb, scene.native):
            for statement in change_row["statements"]:
                database.execute(statement)
    else:
        conflicting, whole = skip["commands"]
        scene.typed(f"{whole if way == 'whole' else conflicting} --yes")
        scene.native.execute(f"ALTER SUBSCRIPTION native SKIP (lsn = '{lsn}')")
    scene.typed(enable["commands"][0])
    scene.native.execute("ALTER SUBSCRIPTION native ENABLE")
    scene.typed(wait["commands"][0])
    assert scene.settled() and scene.runbook() == []
    met = scene.newest()
    assert (met["action"], met["finish_lsn"]) == ("applied" if way == "row" else "skipped", lsn)
    kept = scene.subdb.rows("SELECT relname FROM pgsub.skipped_change WHERE finish_lsn = %s", lsn)
    assert kept == {"row": [], "whole": [("one",)], "conflicting": [("two",)]}[way]
    if way == "row":
        assert scene.same("one")
    if way == "conflicting":
        assert scene.subdb.value("SELECT v FROM one WHERE id = 4") == "rest"


def test_a_row_that_is_there_already_stops_apply_as_the_server_and_is_skipped_without_loss(scene: Scene) -> None:
    scene.begin("INSERT INTO one VALUES (10, 'same')")
    scene.pubdb.execute("INSERT INTO one VALUES (10, 'same')")
    lsn = scene.stopped()["last_error"]["finish_lsn"]
    ours, theirs = scene.told()
    assert ours == theirs and scene.newest()["identical"] is True
    assert any("removing it loses nothing" in step["text"] for step in scene.runbook())
    found = scene.document("skip-lsn", "s", "--preview")
    assert (found["verdict"], found["lost"], found["transaction"]["finish_lsn"]) == ("safe", 0, lsn)
    scene.typed("pgsub skip-lsn s --yes")
    scene.native.execute(f"ALTER SUBSCRIPTION native SKIP (lsn = '{lsn}')")
    scene.native.execute("ALTER SUBSCRIPTION native ENABLE")
    scene.typed("pgsub enable s")
    assert scene.settled() and scene.subdb.value("SELECT v FROM one WHERE id = 10") == "same"


def test_what_does_not_stop_apply_is_told_counted_and_recorded_as_by_the_server(scene: Scene) -> None:
    scene.begin("UPDATE one SET v = 'nobody'")
    scene.pubdb.execute("INSERT INTO one SELECT g, 'x' FROM generate_series(20, 23) g")
    scene.begin("DELETE FROM one WHERE id IN (20, 21); UPDATE one SET v = 'mine' WHERE id IN (22, 23)")
    before = scene.counted()[1]
    scene.pubdb.execute("UPDATE one SET v = 'theirs' WHERE id IN (20, 22); DELETE FROM one WHERE id IN (21, 23)")
    assert scene.settled()
    ours, theirs = scene.told()
    assert ours == theirs and len(ours) == 4
    kinds = {"update_missing", "delete_missing", "update_origin_differs", "delete_origin_differs"}
    ours_counted, counted = scene.counted()
    assert ours_counted == counted == {**before, **{n: before[n] + 1 for n in (f"confl_{kind}" for kind in kinds)}}
    listed = scene.document("conflicts", "list", "s", "--limit", "4")["conflicts"]
    expected = {kind: "skipped" if kind.endswith("missing") else "applied" for kind in kinds}
    assert {one["conflict_type"]: one["action"] for one in listed} == expected
    assert scene.status()["state"] == "running" and scene.runbook() == []


@pytest.mark.long
def test_a_copy_that_meets_a_row_is_told_as_by_the_server_and_goes_on_once_that_is_gone(scene: Scene) -> None:
    scene.begin("INSERT INTO late VALUES (1, 'mine')")
    before = scene.counted()[1]
    scene.pubdb.execute("INSERT INTO late VALUES (1, 'theirs'); ALTER PUBLICATION p ADD TABLE late")
    scene.native.execute("ALTER SUBSCRIPTION native REFRESH PUBLICATION")
    scene.typed("pgsub refresh s --no-wait")
    stopped = scene.stopped()
    [ours], [theirs] = scene.told()
    error, detail, context = ours.split("\n")[1:]
    native_error, native_detail, native_context = theirs.split("\n")[1:]
    assert error == f"could not copy the table to the target: {native_error}"
    assert (detail, context) == (native_detail, f'synchronizing table "public.late", {native_context}')
    ours_counted, counted = scene.counted()
    failed = before.keys() & {"sync_error_count", "sync_table_error_count"}  # the second is what 19 calls the first
    assert ours_counted == counted == {**before, **{name: before[name] + 1 for name in failed}} and len(failed) == 1
    assert stopped["last_error"]["relation"] == "public.late"
    recorded = scene.newest()
    assert (recorded["conflict_type"], recorded["action"]) == ("insert_exists", "stopped")
    assert recorded["remote_tuple"]["v"] == "theirs" and recorded["local_conflicts"][0]["row"]["v"] == "mine"
    remove, enable, adopt, resync, wait = scene.runbook()[1:]
    assert resync["commands"] == ["pgsub refresh s --resync public.late"]
    assert adopt["commands"] == ["pgsub refresh s --resync public.late --adopt"]
    for database in (scene.subdb, scene.native):
        database.execute(*remove["statements"])
    scene.typed(enable["commands"][0])
    scene.native.execute("ALTER SUBSCRIPTION native ENABLE")
    scene.typed(wait["commands"][0])
    assert scene.subdb.rows("SELECT * FROM late") == [(1, "theirs")] and scene.runbook() == []
    assert scene.newest()["action"] == "applied"


@pytest.mark.long
def test_a_plain_a_streamed_and_a_prepared_transaction_fail_in_turn_and_are_skipped_by_their_lsns(scene: Scene) -> None:
    pubdb, subdb = scene.pubdb, scene.subdb
    pubdb.execute("CREATE TABLE tbl (i int, t text); INSERT INTO tbl VALUES (1)")
    pubdb.execute("CREATE PUBLICATION q FOR TABLE tbl; ALTER TABLE tbl REPLICA IDENTITY FULL")
    subdb.execute("CREATE TABLE tbl (i int PRIMARY KEY, t text); INSERT INTO tbl VALUES (1)")
    words = scene.cli.words("t", "--no-wait", "--disable-on-error", "--two-phase", "--streaming", "on", publication="q")
    scene.ok(*words)
    scene.ok("wait", "t", "--for", "disabled", "--timeout", "1m")
    for step in scene.document("status", "t", "--runbook")["runbook"]:
        for statement in step["statements"]:
            subdb.execute(statement)
        for command in step["commands"]:
            if "--resync" not in command:
                scene.typed(command)
    assert subdb.rows("SELECT i FROM tbl") == [(1,)]
    until(lambda: scene.document("status", "t")["subscriptions"][0]["subtwophasestate"] == "e")
    pubdb.execute(f"ALTER DATABASE {pubdb.name} SET debug_logical_replication_streaming = immediate")

    subdb.execute("INSERT INTO tbl VALUES (2, 'mine'), (3, 'mine'), (4, 'mine')")
    lost = "INSERT INTO tbl SELECT g, 'lost' FROM generate_series({0}0, {0}2) g; INSERT INTO tbl VALUES ({0})"
    kinds = {
        2: ("COMMIT", lost),
        3: ("COMMIT", f"BEGIN; {lost}; INSERT INTO tbl SELECT g, 'lost' FROM generate_series(100, 150) g; COMMIT"),
        4: ("PREPARE", f"BEGIN; {lost}; PREPARE TRANSACTION 'gtx'"),
    }
    skipped = []
    for number, (kind, statements) in kinds.items():
        pubdb.execute(statements.format(number))
        pubdb.execute(f"INSERT INTO tbl VALUES ({number + 1000}, 'kept')")
        if kind == "PREPARE":
            pubdb.execute("COMMIT PREPARED 'gtx'")
        scene.ok("wait", "t", "--for", "disabled", "--timeout", "1m")
        error = scene.document("status", "t")["subscriptions"][0]["last_error"]
        assert error["conflict"] == "insert_exists"
        found = scene.document("skip-lsn", "t", error["finish_lsn"], "--preview", code=6)
        assert (found["transaction"]["finish_lsn"], found["transaction"]["kind"]) == (error["finish_lsn"], kind)
        assert sum(table["conflict"] for table in found["tables"]) == 1
        wrong = found["transaction"]["end_lsn"]
        assert "Did you mean" in scene.ok("skip-lsn", "t", wrong, "--yes", code=3).stderr
        assert subdb.value("SELECT count(*) FROM tbl WHERE t = 'lost'") == 0
        scene.ok("skip-lsn", "t", error["finish_lsn"], "--yes")
        scene.ok("enable", "t")
        scene.ok("wait", "t", "--for", "caught-up", "--timeout", "1m")
        skipped.append((error["finish_lsn"], found["changes"]))
    expected = [(1, None), *((number, "mine") for number in kinds), *((number + 1000, "kept") for number in kinds)]
    assert subdb.rows("SELECT i, t FROM tbl ORDER BY i") == expected
    query = (
        "SELECT finish_lsn, count(*) FROM pgsub.skipped_change JOIN pgsub.subscription USING (subid)"
        " WHERE subname = 't' GROUP BY finish_lsn ORDER BY min(id)"
    )
    assert subdb.rows(query) == skipped
    assert subdb.rows("SELECT * FROM pg_prepared_xacts WHERE database = current_database()") == []


@pytest.mark.long
def test_who_is_stuck_sees_what_waits_behind_and_nothing_of_it_is_lost(scene: Scene) -> None:
    scene.begin("INSERT INTO one VALUES (40, 'mine')")
    scene.ok("disable-on-error", "s", "off")
    scene.pubdb.execute("INSERT INTO one VALUES (40, 'theirs')")
    for number in range(41, 45):
        scene.pubdb.execute(f"INSERT INTO one VALUES ({number}, 'behind')")
    scene.ok("wait", "s", "--for", "error", "--timeout", "1m")
    blocked = until(lambda: (found := scene.status()["blocked"]) and found["waiting_transactions"] and found)
    assert (blocked["waiting_transactions"], blocked["waiting_at_least"]) == (4, False)
    assert blocked["restarts"] >= 2 and blocked["waiting_bytes"] > 0 and blocked["retained_bytes"] > 0
    assert "remote\tlocal\tdiffers\n" in scene.typed(blocked["next"]).stdout
    attempts = scene.newest()["attempts"]
    assert attempts > 2 and scene.counted()[0]["apply_error_count"] >= attempts

    scene.ok("disable-on-error", "s", "on")
    scene.ok("wait", "s", "--for", "disabled", "--timeout", "1m")
    scene.typed("pgsub skip-lsn s --rows conflicting --yes")
    scene.typed("pgsub enable s")
    scene.typed("pgsub wait s --for caught-up --timeout 1m")
    assert scene.subdb.rows("SELECT v FROM one WHERE id BETWEEN 40 AND 44") == [("mine",), *([("behind",)] * 4)]
    assert (scene.status()["blocked"], scene.newest()["action"]) == (None, "skipped")
    scene.ok("status", "s", "--reset-stats")
    counted = {name for name, n in scene.counted()[0].items() if n}
    assert (
        counted == set()
        and scene.document("status", "s", "--view", "pg_stat_subscription_stats")["rows"][0]["stats_reset"]
    )


@pytest.mark.long
@pytest.mark.parametrize("back", ["pgsub", "native"])
def test_two_subscriptions_with_origin_none_between_two_databases_do_not_loop(scene: Scene, back: str) -> None:
    table, here, there = f"both_{back}", scene.pubdb, scene.subdb
    for database in (here, there):
        database.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, n int); CREATE PUBLICATION {table} FOR TABLE {table}"
        )
    options = ("--no-wait", "--origin", "none")
    scene.ok(*scene.cli.words(f"to_{back}", *options, publication=table))
    if back == "native":
        there_to_here = f"CREATE SUBSCRIPTION {table} CONNECTION '{there.conninfo}' PUBLICATION {table}"
        here.execute(f"{there_to_here} WITH (slot_name = {here.name}_{back}, origin = none, copy_data = false)")
    else:
        words = ["--connection", there.conninfo, "--target", here.conninfo, "--publication", table]
        warned = scene.ok("create", "from_pgsub", *words, *options).stderr
        assert "requested copy_data with origin = NONE but might copy data that had a different origin" in warned
    scene.ok("wait", f"to_{back}", "--for", "synced", "--timeout", "1m")
    if back == "pgsub":
        scene.ok("wait", "from_pgsub", "--for", "synced", "--timeout", "1m")
    for number in range(1, 11):
        here.execute(f"INSERT INTO {table} VALUES ({number}, 0); UPDATE {table} SET n = n + 1 WHERE id = {number}")
        there.execute(f"INSERT INTO {table} VALUES (-{number}, 0); UPDATE {table} SET n = n + 1 WHERE id = -{number}")
    expected = [(number, 1) for number in range(-10, 11) if number]
    query = f"SELECT coalesce(array_agg((id, n)::text ORDER BY id), '{{}}') FROM {table}"
    for database in (here, there):
        database.wait(query, value=[f"({number},{n})" for number, n in expected])
    # a last change each way comes after whatever might still go round
    here.execute(f"UPDATE {table} SET n = 2 WHERE id = 1")
    there.execute(f"UPDATE {table} SET n = 2 WHERE id = -1")
    written = f"SELECT n_tup_ins, n_tup_upd, n_tup_del FROM pg_stat_user_tables WHERE relname = '{table}'"
    for database, own in ((here, 1), (there, -1)):
        database.wait(f"SELECT n FROM {table} WHERE id = {-own}", value=2)
    for database in (here, there):
        until(lambda database=database: database.rows(written) == [(20, 22, 0)])
    for name in (f"to_{back}", *(["from_pgsub"] if back == "pgsub" else [])):
        scene.ok("wait", name, "--for", "caught-up", "--timeout", "1m")
        assert scene.document("conflicts", "list", name)["conflicts"] == []
    for database in (here, there):
        assert database.rows(written) == [(20, 22, 0)]
