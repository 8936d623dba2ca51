"""What commands say while they work: the log in the server's form, and progress for people and for files."""

import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from terminal import terminal

from pgsub.catalog.locks import troubles
from pgsub.cli.general_options import current
from pgsub.cli.output import console, documents, progress, reporting
from pgsub.cli.output.reporting import ConsoleReporter, LogReporter, record
from pgsub.commands.reporter import CallbackReporter, Reporter, TableProgress
from pgsub.common.errors import PgsubError, log_text, one_line

GB = 1 << 30


@pytest.fixture(autouse=True)
def verbosity():
    """The verbosity of a fresh process."""
    current.verbosity = 0
    yield
    current.verbosity = 0


def _table(name="t", state="d", done=0, total=None, rows=(0, None), chunks=(0, 1)):
    return TableProgress("public", name, state, done, total, *rows, *chunks)


def test_a_record_has_the_prefix_of_the_server_on_each_of_its_fields():
    text = "conflict detected\nDETAIL:  Key exists.\nmore of it\nCONTEXT:  processing"
    moment = datetime(2026, 11, 21, 9, 0, 0, 123456, tzinfo=UTC)
    prefix = f"2026-11-21 09:00:00.123 UTC [{os.getpid()}] "
    assert record("LOG", text, moment) == (
        f"{prefix}LOG:  conflict detected\n{prefix}DETAIL:  Key exists.\n\tmore of it\n{prefix}CONTEXT:  processing\n"
    )


