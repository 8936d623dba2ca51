"""What the machine lacks, or a limit of the process, is no bug: it is told in the server's words, and tried again."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from fix_failpoints import WithoutThreads
from fix_program import Cli, until
from fix_servers import Database

from pgsub.catalog.store import StateStore
from pgsub.common import threads
from pgsub.common.errors import Directive, OutOfResources
from pgsub.common.machine.out_of_resources import out_of_resources
from pgsub.common.subscription import Subscription
from pgsub.common.threads import SupervisedThread
from pgsub.launcher.error_handling import ErrorReporter
from pgsub.launcher.error_rows import internal_error
from pgsub.launcher.heartbeat_receiver import HeartbeatReceiver
from pgsub.launcher.recorder import Recorder
from pgsub.launcher.workers.sequence_worker import SequenceWorker
from pgsub.launcher.workers.sync_workers import SyncWorkers
from pgsub.tablesync.context import SyncContext
from pgsub.target.ledger.subscriptions import RelationState

_NO_MEMORY = """
import resource, sys
from pgsub.common import threads
from pgsub.common.machine.out_of_resources import out_of_resources

threads.BEGIN_SECONDS = 0.5
first = threads.SupervisedThread("test", "first")  # whose stack the next one gets
first.start()
first.join()
next_one, done = threads.SupervisedThread("test", "next", lambda: done.append(1)), []
with open("/proc/self/status") as status:
    size = next(int(line.split()[1]) for line in status if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
held = []
for piece in (2**20, 2**16, 2**12, 2**10, 600):
    try:
        while True:
            held.append(bytearray(piece))
    except MemoryError:
        pass
try:
    while True:
        held.append(object())
except MemoryError:
    pass
try:
    next_one.start()
except RuntimeError as error:
    caught = error
except MemoryError as error:
    caught = error
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
held.clear()
print(out_of_resources(caught).sqlstate, next_one.is_alive(), done)
"""


_NO_DESCRIPTOR = """
import resource, socket, sys, time
from pathlib import Path
from pgsub.cli.operate.metrics_server import MetricsServer

class Counting(MetricsServer):
    asked: list[float] = []
    pause = 0.3

    def get_request(self):
        self.asked.append(time.monotonic())
        return super().get_request()

server = Counting("127.0.0.1", 0, Path(sys.argv[1]))
client, before = socket.socket(), resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
client.connect(server.server_address)
while len(server.asked) < 4:
    time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_NOFILE, before)
