"""Promises of the Spark session: what it leaves alone, what it writes where, and that it comes back."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pyspark
import pytest
from fix_program import until
from py4j.protocol import Py4JError
from spark import task_functions as tasks
from thorough import only_thorough, thorough

from pgsub.common.errors import Directive, StateForbids
from pgsub.spark import contexts, settings, training
from pgsub.spark.contexts import alive
from pgsub.spark.jobs import Submitter, WorkerDied
from pgsub.spark.jvm import folders
from pgsub.spark.jvm.java import cache_folder
from pgsub.spark.jvm.process import environ
from pgsub.spark.session import close_context, open_context

ROOT = Path(__file__).parents[2]


@pytest.fixture
def opened(state_dir):
    """Open contexts that are closed whatever happens."""
    contexts = []

    def open_one(master=None, workers=2, conf=None):
        submitted = {**(conf or {}), **({"spark.master": master} if master else {})}
        contexts.append(open_context(workers, state_dir, submitted))
        return contexts[-1]

    with environ({"PYTHONPATH": str(Path(tasks.__file__).parents[1])}):
        yield open_one
        for context in contexts:
            close_context(context)


def test_a_killed_java_process_is_noticed_and_a_new_context_opens(opened, state_dir, capfd):
    def handler(number, frame):
        raise AssertionError

    before = signal.signal(signal.SIGINT, handler)
    first = opened()
    assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, before)
    assert alive(first)
    job = Submitter(first).submit("long", tasks.mark_and_wait, [str(state_dir)])
    pid = int((state_dir / "run" / "jvm.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="the Java process of Spark died"):
        job.result(60)
    assert not alive(first)
    with pytest.raises(WorkerDied, match='the Java process of Spark died before job "double" began'):
        Submitter(first).submit("double", tasks.double, [1])
    close_context(first)
    assert not contexts.lost(first)  # it is this process's own, which starts another
    second = opened()
    assert Submitter(second).submit("double", tasks.double, [21]).result(60) == [42]
    assert not alive(first) and alive(second)
    assert capfd.readouterr() == ("", "")


def _scratch(state_dir):
    return list((state_dir / "run").glob("spark.*"))


def test_a_start_removes_the_folders_of_those_that_were_killed_and_of_no_other(state_dir):
    run = state_dir / "run"
    made = f"from pgsub.spark.jvm import folders as j; from pathlib import Path; j.scratch_folder(Path({str(run)!r}))"
    words = [sys.executable, "-c", f"{made}; print(flush=True); input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one:
        one.stdout.readline()
        [living] = _scratch(state_dir)
        subprocess.run([sys.executable, "-c", f"{made}; import os; os._exit(1)"], check=False)
        assert len(_scratch(state_dir)) == 2
        own = folders.scratch_folder(run)
        assert sorted(_scratch(state_dir)) == sorted([living, own])
        one.kill()
    folders.remove_scratch(own)
    assert _scratch(state_dir) == [living]
    last = folders.scratch_folder(run)
    assert _scratch(state_dir) == [last]
    folders.remove_scratch(last)


@pytest.mark.parametrize("removes", ["before", "meanwhile"])
def test_no_folder_is_used_that_another_start_removes_before_it_is_locked(state_dir, monkeypatch, removes):
    run, lock, lost = state_dir / "run", fcntl.flock, []

    def after_another_start(file, operation):
        if not lost:
            lost.extend(_scratch(state_dir))
            if removes == "before":
                other = f"from pgsub.spark.jvm import folders as j; from pathlib import Path; r = Path({str(run)!r})"
                subprocess.run([sys.executable, "-c", f"{other}; j.remove_scratch(j.scratch_folder(r))"], check=True)
            else:  # it is in the midst of that
                with (lost[0] / "lock").open() as held:
                    lock(held, fcntl.LOCK_EX)
                    return lock(file, operation)
        return lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", after_another_start)
    own = folders.scratch_folder(run)
    assert lost and own not in lost and _scratch(state_dir) == [own]
    folders.remove_scratch(own)
    assert _scratch(state_dir) == []


def test_spark_starts_again_after_somebody_removed_its_local_folder(opened, state_dir):
    first = opened()
    shutil.rmtree(state_dir / "run")
    with pytest.raises(WorkerDied, match="the local folder of Spark was removed while job"):
        Submitter(first).submit("double", tasks.double, [21]).result(60)
    assert not alive(first)
    close_context(first)
    assert Submitter(opened()).submit("double", tasks.double, [21]).result(60) == [42]


def fill(context):
    """Take all of its heap, 512 MB."""
    held = []
    while True:
        held.append(context._gateway.new_array(context._jvm.long, 2**17))


@pytest.mark.long
def test_a_java_process_without_memory_ends_all_its_jobs_at_once_and_a_new_context_opens(opened):
    """It neither lingers nor leaves one job without an answer: what else it holds cannot be relied on."""
    first = opened()
    job = Submitter(first).submit("long", tasks.interval, [600.0])
    with pytest.raises((Py4JError, OSError)):
        fill(first)
    with pytest.raises(WorkerDied, match="the Java process of Spark died") as raised:
        job.result(60)
    assert (raised.value.detail, raised.value.directive) == ("It ran out of memory.", Directive.RETRY)
    assert not alive(first)
    close_context(first)
    assert Submitter(opened()).submit("double", tasks.double, [21]).result(60) == [42]


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_full_local_dir_fails_no_job_that_needs_no_room_there_and_others_as_a_whole(opened, tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], check=True)
    try:
        submitter = Submitter(opened(conf={"spark.local.dir": str(tmp_path)}))
        with suppress(OSError), (tmp_path / "fill").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        assert submitter.submit("double", tasks.double, [21]).result(60) == [42]
        assert submitter.submit("wide", tasks.words, [3 << 20]).result(60) == ["w" * (3 << 20)]
        with pytest.raises(WorkerDied, match='Spark had no room for job "large"') as raised:
            submitter.submit("large", len, [os.urandom(3 << 20)]).result(60)
        assert "No space left on device" in raised.value.detail
        assert submitter.submit("double", tasks.double, [22]).result(60) == [44]
        (tmp_path / "fill").unlink()
        assert submitter.submit("large", len, [os.urandom(500 << 10)]).result(60) == [500 << 10]
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.long
def test_the_defaults_are_lean_local_private_and_quiet(opened, state_dir):
    context = opened(workers=20)
    conf = dict(context.getConf().getAll())
    assert conf["spark.master"] == "local[22]"
    assert conf["spark.driver.memory"] == "512m"
    assert conf["spark.driver.host"] == conf["spark.driver.bindAddress"] == "127.0.0.1"
    assert conf["spark.ui.enabled"] == conf["spark.ui.showConsoleProgress"] == conf["spark.speculation"] == "false"
    assert conf["spark.scheduler.mode"] == "FAIR" and conf["spark.ui.killEnabled"] == "false"
    assert conf["spark.ui.liveUpdate.period"] == "0"
    assert _mode(state_dir / "log" / "spark.log") == 0o600
    assert {_mode(place) for place in (state_dir / "log", state_dir / "run", *_scratch(state_dir))} == {0o700}
    for known in (contexts.own, contexts.opened):
        known.discard(context)  # as one that a notebook has opened: it is used, and never closed
    assert opened(workers=3) is context
    with pytest.raises(StateForbids, match="has 22 task slots, but 23 are needed"):
        opened(workers=23)
    close_context(context)
    assert alive(context)
    for known in (contexts.own, contexts.opened):
        known.add(context)
    contexts.guests.discard(context)
    job = Submitter(context).submit("long", tasks.mark_and_wait, [str(state_dir / "run")])
    until(lambda: any(path.name.isdigit() for path in (state_dir / "run").iterdir()))
    close_context(context)
    with pytest.raises(WorkerDied, match='Spark was closed while job "long" ran'):
        job.result(60)
    contexts.guests.add(context)
    assert not alive(context) and contexts.lost(context)  # as a notebook's that was stopped
    assert not (state_dir / "run" / "jvm.pid").exists()
    assert _scratch(state_dir) == []


@pytest.mark.long
@pytest.mark.parametrize("length", [10, *thorough([120])])
def test_no_other_user_can_make_the_daemon_fork(opened, tmp_path, length, monkeypatch):
    state = Path(tempfile.mkdtemp(prefix="p")) / ("s" * length)  # the path of a test's own folder is a long one
    state.mkdir(mode=0o700)
    state.parent.chmod(0o755)
    context = open_context(2, state)
    try:
        assert Submitter(context).submit("double", tasks.double, [21]).result(60) == [42]
        jvm = int((state / "run" / "jvm.pid").read_text())
        daemon = next(pid for pid in _children(jvm) if b"pgsub.spark.daemon" in _proc(pid, "cmdline"))
        before = _children(daemon)
        folder = Path(context.getConf().get("spark.python.unix.domain.socket.dir"))
        sockets = [path for path in folder.iterdir() if path.is_socket()]
        assert sockets and _mode(folder) == 0o700 and folder.owner() == state.owner()
        assert not {*_ports(daemon), *(port for pid in before for port in _ports(pid))}
        for _ in range(5 if os.geteuid() == 0 else 0):
            assert [_refused_to_nobody(path) for path in sockets] == [errno.EACCES] * len(sockets)
        assert _children(daemon) == before
    finally:
        close_context(context)
        left = [*_scratch(state), *(path for path in [folder] if path.exists())]
        shutil.rmtree(state.parent)
    assert left == []


def test_no_native_code_is_loaded_from_a_folder_in_which_others_write(opened, state_dir):
    """Spark's libraries unpack it among the temporary files, under names that others know."""
    context = opened()
    [scratch] = _scratch(state_dir)
    assert context._jvm.java.lang.System.getProperty("java.io.tmpdir") == str(scratch)
    assert Submitter(context).submit("double", tasks.double, [21]).result(60) == [42]
    maps = (Path("/proc") / (state_dir / "run" / "jvm.pid").read_text().strip() / "maps").read_text()
    unpacked = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "lz4" in line}
    assert unpacked and all(Path(name).is_relative_to(scratch) for name in unpacked), unpacked


