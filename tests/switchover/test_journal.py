"""The journal of a switchover: which phase may follow which, on both servers."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import patience
import psycopg
import pytest
from embedded import Server
from fix_program import until
from fix_servers import Database
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgsub.commands.reporter import CallbackReporter
from pgsub.commands.switchover.parties import SwitchoverOptions
from pgsub.commands.switchover.transfer import right_to_write, server_gone
from pgsub.common.errors import PgsubError, StateForbids, TargetUnavailable
from pgsub.common.subscription import Subscription
from pgsub.publisher.database import database
from pgsub.switchover import fence, journal
from pgsub.switchover.journal import Entry
from pgsub.target.ledger.schema import installation
from pgsub.target.session.connect import connect

_ID = "00000000-0000-0000-0000-000000000001"
_SETTING = "SELECT current_setting('default_transaction_read_only')"


class Sides(NamedTuple):
    """A session on each server, with a row of the journal."""

    giving: psycopg.Connection
    taking: psycopg.Connection

    @property
    def entry(self) -> Entry:
        """The row of the taking side."""
        found = journal.of(self.taking, _ID)
        assert found is not None
        return found

    def phases(self, giving: str, taking: str) -> None:
        """Set both."""
        for session, phase in ((self.giving, giving), (self.taking, taking)):
            session.execute("UPDATE pgsub.switchover SET phase = %s, saved = '{\"setting\": null}'", (phase,))


@pytest.fixture
def sides(pubdb: Database, subdb: Database) -> Iterator[Sides]:
    """Both servers with a ledger."""
    with closing(connect(pubdb.conninfo, "a")) as giving, closing(connect(subdb.conninfo, "b")) as taking:
        for session, side, phase in ((giving, journal.GIVING, "open"), (taking, journal.TAKING, "planned")):
            installation.install(session)
            journal.add(session, Entry(_ID, side, 1, "s", "s_back", None, phase, fence.READ_ONLY))
        yield Sides(giving, taking)


def _nothing(action: str) -> None:
    """Stand for the user's command where there is none."""


def test_what_was_given_is_not_given_or_released_again(sides: Sides) -> None:
    sides.phases("given", "prepared")
    for expected, phase in (("fenced", "given"), ("open", "releasing"), ("fenced", "releasing")):
        with pytest.raises(StateForbids, match=f'not "{expected}" any more, but "given"'):
            journal.move(sides.giving, _ID, (expected,), phase)
    journal.move(sides.giving, _ID, ("given",), "releasing")


@pytest.mark.parametrize("phase", ["open", "fenced", "releasing", "released"])
def test_what_was_not_given_is_not_taken(sides: Sides, phase: str) -> None:
    sides.phases(phase, "prepared")
    with pytest.raises(PgsubError, match=f"was not given, but is {phase}"):
        right_to_write.take(sides.entry, sides.giving, sides.taking, right_to_write.Timing())
    assert sides.entry.phase == "prepared"


def test_what_was_given_is_released_only_by_a_target_that_has_not_taken_it(sides: Sides) -> None:
    sides.phases("given", "taken")
    with pytest.raises(StateForbids, match='but "taken"'):
        right_to_write.release(sides.entry, sides.giving, sides.taking, _nothing)
    with pytest.raises(TargetUnavailable, match="cannot be reached"):
        right_to_write.release(sides.entry, sides.giving, None, _nothing)
    assert journal.of(sides.giving, _ID).phase == "given"  # type: ignore[union-attr]
    sides.phases("given", "prepared")
    right_to_write.release(sides.entry, sides.giving, sides.taking, _nothing)
    assert sides.entry.phase == "declined"
    with pytest.raises(PgsubError, match="was not given, but is releasing"):
        right_to_write.take(sides.entry, sides.giving, sides.taking, right_to_write.Timing())


def test_a_database_takes_part_in_one_switchover_and_gives_the_right_once(sides: Sides) -> None:
    other = _ID.replace("1", "2")
    with pytest.raises(StateForbids, match='a switchover of subscription "s" of the same database is under way'):
        journal.check_alone(sides.giving, other)
    sides.phases("given", "done")
    journal.check_alone(sides.giving, other)
    with pytest.raises(StateForbids, match="has given the right to write away"):
        journal.check_right(sides.giving, other)
    journal.check_right(sides.taking, other)
    journal.add(sides.giving, Entry(other, journal.TAKING, 2, "s_back", "s", 3, "done", fence.READ_ONLY))
    journal.check_right(sides.giving, _ID.replace("1", "3"))