client.sendall(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
print(server.asked[3] - server.asked[0], client.recv(15).decode())
"""


def test_metrics_without_a_file_descriptor_wait_without_a_spin(tmp_path: Path) -> None:
    words = [sys.executable, "-c", _NO_DESCRIPTOR, str(tmp_path / "state")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    took, answer = ended.stdout.split(maxsplit=1)
    assert float(took) >= 0.9 and answer.strip() == "HTTP/1.0 200 OK", ended.stderr


class _NeverBegins(SupervisedThread):
    """A thread without the memory to say that it runs."""

    def _bootstrap(self) -> None:
        pass


def test_a_thread_that_never_begins_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "BEGIN_SECONDS", 0.1)
    thread = _NeverBegins("test", "test")
    assert thread.try_start() is False
    assert isinstance(thread.fatal_error, OutOfResources)


def test_a_thread_that_finds_no_memory_to_begin_with_is_not_waited_for_for_ever() -> None:
    ended = subprocess.run([sys.executable, "-c", _NO_MEMORY], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.split() in (["53000", "False", "[]"], ["53200", "False", "[]"]), ended.stderr


@pytest.mark.long
def test_a_launcher_without_memory_goes_on_once_it_has_some(
    cli: Cli, tables: tuple[Database, Database], tmp_path: Path, reached: Callable[[str], None]
) -> None:
    """Its main thread, and those that use the state store."""
    log, points = tmp_path / "log", ("launcher.turn", "state.write")
    for point in points:
        (tmp_path / point).touch()  # armed when it is removed
    env = {
        "PGSUB_FAILPOINTS": ";".join(f"{point}=memory" for point in points),
        "PGSUB_FAILPOINTS_DIR": str(tmp_path),
        "PGSUB_RETRY_SECONDS": "1",
    }
    running = cli.launcher("--log-file", str(log), env=env)
    assert cli.create("s", "--no-wait").returncode == 0
    assert cli("wait", "s", "--for", "caught-up", "--timeout", "2m").returncode == 0
    for point, said in zip(points, ("WARNING:  out of memory", 'state.db": out of memory'), strict=True):
        (tmp_path / point).unlink()
        until(lambda said=said: said in log.read_text())
        reached(point)
    tables[0].execute("INSERT INTO a VALUES (1000, 'later')")
    tables[1].wait("SELECT t FROM a WHERE id = 1000", value="later")
    assert cli.stop(running) == 0
    assert "was ended by" not in log.read_text()


def test_a_thread_that_cannot_be_started_has_ended_by_that(without_threads: WithoutThreads) -> None:
    done: list[int] = []
    thread = SupervisedThread("test", "test", lambda: done.append(1))
    with without_threads("test"):
        assert not thread.try_start()
    thread.join()
    lack = thread.fatal_error
    assert lack is not None and (lack.sqlstate, lack.directive) == ("53000", Directive.RETRY)
    assert not thread.is_alive() and done == []
    other = SupervisedThread("test", "test", lambda: done.append(2))
    assert other.try_start()
    other.join()
    assert other.fatal_error is None and done == [2]
    with pytest.raises(RuntimeError, match="only be started once"):
        other.try_start()


def test_tables_and_sequences_without_a_thread_are_tried_again_and_end_no_launcher(
    state_dir: Path, without_threads: WithoutThreads
) -> None:
    sub = Subscription(5, "orders", "host=p", "host=t", ("pub",), "orders", sequences=True)
    with StateStore.open(state_dir) as store, closing(HeartbeatReceiver()) as heartbeats:
        store.add_subscription(sub)
        recorder = Recorder(store, lambda level, text: None)
        errors = ErrorReporter(store, sub, lambda level, text: None, recorder)
        stopping = threading.Event()
        context = SyncContext(sub, "0", lambda *_: None, stopping, heartbeats.address)  # type: ignore[arg-type]
        tables = SyncWorkers(context, heartbeats, errors, 5.0, lambda: True)
        sequences = SequenceWorker(sub, store, errors, recorder.run, lambda: sub, stopping)
        relations = [RelationState(1, "public", "a", "i")]
        with without_threads("sync", "sequences") as refused:
            for _ in range(2):
                tables.tick(relations, tables.alive)
                sequences.tick()
            sequences.close()
        assert refused == ["sync", "sequences"]
        assert "could not start a thread" in store.errors(sub.subid)[0].message
        assert sequences.error is not None and sequences.error.directive is Directive.RETRY
        recorder.close()


@pytest.mark.parametrize(
    ("error", "message", "sqlstate"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "out of file descriptors: Too many open files", "53000"),
        (OSError(errno.ENFILE, "Too many open files in system"), "out of file descriptors", "53000"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory", "53200"),
        (MemoryError(), "out of memory", "53200"),
        (RuntimeError("can't start new thread"), "could not start a thread", "53000"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 'could not write file "x": No space left', "53100"),
    ],
)
def test_what_the_machine_lacks_is_no_bug_and_is_tried_again(error: Exception, message: str, sqlstate: str) -> None:
    found = internal_error(error)
    assert message in found.message and found.sqlstate == sqlstate and found.hint
    assert found.directive is Directive.RETRY and found.exit_code == 1


def test_another_error_stays_a_bug() -> None:
    for error in OSError(errno.EBADF, "Bad file descriptor"), RuntimeError("other"), ValueError("x"):
        assert out_of_resources(error) is None
        assert internal_error(error).exit_code == 12