#: What somebody says first who has no secret: nothing, a wrong one, none, another protocol, a frame of Spark's own.
_STRANGERS = (b"", b"A\nwrong\n", b"A\n\n", b"GET / HTTP/1.0\r\n\r\n", b"\0\0\0\x15" + bytes(17))


@pytest.mark.long
def test_whoever_reaches_a_port_of_the_java_process_is_answered_nothing_without_its_secret(opened, state_dir):
    context = opened()
    call = b"c\nz:java.lang.System\ngetProperty\nsjava.version\ne\n"
    gateway = context._gateway.gateway_parameters
    version = context._jvm.java.lang.System.getProperty("java.version").encode()
    ports = _ports(int((state_dir / "run" / "jvm.pid").read_text()))
    assert {address.partition(":")[0] for address in ports} == {"0000000000000000FFFF00000100007F"}  # 127.0.0.1
    numbers = {int(address.partition(":")[2], 16) for address in ports}
    assert gateway.port in numbers and len(numbers) == 3  # the others are the driver's and the block manager's
    assert version in _answer(gateway.port, b"A\n" + gateway.auth_token.encode() + b"\n" + call)
    for first in _STRANGERS:
        refused = _answer(gateway.port, first + call)
        assert refused[:2] in (b"", b"!x", b"!z") and b"\n!" not in refused and version not in refused  # !y: done
        assert [_answer(number, first + call) for number in numbers - {gateway.port}] == [b""] * 2
    assert Submitter(context).submit("double", tasks.double, [4]).result(60) == [8]