def test_a_clock_that_is_set_back_hides_no_row_and_makes_no_pause_longer(sides: Sides) -> None:
    back, third = _ID.replace("1", "2"), _ID.replace("1", "3")
    sides.phases("given", "done")
    for session in sides:  # as it was written while the clock was ahead
        session.execute(
            "UPDATE pgsub.switchover SET fenced_at = now() + '1 hour', began_at = now() + '1 day',"
            " changed_at = now() + '1 day'"
        )
    assert journal.of(sides.giving, _ID).fenced_for == 0  # type: ignore[union-attr]
    journal.add(sides.giving, Entry(back, journal.TAKING, 2, "s_back", "s", 3, "prepared", fence.READ_ONLY))
    journal.move(sides.giving, back, ("prepared",), "taken")
    journal.check_right(sides.giving, third)  # it has come back
    journal.add(sides.giving, Entry(third, journal.GIVING, 4, "s", "s_back", 4, "open", fence.READ_ONLY))
    journal.move(sides.giving, third, ("open",), "fenced")
    journal.move(sides.giving, third, ("fenced",), "given")
    with pytest.raises(StateForbids, match="has given the right to write away"):
        journal.check_right(sides.giving, _ID.replace("1", "4"))
    journal.add(sides.taking, Entry(third, journal.TAKING, 1, "s", "s_back", 4, "prepared", fence.READ_ONLY))
    found = journal.of_subscription(sides.taking, journal.TAKING, 1)
    assert found is not None and (found.id, found.fenced_for) == (third, None)


@contextmanager
def _slow_start(pubdb: Database, fencing: psycopg.Connection) -> Iterator[list[object]]:
    """A client whose session is just starting; behind the body the list has its setting, or the error that ended it."""
    found: list[object] = []
    fenced = threading.Event()

    def client() -> None:
        try:
            with psycopg.connect(pubdb.conninfo, options="-c post_auth_delay=2") as session:
                assert fenced.wait(patience.SECONDS)
                found.extend(session.execute(_SETTING).fetchone() or ())
        except psycopg.OperationalError as error:
            found.append(error)

    thread = threading.Thread(target=client)
    thread.start()
    try:
        until(lambda: fence._starting(fencing, []))
        yield found
    finally:
        fenced.set()
        thread.join()


def test_a_session_that_is_just_starting_does_not_slip_through_a_fence(pubdb: Database) -> None:
    with closing(connect(pubdb.conninfo, "a")) as session:
        with _slow_start(pubdb, session) as found:
            fence.put(session, fence.READ_ONLY, ())
            fence.end_sessions(session, [], time.monotonic() + patience.SECONDS)
        assert found == ["on"] or isinstance(found[0], psycopg.OperationalError)


