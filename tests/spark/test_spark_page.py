"""The commands of the page on running on Spark, as a user types them, and what they print."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import patience
import pytest
import task_pages
from fix_faults import until
from fix_servers import Database, Pair
from fix_spark import WAITING, Cluster, python
from psycopg.conninfo import conninfo_to_dict
from thorough import only_thorough

from pgsub.spark.jvm.java import find_java
from pgsub.spark.jvm.process import spark_home

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
_PAGE = ROOT / "docs" / "spark.md"
#: Kinds of blocks that are run.
_RUN = {"console", "properties", "python"}
#: Service files of the executors, and of the user who runs the workers.
_SERVICES = ("pg_service.conf", ".pg_service.conf")
#: What keeps executors and masters small; a user's cluster has settings of its own.
_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_LEAN = f"""spark.executor.memory 512m
spark.executor.extraJavaOptions {_JVM}
spark.cores.max 2
spark.executor.cores 2
{WAITING} 100s
"""


class User:
    """Somebody at the launcher's machine, who has pgsub and Spark on PATH and types what the page shows.

    :ivar launcher: the command that serves the subscriptions, until the next one that does.
    :ivar driver: what the master calls the driver that was submitted last.
    """

    def __init__(self, folder: Path, cluster: Cluster, services: dict[str, Database]) -> None:
        self.folder = folder
        self._cluster = cluster
        self.state = folder / "state"
        self.launcher: subprocess.Popen[bytes] | None = None
        self.driver: str | None = None
        self._output = folder / "output"
        self.defaults("")
        text = "".join(
            f"[{name}]\n" + "".join(f"{key}={value}\n" for key, value in conninfo_to_dict(database.conninfo).items())
            for name, database in services.items()
        )
        for file in (folder / ".pg_service.conf", *(cluster.folder / name for name in _SERVICES)):
            file.write_text(text)
            file.chmod(0o600)
        for name in _SERVICES:
            cluster.give(cluster.folder / name)

    def defaults(self, text: str) -> None:
        """Write spark-defaults.conf."""
        (self.folder / "spark-defaults.conf").write_text(_LEAN + self.here(text))

    def here(self, text: str) -> str:
        """The page's words with the places of this machine; the interpreter is one that the cluster's user may run."""
        text = text.replace("pgsub.spark.archive", f"pgsub.spark.archive --python {python()}")
        places = {
            "spark://head:7077": self._cluster.url,
            "/etc/pgsub": str(self._cluster.folder),
            "/opt/pgsub": str(self._cluster.folder / "opt"),
            "/var/tmp/pgsub": str(self._cluster.folder / "launcher"),
            "driver-...": self.driver or "",
        }
        for place, here in places.items():
            text = text.replace(place, here)
        return text

    def _environment(self) -> dict[str, str]:
        removed = ("PG", "SPARK_", "PYSPARK_", "PYTEST_", "PYTHON")
        home = find_java(self.folder).home
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(removed)},
            **({"JAVA_HOME": str(home)} if home else {}),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.folder),
            "PGSUB_STATE_DIR": str(self.state),
            "SPARK_CONF_DIR": str(self.folder),
            "SPARK_SUBMIT_OPTS": _JVM,
            "SPARK_HOME": str(spark_home()),
        }

    def types(self, line: str, shown: list[str], code: int = 0) -> None:
        """Run a command; one that serves subscriptions goes on once it has printed what the page shows."""
        if line.endswith(" run"):
            self.ends()
            self.serves(line, shown)
            return
        words = ["bash", "-c", self.here(line)]
        ended = subprocess.run(
            words, cwd=self.folder, env=self._environment(), capture_output=True, text=True, timeout=patience.SECONDS
        )
        assert ended.returncode == code, f"{line}\n{ended.stdout}{ended.stderr}"
        task_pages.compare(line, shown, ended.stdout + ended.stderr)
        if found := re.search(r"submitted as (driver-\S+)", ended.stderr):
            self.driver = found[1]

    def serves(self, line: str, shown: list[str]) -> None:
        """Run a command that serves subscriptions until it has printed something and status shows that it does."""
        with self._output.open("wb") as output:
            self.launcher = subprocess.Popen(
                ["bash", "-c", f"exec {self.here(line)}"],
                cwd=self.folder,
                env=self._environment(),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        until(lambda: _has(shown, self.said()), self.said)
        until(lambda: "running" in self.status(), self.status)

    def said(self) -> str:
        """What the launcher has printed."""
        return self._output.read_text(errors="replace")

    def status(self) -> str:
        """``pgsub status``."""
        words = [sys.executable, "-m", "pgsub", "status"]
        return subprocess.run(words, env=self._environment(), capture_output=True, text=True, check=False).stdout

    def launcher_pid(self) -> int:
        """Process id of the launcher, by its lock file."""
        found = re.search(r"pid (\d+) on host ", (self.state / "launcher.lock").read_text())
        assert found is not None
        return int(found[1])

    def ends(self) -> None:
        """End the launcher in order, as the page says."""
        launcher, self.launcher = self.launcher, None
        if launcher is not None:
            os.kill(self.launcher_pid(), signal.SIGTERM)
            assert launcher.wait(patience.SECONDS) == 0, self.said()

    def reads(self, begin: str, end: str) -> None:
        """Type what the page shows between two headings, in its order."""
        for block in re.finditer(r"^```(console|properties)\n(.*?)^```$", part(begin, end), re.MULTILINE | re.DOTALL):
            if block[1] == "properties":
                self.defaults(block[2])
                continue
            for line, shown in task_pages.parts(block[2]):
                self.types(line, shown)


def part(begin: str, end: str) -> str:
    """The page between two headings."""
    found = re.search(rf"^{begin}$(.*?)^{end}$", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    assert set(re.findall(r"^```(.+)$", found[1], re.MULTILINE)) <= _RUN, "a block that no test runs"
    return found[1]


def _has(shown: list[str], said: str) -> bool:
    try:
        task_pages.compare("", shown, said)
    except AssertionError:
        return False
    return True


@pytest.fixture
def user(tmp_path: Path, cluster: Cluster, own_pair: Callable[..., Pair]) -> Iterator[tuple[User, Pair]]:
    """A user of servers that want a password."""
    pair = own_pair(password="of the servers")
    for database in (pair.pubdb, pair.subdb):
        database.execute("CREATE TABLE orders (id int PRIMARY KEY, item text)")
    pair.pubdb.execute("INSERT INTO orders SELECT g, 'tea' FROM generate_series(1, 1000) g")
    pair.pubdb.execute("CREATE PUBLICATION sales FOR TABLE orders")
    made = User(tmp_path, cluster, {"shop": pair.pubdb, "copy": pair.subdb})
    yield made, pair
    if made.launcher is not None:
        os.killpg(made.launcher.pid, signal.SIGKILL)
        made.launcher.wait()


@pytest.mark.timeout(600)
def test_the_commands_of_the_spark_page_do_what_it_shows_and_a_launcher_never_outlives_its_spark_submit(
    user: tuple[User, Pair],
) -> None:
    typist, pair = user
    typist.reads("## Standalone", "### spark-submit in cluster mode")
    pair.pubdb.execute("INSERT INTO orders VALUES (0, 'coffee')")
    pair.subdb.wait("SELECT count(*) FROM orders", value=1001)
    submitted, launcher = typist.launcher, typist.launcher_pid()
    assert submitted is not None and submitted.pid != launcher
    submitted.kill()
    submitted.wait()
    typist.launcher = None
    until(lambda: not Path(f"/proc/{launcher}").exists(), typist.said)


@only_thorough
@pytest.mark.timeout(900)
def test_a_launcher_in_cluster_mode_is_started_again_by_the_master_and_gone_when_its_driver_is_killed(
    user: tuple[User, Pair], cluster: Cluster
) -> None:
    typist, pair = user
    typist.types("pgsub create sales --connection service=shop --target service=copy --publication sales --no-wait", [])
    opt = cluster.folder / "opt"
    opt.mkdir()
    blocks = re.findall(
        r"^```console\n(.*?)^```$", part("### spark-submit in cluster mode", "## Settings"), re.M | re.S
    )
    [archive, submit, kill] = [command for block in blocks for command in task_pages.parts(block)]
    typist.types(*archive)
    with tarfile.open(opt / "pgsub_env.tar.gz") as tar:
        tar.extractall(opt, filter="fully_trusted")
    shutil.copy(ROOT / "examples" / "submit.py", opt)
    typist.types(*submit)
    pair.subdb.wait("SELECT count(*) FROM orders", value=1000)

    pair.subdb.wait("SELECT count(*) FROM pgsub.control WHERE worker = 0", value=1)
    epoch = pair.subdb.value("SELECT epoch FROM pgsub.control WHERE worker = 0")
    for pid in cluster.drivers():
        os.kill(pid, signal.SIGKILL)
    pair.subdb.wait("SELECT max(epoch) > %s FROM pgsub.control WHERE worker = 0", epoch)
    pair.pubdb.execute("INSERT INTO orders VALUES (0, 'coffee')")
    pair.subdb.wait("SELECT count(*) FROM orders", value=1001)

    typist.types(*kill)
    until(lambda: not cluster.launchers(), lambda: f"{cluster.launchers()}")


@only_thorough
@pytest.mark.timeout(600)
def test_the_example_for_spark_submit_serves_and_services_that_executors_do_not_have_are_named(
    user: tuple[User, Pair], cluster: Cluster
) -> None:
    typist, pair = user
    typist.types("python -m pgsub.spark.archive pgsub_env.tar.gz", [])
    create = "pgsub create sales --connection service=shop --target service=copy --publication sales"
    words = "--conf spark.archives=pgsub_env.tar.gz#env --conf spark.pyspark.python=./env/bin/python"
    nowhere = "--conf spark.executorEnv.PGSERVICEFILE=/nowhere"
    named = ['pgsub: error: service "copy" of the target is not defined on the executors']
    typist.types(f"{create} --master {cluster.url} {words} {nowhere}", named, 13)
    typist.defaults("spark.executorEnv.PGSERVICEFILE  /etc/pgsub/pg_service.conf\n")
    script = ROOT / "examples" / "spark-submit.sh"
    typist.serves(f"env MASTER={cluster.url} {script}", ['... LOG:  serving subscription "sales"'])
    pair.subdb.wait("SELECT count(*) FROM orders", value=1000)
    typist.ends()


@only_thorough
def test_the_program_for_a_notebook_runs_in_a_session_of_a_cluster_and_leaves_it_open(user: tuple[User, Pair]) -> None:
    typist, pair = user
    typist.types("pgsub create sales --connection service=shop --target service=copy --publication sales --no-wait", [])
    code = part("## In a notebook or a job", "```").partition("```python\n")[2]
    program = (
        "from pyspark.sql import SparkSession\nspark = SparkSession.builder.getOrCreate()\n"
        f"for _ in range(2):\n    exec({code!r})\n    print('code', code)\n"
        "print('rows', spark.sparkContext.parallelize(range(7), 2).count())"
    )
    defaults = re.search(r"^```properties\n(.*?)^```$", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert defaults is not None
    typist.defaults(defaults[1])
    typist.types("python -m pgsub.spark.archive pgsub_env.tar.gz", [])
    (typist.folder / "program.py").write_text(program)
    typist.types("python program.py", ["code 13", "code 13", "rows 7"])  # the executors' interpreter has no pgsub
    typist.types("PYSPARK_PYTHON=./env/bin/python python program.py", ["code 0", "code 0", "rows 7"])
    assert pair.subdb.value("SELECT count(*) FROM orders") == 1000