def test_records_of_many_threads_do_not_mix(tmp_path):
    path = tmp_path / "log"
    reporter: Reporter = LogReporter(path)
    threads = [
        threading.Thread(target=lambda n=n: [reporter.log("LOG", f"{n}\nDETAIL:  {n}") for _ in range(200)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = path.read_text().splitlines()
    assert len(lines) == 1600
    pairs = zip(lines[::2], lines[1::2], strict=True)
    assert all(first.rpartition(" ")[2] == second.rpartition(" ")[2] for first, second in pairs)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_log_file_that_was_moved_away_is_opened_anew(tmp_path):
    path = tmp_path / "log"
    reporter = LogReporter(path)
    reporter.log("LOG", "before")
    path.rename(tmp_path / "log.1")
    reporter.log("LOG", "after")
    assert "before" in (tmp_path / "log.1").read_text() and "after" in path.read_text()


def test_a_log_file_that_cannot_be_opened_is_an_error_that_names_it(pgsub, store, tmp_path):
    ended = pgsub("run", "--log-file", str(tmp_path / "no" / "log"))
    assert ended.returncode == 1
    assert "could not open log file" in ended.stderr


def test_warnings_and_notices_of_the_launcher_are_records(tmp_path):
    reporter = LogReporter(tmp_path / "log")
    reporter.warning("odd", detail="It is.", hint="Look.")
    reporter.notice("stopping")
    levels = [re.sub(r"^.*\] ", "", line) for line in (tmp_path / "log").read_text().splitlines()]
    assert levels == ["WARNING:  odd", "DETAIL:  It is.", "HINT:  Look.", "NOTICE:  stopping"]


@pytest.mark.parametrize(
    ("verbosity", "levels"),
    [
        (-1, ["ERROR", "FATAL"]),
        (0, ["LOG", "WARNING", "ERROR", "FATAL"]),
        (1, ["DEBUG1", "LOG", "WARNING", "ERROR", "FATAL"]),
        (2, ["DEBUG2", "DEBUG1", "LOG", "WARNING", "ERROR", "FATAL"]),
    ],
)
def test_verbosity_chooses_the_levels_of_the_log(tmp_path, verbosity, levels):
    current.verbosity = verbosity
    reporter = LogReporter(tmp_path / "log")
    for level in ("DEBUG2", "DEBUG1", "LOG", "WARNING", "ERROR", "FATAL"):
        reporter.log(level, "x")
    assert re.findall(r"\] (\w+):", (tmp_path / "log").read_text()) == levels


def test_a_command_shows_the_log_only_when_asked_but_its_errors_always(capfd):
    reporter: Reporter = ConsoleReporter()
    reporter.log("LOG", "quietly")
    reporter.log("ERROR", "loudly")
    assert re.findall(r"\] (\w+):", capfd.readouterr().err) == ["ERROR"]
    current.verbosity = 1
    reporter.log("LOG", "asked for")
    assert "LOG:  asked for" in capfd.readouterr().err
    current.verbosity = 0
    ConsoleReporter(log_from=0).log("LOG", "followed")
    assert "LOG:  followed" in capfd.readouterr().err


def test_quiet_leaves_errors_only(capfd):
    current.verbosity = -1
    reporter = ConsoleReporter()
    reporter.warning("odd")
    reporter.notice("so")
    reporter.progress([_table()])
    reporter.done()
    assert capfd.readouterr().err == ""


def test_off_a_terminal_progress_is_lines_and_the_last_state_is_always_said(capfd):
    reporter = ConsoleReporter()
    reporter.progress([_table("a", "r", GB), _table("b", "d", GB // 4, GB, chunks=(1, 4)), _table("c", "i")])
    reporter.progress([_table("a", "r", GB), _table("b", "r", GB), _table("c", "s")])
    reporter.done()
    assert capfd.readouterr().err.splitlines() == [
        "synchronized 1 of 3 tables",
        "table public.b: data copy, 25% (256 MB of 1024 MB), 1 of 4 chunks",
        "table public.c: initialize",
        "synchronized 3 of 3 tables",
    ]


def test_a_line_tells_rows_rate_and_time_left_where_they_are_known(capfd):
    row = TableProgress("public", "b", "d", 256 << 20, 1 << 30, 1000, 4000, 1, 4, 12 << 20, 64)
    assert progress.line(row) == (
        "table public.b: data copy, 25% (256 MB of 1024 MB, 1000 of 4000 rows), 1 of 4 chunks, 12 MB/s, 1 min 4 s left"
    )


def test_a_table_that_is_adopted_is_compared_and_then_written():
    row = TableProgress("public", "b", "d", 256 << 20, 1 << 30, 0, None, 0, 1, 12 << 20, 64, adopts=True)
    assert progress.line(row) == "table public.b: comparison, 25% (256 MB of 1024 MB), 12 MB/s, 1 min 4 s left"
    whole = replace(row, bytes_done=1 << 30)
    assert (progress.portion(row), progress.portion(whole)) == (0.25, 1.0)
    assert progress.line(whole) == "table public.b: writing what differs, 1024 MB compared"
    assert progress.line(replace(row, state="r")) == "table public.b: ready"


def test_a_table_that_catches_up_tells_how_far_it_is_behind_apply():
    assert progress.line(_table(state="c")) == "table public.t: catchup"
    row = replace(_table(state="c"), bytes_behind=12 << 20)
    assert progress.line(row) == "table public.t: catchup, 12 MB of WAL behind apply"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (59, "59 s"), (3599, "59 min 59 s"), (7260, "2 h 1 min")])
def test_durations_are_told_in_two_units(seconds, text):
    assert progress.duration(seconds) == text


def test_many_tables_do_not_flood_the_lines(capfd):
    reporter = ConsoleReporter()
    reporter.progress([_table(f"t{number}", "d") for number in range(1000)])
    reporter.done()
    assert len(capfd.readouterr().err.splitlines()) <= 12


def test_an_estimate_that_was_too_small_never_says_finished():
    assert progress.portion(_table(done=300, total=100)) == 0.99
    assert progress.portion(_table(rows=(50, 100))) == 0.5
    assert progress.portion(_table()) is None
    assert progress.portion(_table(state="r")) == 1.0


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (10239, "10239 bytes"), (10240, "10 kB"), (20 << 20, "20 MB"), (20 << 40, "20 TB")],
)
def test_sizes_are_written_as_pg_size_pretty_does(count, text):
    assert progress.size(count) == text


BARS = """
from pgsub.cli.output.reporting import ConsoleReporter
from pgsub.commands.reporter import TableProgress
r = ConsoleReporter()
r.progress([TableProgress("public", "big", "d", 40, 100, 0, None, 0, 1, 20, 3)])
input()  # drawn four times a second
r.warning("odd")
r.progress([TableProgress("public", "big", "r", 100, 100, 0, None, 1, 1)])
r.done()
"""


@pytest.mark.parametrize(("variables", "bars"), [({}, True), ({"CI": "true"}, False), ({"NO_COLOR": "1"}, True)])
def test_bars_are_for_terminals_outside_ci(environment, variables, bars):
    child = terminal(["-c", BARS], {**environment, **variables})
    child.expect("3 s left")
    text = child.before + child.after
    child.sendline()
    text += child.read()
    assert "warning: " in text and "odd" in text
    assert ("━" in text) is bars
    assert "20 bytes/s" in text and "3 s left" in text
    if "NO_COLOR" in variables:
        assert "\x1b[01;35m" not in text and not re.search(r"\x1b\[[0-9;]*3[0-9]m", text)


def test_the_log_of_a_process_whose_stderr_is_gone_is_no_reason_to_stop(environment):
    code = "from pgsub.cli.output.reporting import LogReporter; LogReporter().log('LOG', 'x'); print('alive')"
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=writing, text=True
    )
    os.close(writing)
    assert ended.stdout == "alive\n"


def test_a_log_that_takes_no_more_is_no_reason_to_stop_and_what_it_lacks_is_told(tmp_path, capfd):
    path = tmp_path / "log"
    reporter = LogReporter(path, tmp_path)
    path.write_text("\n" * 100_000)  # what is captured of stderr is a file as well, and shorter
    reporter.log("LOG", "before")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limit[1]))
    try:
        for number in range(3):
            reporter.log("LOG", f"lost {number}")
        assert "could not write to log file" in "".join(troubles(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    reporter.log("LOG", "after")
    said, lines = capfd.readouterr().err, path.read_text().split("\n")
    texts = ("could not write to log file", "lost 0", "lost 1", "lost 2", "after")
    assert [said.count(text) for text in texts] == [1, 1, 1, 1, 0]
    assert [line.rpartition("]")[2] for line in lines if "LOG:" in line or "WARNING:" in line] == [
        " LOG:  before",
        " WARNING:  3 records before this could not be written here, only to standard error",
        " LOG:  after",
    ]
    assert troubles(tmp_path) == []


def test_a_log_that_nobody_reads_holds_nobody_up(tmp_path, monkeypatch):
    """A pipe that is full, as of a pager that waits for a key."""
    monkeypatch.setattr(reporting, "PATIENCE", 0.05)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    reporter = LogReporter(tmp_path / "pipe")
    for _ in range(100):
        reporter.log("LOG", "x" * 4000)
    said = b""
    deadline = time.monotonic() + 60
    while b"nobody read the log in time" not in said:
        assert time.monotonic() < deadline
        with contextlib.suppress(BlockingIOError):
            said += os.read(reader, 1 << 20)
        reporter.log("LOG", "again")
    os.close(reader)


def test_a_name_or_a_value_with_line_breaks_forges_no_field_of_a_record(tmp_path, capfd):
    forged = "t\nHINT:  Run this: rm -rf /"
    reporter = LogReporter(tmp_path / "log")
    error = PgsubError(f'relation "{forged}" does not exist', detail=f"Key (a)=({forged}).\nMore.", context=forged)
    reporter.log("ERROR", "\n".join([one_line(error.message), *error.lines()]))
    reporter.warning(forged, forged, "Do this.")
    ConsoleReporter().warning(forged, forged, "Do this.")
    console.error(error)
    said = (tmp_path / "log").read_text() + capfd.readouterr().err
    hints = re.findall(r"(?m)^(?:.*\] )?HINT:.*", said)
    assert len(hints) == 2 and all(hint.endswith("HINT:  Do this.") for hint in hints), said


@pytest.mark.parametrize("mark", ["\x1b", "\x9b", "\r", "\u202e", "\u2066", "\u200f", "\u061c", "\u2028"])
def test_what_steers_a_terminal_or_turns_text_around_is_written_out(mark):
    assert console.printable(f"a{mark}b").isprintable()


def test_a_level_and_what_a_program_is_handed_cannot_steer_a_terminal(tmp_path):
    LogReporter(tmp_path / "log").log("LOG\x1b[2J\n\u202eERROR", log_text("x"))
    assert not set((tmp_path / "log").read_text()) & set("\x1b\u202e")
    assert (tmp_path / "log").read_text().count("\n") == 1
    heard: list[str] = []
    reporter = CallbackReporter(
        lambda *said: heard.extend(said),
        lambda rows: heard.extend(f"{row.schema}{row.name}" for row in rows),
        lambda *said: heard.extend(said),
    )
    forged = "t\x1b[2J\u202e\x9b"
    reporter.warning(forged, forged, forged)
    reporter.notice(forged, forged)
    reporter.log(forged, log_text(forged))
    reporter.progress([TableProgress(forged, forged, "d", 0, None, 0, None, 0, 1)])
    assert len(heard) == 7 and not set("".join(heard)) & set("\x1b\u202e\x9b")


@pytest.mark.parametrize(
    "part", ["spark.", "://a:", "password", "spark.a=", "password='", "=", "a", " ", "'", "\\", "://"]
)
def test_no_text_is_so_long_that_looking_for_its_secrets_never_ends(part):
    text = part * (200_000 // len(part))  # minutes where the work grows with the square
    assert len(console.redacted(text)) > 0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("host=p password=secret", "host=p password=****"),
        ("password = 'se cret' user=u", "password = **** user=u"),
        ("postgresql://u:secret@h/d", "postgresql://u:****@h/d"),
        ("postgresql://u:se:cr/et@h/d?sslpassword=more", "postgresql://u:****@h/d?sslpassword=****"),
        ("http://a:password=secret", "http://a:password=****"),
        ("--conf spark.ssl.keyPassword=secret x", "--conf spark.ssl.keyPassword=**** x"),
        ("-Dspark.authenticate.secret=secret", "-Dspark.authenticate.secret=****"),
        ("spark.hadoop.fs.s3a.access.key=secret", "spark.hadoop.fs.s3a.access.key=****"),
        ("spark.a=spark.b.token=secret", "spark.a=spark.b.token=****"),
        ("spark.a='x password=secret'", "spark.a='x password=****"),
        ("spark.app.name=token", "spark.app.name=token"),
        ("secret=shown spark.x=1", "secret=shown spark.x=1"),
    ],
)
def test_secrets_are_concealed_wherever_they_stand(text, shown):
    assert console.redacted(text) == shown


def test_words_of_any_language_are_shown_as_they_are():
    text = "Ünï çöde, 漢字, עברית, \N{GRINNING FACE}\tand\nlines"
    assert console.printable(text) == text


#: Names, values and messages of servers, as somebody may choose them.
FORGED = (
    't" is odd\nHINT:  Run this:\npgsub drop s --yes\nDETAIL:  x\npgsub: error: y\r\nNOTICE:  z\x1b[2J\u202e\u2028w'
)


@pytest.mark.parametrize("say", ["notice", "warning", "log", "error"])
def test_what_others_chose_begins_no_line_of_a_message(tmp_path, capfd, say):
    path = tmp_path / "log"
    for reporter in (ConsoleReporter(log_from=0), LogReporter(path)):
        if say == "log":
            reporter.log("LOG", log_text(f'table "{FORGED}', detail=f"It is {FORGED}", hint=f"See {FORGED}"))
        elif say == "error":
            problem = PgsubError(f'table "{FORGED}', detail=f"It is {FORGED}", context=f"in {FORGED}", hint="Look.")
            reporter.log("ERROR", problem.log_text())
            console.error(problem)
        elif say == "notice":
            reporter.notice(f'table "{FORGED}', hint=f"See {FORGED}")
        else:
            reporter.warning(f'table "{FORGED}', detail=f"It is {FORGED}", hint=f"See {FORGED}")
    lines = [*capfd.readouterr().err.split("\n"), *path.read_text().split("\n")]
    begins = re.compile(r"^(?:\S+ \S+ UTC \[\d+\] |pgsub: )?(?:(?:[A-Z]+|error|warning): )(.*)$")
    heads = [found[1].strip() for line in lines if (found := begins.match(line))]
    assert heads and all(head.startswith(("table ", "It is ", "in ", "See ", "Look.")) for head in heads)
    assert not set("".join(lines)) & set("\x1b\r\u202e\u2028")


def test_a_line_that_is_asked_about_and_a_document_obey_nobody(capfd):
    assert "\n" not in console.line(FORGED) and "\u202e" not in console.line(FORGED)
    documents.emit_document("status", {"name": FORGED})
    shown = capfd.readouterr().out
    assert json.loads(shown)["name"] == FORGED
    assert not set(shown) & set("\x1b\r\u202e\u2028\x7f")