def test_a_session_that_shows_itself_between_two_questions_does_not_slip_through_a_fence(
    pubdb: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(connect(pubdb.conninfo, "a")) as session, closing(connect(pubdb.conninfo, "b")) as observer:
        execute, asked = session.execute, iter([fence._OLD])

        def until_it_is_shown(query: str, *args: object) -> object:
            answer = execute(query, *args)
            if query == fence._OLD and next(asked, None):
                until(lambda: not fence._starting(observer, []))
            return answer

        with _slow_start(pubdb, session) as found:
            fence.put(session, fence.READ_ONLY, ())
            monkeypatch.setattr(session, "execute", until_it_is_shown)
            fence.end_sessions(session, [observer.info.backend_pid], time.monotonic() + patience.SECONDS)
        assert found == ["on"] or isinstance(found[0], psycopg.OperationalError)


def _sleeping(seconds: str) -> bool:
    """Whether a ``sleep`` of so many seconds runs."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if path.read_bytes().startswith(f"sleep\0{seconds}".encode()):
                return True
    return False


@pytest.mark.long
def test_a_command_of_the_users_does_not_outlive_a_run_that_is_killed_and_what_it_leaves_behind_does(
    tmp_path: Path,
) -> None:
    """What it does late would come behind what the next run has it do."""
    run = "import sys; from pgsub.switchover import fence; fence.run(sys.argv[1], 'fence', 'host=a', 'host=b', None)"
    command = [sys.executable, "-c", run]
    first, second = (f"{3600 + os.getpid()}.{number}" for number in (25, 75))
    with subprocess.Popen([*command, f"sleep {first} & sleep {second}"]) as running:
        until(lambda: _sleeping(first) and _sleeping(second))
        running.kill()
    until(lambda: not _sleeping(first) and not _sleeping(second))
    go, done = tmp_path / "go", tmp_path / "done"
    daemon = f"(until test -e {go}; do sleep 0.05; done; touch {done}) &"
    subprocess.run([*command, f'test "$PGSUB_SWITCHOVER" = fence && ! read line && {daemon}'], check=True)
    go.touch()
    until(done.exists)
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run([*command, "exit 3"], check=True, stderr=subprocess.DEVNULL)


def test_a_command_of_the_users_may_wait_for_all_children_that_it_has() -> None:
    reaper = "import os\ntry:\n    while True: os.wait()\nexcept ChildProcessError: pass"
    fence.run(f"exec {sys.executable} -c {shlex.quote(reaper)}", "fence", "host=a", "host=b", patience.SECONDS)


@pytest.mark.parametrize("before", [None, "on", "off", "true"])
def test_a_fence_is_lifted_to_what_was_before_or_to_writable(pubdb: Database, before: str | None) -> None:
    database = f'ALTER DATABASE "{pubdb.name}"'
    if before is not None:
        pubdb.execute(f"{database} SET default_transaction_read_only = {before}")

    def found() -> str:
        with pubdb.connect() as session:
            return str(session.execute(_SETTING).fetchall()[0][0])

    with closing(connect(pubdb.conninfo, "a")) as session:
        saved = fence.put(session, fence.READ_ONLY, ())
        assert found() == "on" and saved == {"setting": before}
        fence.restore(session, fence.READ_ONLY, saved)
        assert found() == {None: "off", "true": "on"}.get(before, before)
        fence.put(session, fence.READ_ONLY, ())
        fence.lift(session, fence.READ_ONLY, saved)
        assert found() == "off"


def test_connect_is_given_back_as_it_was_whoever_had_granted_it(pubdb: Database) -> None:
    names = [f"{pubdb.name}_{letter}" for letter in "abcd"]
    kept = names[-1]
    query = "SELECT a::text FROM pg_database, unnest(datacl) a WHERE datname = current_database() ORDER BY 1"
    connects = "SELECT rolname FROM pg_roles WHERE rolname = ANY(%s) AND has_database_privilege(oid, %s, 'CONNECT')"
    for name in names:
        pubdb.execute(f'CREATE ROLE "{name}"')
    try:
        for statement in (
            "REVOKE CONNECT ON DATABASE {db} FROM PUBLIC",
            "GRANT CONNECT ON DATABASE {db} TO {a} WITH GRANT OPTION",
            "SET ROLE {a}; GRANT CONNECT ON DATABASE {db} TO {b} WITH GRANT OPTION; RESET ROLE",
            "SET ROLE {b}; GRANT CONNECT ON DATABASE {db} TO {c}, {d}; RESET ROLE",
            "GRANT CONNECT, CREATE ON DATABASE {db} TO {d} WITH GRANT OPTION",
            "SET ROLE {d}; GRANT CONNECT ON DATABASE {db} TO {c}; RESET ROLE",
        ):
            quoted = {letter: f'"{name}"' for letter, name in zip("abcd", names)}
            pubdb.execute(statement.format(db=f'"{pubdb.name}"', **quoted))
        with closing(connect(pubdb.conninfo, "a")) as session:
            before = session.execute(query).fetchall()
            with session.transaction():
                saved = json.loads(json.dumps(fence.put(session, fence.CONNECT, [kept, "gone"])))
            assert session.execute(connects, (names, pubdb.name)).fetchall() == [(kept,)]
            with session.transaction():
                fence.restore(session, fence.CONNECT, saved)
            assert session.execute(query).fetchall() == before
    finally:
        pubdb.execute("; ".join(f'DROP OWNED BY "{name}" CASCADE' for name in names))
        pubdb.execute("; ".join(f'DROP ROLE "{name}"' for name in names))


@pytest.mark.long
def test_connect_is_given_back_although_a_role_was_made_in_a_database_of_another_encoding() -> None:
    with Server(fast=True) as server, closing(connect(server.conninfo(), "a")) as session:
        with session.transaction():
            saved = fence.put(session, fence.CONNECT, ["postgres"])
        session.execute("CREATE DATABASE latin1 ENCODING LATIN1 LOCALE 'C' TEMPLATE template0")
        with closing(server.connect("latin1", client_encoding="LATIN1")) as other:
            other.execute('CREATE ROLE "caf\u00e9"')
        with session.transaction():
            fence.restore(session, fence.CONNECT, saved)
        assert session.execute("SELECT has_database_privilege('pg_monitor', 'postgres', 'CONNECT')").fetchone() == (
            True,
        )


@pytest.mark.long
@pytest.mark.parametrize("more", ["", "user=nobody_at_all", "dbname=none_at_all", "sslmode=require"])
def test_a_server_that_answers_is_not_gone_even_if_it_refuses(pubdb: Database, tmp_path: Path, more: str) -> None:
    """The server of the tests has no TLS, and refuses who asks for it without an SQLSTATE."""
    options = SwitchoverOptions("s", tmp_path, gone="publisher")
    with pytest.raises(StateForbids, match="the publisher is not gone: it answers"):
        server_gone.check_gone(options, _subscription(f"{pubdb.conninfo} {more}"), None, None, CallbackReporter())


@pytest.mark.long
@pytest.mark.parametrize("side", ["publisher", "target"])
def test_a_server_is_not_gone_while_either_subscription_reaches_it(pubdb: Database, tmp_path: Path, side: str) -> None:
    with _nobody() as nobody:
        sub, back = _subscription(nobody, nobody), _subscription(pubdb.conninfo, pubdb.conninfo)
        with pytest.raises(StateForbids, match=f"the {side} is not gone: it answers"):
            server_gone.check_gone(SwitchoverOptions("s", tmp_path, gone=side), sub, back, None, CallbackReporter())


@pytest.mark.long
def test_a_fenced_server_is_not_gone_though_no_other_host_of_its_connection_string_answers(
    pubdb: Database, tmp_path: Path
) -> None:
    with _nobody() as nobody:
        there, other = conninfo_to_dict(pubdb.conninfo), conninfo_to_dict(nobody)
        both = {key: f"{there[key]},{other[key]}" for key in ("host", "port")}
        fenced = {"options": "-c default_transaction_read_only=on", "target_session_attrs": "read-write"}
        sub = _subscription(make_conninfo("", **{**there, **both, **fenced}))
        with pytest.raises(StateForbids, match="it answers"):
            server_gone.check_gone(
                SwitchoverOptions("s", tmp_path, gone="publisher"), sub, None, None, CallbackReporter()
            )


@pytest.mark.long
@pytest.mark.parametrize("service", [False, True])
def test_a_server_that_starts_up_is_not_gone_though_no_host_after_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: bool
) -> None:
    with Server(fast=True) as server, _nobody() as nobody:
        server.stop()
        server.append_conf({"hot_standby": False})
        (server.data / "standby.signal").touch()
        server.start()
        both = f"host=127.0.0.1,127.0.0.1 port={server.port},{conninfo_to_dict(nobody)['port']}"
        if service:
            (tmp_path / "services").write_text("\n".join(["[both]", *both.split(), "user=postgres", ""]))
            monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
        sub = _subscription(f"{'service=both' if service else both} dbname=postgres")
        with pytest.raises(StateForbids, match="it answers"):
            server_gone.check_gone(
                SwitchoverOptions("s", tmp_path, gone="publisher"), sub, None, None, CallbackReporter()
            )


def test_only_another_server_or_a_server_without_the_database_is_not_taken_for_the_one_that_is_gone(
    sides: Sides, pubdb: Database, subdb: Database, tmp_path: Path
) -> None:
    """One server has the database, maybe under another name; the other one has a copy of it, and other databases."""
    mine, dropped = database(sides.taking), database(sides.taking)._replace(oid=2**32 - 2)
    none, other = subdb.server.conninfo("none_at_all"), pubdb.server.conninfo("none_at_all")
    may_be, copy = "told apart only if pgsub can connect", "copy of the switchover's journal"
    for conninfo, lost, refused in (
        (subdb.conninfo, None, may_be),
        (subdb.conninfo, mine, may_be),
        (none, None, may_be),
        (none, mine, may_be),
        (subdb.server.conninfo("none_at_all", "nobody_at_all"), dropped, may_be),
        (subdb.conninfo, dropped, copy),
        (pubdb.conninfo, mine, copy),
        (none, dropped, None),
        (subdb.server.conninfo(), dropped, None),
        (pubdb.server.conninfo(), mine, None),
        (other, mine, None),
    ):
        warned: list[str] = []
        options, sub = SwitchoverOptions("s", tmp_path, gone="target"), _subscription("", conninfo)
        reporter = CallbackReporter(lambda kind, text, to=warned: to.append(text))
        known = server_gone.Lost(lost, _ID)
        with nullcontext() if refused is None else pytest.raises(StateForbids, match="not gone: it answers") as error:
            server_gone.check_gone(options, sub, None, known, reporter)
        said = "another database answers in place of the target"
        assert [text.partition(",")[0] for text in warned] == [said] * (refused is None)
        assert refused is None or refused in (error.value.detail or "")


@pytest.mark.long
def test_a_server_that_does_not_answer_is_gone(tmp_path: Path) -> None:
    with _nobody() as nobody:
        sub = _subscription(nobody, nobody)
        server_gone.check_gone(SwitchoverOptions("s", tmp_path, gone="publisher"), sub, sub, None, CallbackReporter())


@contextmanager
def _nobody() -> Iterator[str]:
    """A connection string that leads to a port that is taken and not listened at."""
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"host=127.0.0.1 port={taken.getsockname()[1]} user=a dbname=b"


def _subscription(connection: str, target: str = "") -> Subscription:
    return Subscription(1, "s", connection, target, (), None)