def _answer(port: int, sent: bytes) -> bytes:
    """What is answered until the connection is closed, or nothing comes for a second."""
    with socket.create_connection(("127.0.0.1", port), timeout=1) as asking:
        answer = b""
        with suppress(OSError):
            asking.sendall(sent)
            while more := asking.recv(4096):
                answer += more
        return answer


def _proc(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


def _children(pid: int) -> set[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return {int(line.split()[0]) for line in listed.splitlines() if int(line.split()[1]) == pid}


def _ports(pid: int) -> set[str]:
    """TCP ports at which a process listens."""
    held = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in _proc(pid, f"net/{name}").decode().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held}


def _refused_to_nobody(path: Path) -> int:
    """The errno with which another user is refused; 0 if it is not."""
    child = os.fork()  # that user need not be able to run this interpreter
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        os._exit(socket.socket(socket.AF_UNIX).connect_ex(str(path)))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.long
def test_whatever_the_user_set_wins_wherever_he_set_it(opened, tmp_path, monkeypatch):
    lines = ["spark.master local[5]", "spark.scheduler.mode=FIFO", "# spark.ui.enabled true", "spark.app.name: mine"]
    (tmp_path / "spark-defaults.conf").write_text("\n".join(lines))
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--conf spark.driver.host=localhost --driver-memory 640m pyspark-shell")
    context = opened(conf={"spark.driver.extraJavaOptions": "-XX:+UseParallelGC -Dmine=1", "spark.speculation": "true"})
    conf = dict(context.getConf().getAll())
    assert (context.master, context.appName) == ("local[5]", "mine")
    assert (conf["spark.scheduler.mode"], conf["spark.driver.host"]) == ("FIFO", "localhost")
    assert (conf["spark.driver.memory"], conf["spark.speculation"]) == ("640m", "true")
    assert context._jvm.java.lang.System.getProperty("mine") == "1"
    assert settings.user_settings({"spark.master": "local[7]"}, tmp_path)["spark.master"] == "local[7]"


@pytest.mark.long
def test_a_session_of_spark_submit_is_joined(tmp_path, state_dir):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, pathlib; from pgsub.spark.session import open_context, close_context\n"
        "from pgsub.spark.jobs import Submitter\n"
        "context = open_context(2, pathlib.Path(sys.argv[1]))\n"
        "print(context.master, Submitter(context).submit('abs', abs, [-7]).result(60))\n"
        "close_context(context)\n"
    )
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    lean = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "SPARK_SUBMIT_OPTS": lean}
    command = ["bash", str(submit), "--master", "local[9]", str(program), str(state_dir)]
    done = subprocess.run(command, env=_with_java(environment, tmp_path), capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["local[9] [7]"], done.stderr


def _with_java(environment, cache):
    from pgsub.spark.jvm.java import find_java

    home = find_java(cache).home
    return {**environment, "JAVA_HOME": str(home)} if home else environment


@pytest.mark.long
def test_nothing_reaches_the_terminal_not_even_when_the_java_process_is_killed(tmp_path, state_dir):
    program = (
        "import os, pathlib, signal, sys; from pgsub.spark.session import open_context, close_context\n"
        "from pgsub.spark.jobs import Submitter, WorkerDied; from spark import task_functions as tasks\n"
        "state = pathlib.Path(sys.argv[1]); context = open_context(2, state)\n"
        "submitter = Submitter(context); submitter.submit('worker', tasks.worker, [0]).result(60)\n"
        "job = submitter.submit('long', tasks.interval, [60.0])\n"
        "os.kill(int((state / 'run' / 'jvm.pid').read_text()), signal.SIGKILL)\n"
        "try: job.result(60)\n"
        "except WorkerDied: close_context(context)\n"
        "import logging; assert not logging.getLogger().handlers\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(tasks.__file__).parents[1]}"}
    command = [sys.executable, "-c", program, str(state_dir)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "a task that prints" in (state_dir / "log" / "spark.log").read_text()


@pytest.mark.long
def test_what_a_start_that_is_killed_leaves_is_in_the_state_folder_and_goes_with_a_later_start(
    tmp_path, state_dir, opened
):
    """Not with one at once: a JVM that is still starting would find nowhere to write, and stay for ever."""
    program = "import pathlib, sys; from pgsub.spark.session import open_context; "
    program += "open_context(2, pathlib.Path(sys.argv[1]))"
    temporary, run = tmp_path / "temporary", state_dir / "run"
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    starting = subprocess.Popen([sys.executable, "-c", program, str(state_dir)], env=environment)
    [killed] = until(lambda: _machines(state_dir))  # it is to write port and secret of the gateway there
    starting.kill()
    starting.wait()
    assert list(temporary.iterdir()) == []
    [left] = run.glob("gateway.*")
    assert left.stat().st_mode & 0o777 == 0o700
    opened()
    until(lambda: killed not in _machines(state_dir))
    os.utime(left, (0, 0))
    folders.remove_scratch(folders.scratch_folder(run))
    assert not left.exists()


def _machines(state_dir):
    """JVMs of a state folder, by their command lines."""
    wanted, found = f"-Dlog4j2.configurationFile={(state_dir / 'run' / 'log4j2.properties').as_uri()}".encode(), []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            found += [place.parent.name] if wanted in place.read_bytes().split(b"\0") else []
    return found


@only_thorough
def test_a_module_in_the_current_folder_does_not_shadow_the_library_in_workers(opened, tmp_path, monkeypatch):
    (tmp_path / "socket.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    assert Submitter(opened()).submit("double", tasks.double, [4]).result(60) == [8]


@pytest.mark.parametrize(
    ("master", "slots"),
    [("local", 1), ("local[3]", 3), ("local[*]", os.cpu_count()), ("local[4, 2]", 4), ("local-cluster[2,3,512]", 6)],
)
def test_slots_of_a_local_master_are_counted(master, slots):
    assert settings.local_slots(master) == slots
    assert settings.local_slots("spark://host:7077") is None


def test_too_few_slots_are_refused_before_anything_starts(opened, state_dir):
    with pytest.raises(StateForbids, match=r'Spark master "local\[2\]" has 2 task slots, but 3 are needed'):
        opened(master="local[2]", workers=3)
    with pytest.raises(StateForbids, match="has 2 task slots"):
        opened(master="local[4]", workers=3, conf={"spark.task.cpus": "2"})
    with pytest.raises(StateForbids, match="has 2 task slots") as raised:
        opened(master="spark://127.0.0.1:7077", workers=3, conf={"spark.cores.max": "5", "spark.task.cpus": "2"})
    assert raised.value.hint.splitlines()[-1] == "--conf spark.cores.max=6"
    assert list(state_dir.iterdir()) == []


def test_another_spark_in_spark_home_is_refused(tmp_path, monkeypatch, opened):
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "spark-core_2.13-3.5.1.jar").touch()
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    with pytest.raises(StateForbids, match=r"SPARK_HOME holds Spark 3\.5\.1, but the Python package pyspark is"):
        opened()


@only_thorough
def test_a_start_with_the_archive_maps_it(opened, state_dir, capsys):
    """The archive of this machine is made here if it is missing; the time to a first result is shown."""
    made = [sys.executable, "-m", training.__name__, str(cache_folder(state_dir / "cache"))]
    assert subprocess.run(made, cwd=ROOT, check=False).returncode == 0
    began = time.monotonic()
    context = opened()
    assert Submitter(context).submit("double", tasks.double, [1]).result(60) == [2]
    with capsys.disabled():
        print(f" [first job after {time.monotonic() - began:.1f} s] ", end="")
    arguments = context._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments()
    [archive] = [text.partition("=")[2] for text in arguments if text.startswith("-XX:SharedArchiveFile=")]
    assert Path(archive).name.startswith("spark-")
    maps = Path(f"/proc/{context._gateway.proc.pid}/maps")
    assert not maps.exists() or archive in maps.read_text()


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777
