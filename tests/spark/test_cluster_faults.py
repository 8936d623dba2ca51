"""What goes wrong on a standalone cluster: deployments, a machine that hangs, and each command of docs/spark.md."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fix_faults import Site, until
from fix_spark import Cluster, python
from spark.test_cluster import begins, shown
from thorough import only_thorough

from pgsub.spark.gateway import spark_home

pytestmark = [only_thorough, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
BOUND = ("--until-caught-up", "--timeout", "150s")


def test_what_keeps_tasks_from_running_ends_a_run_with_13_and_the_line_that_matters(
    site: Callable[[], Site], cluster: Cluster
) -> None:
    case = site()
    case.make("audit1").rest()
    case.end(case.create("--no-wait"))
    master = ("--master", cluster.url, "--conf", "spark.executor.memory=512m")
    for settings, said in (
        (["spark.pyspark.python=/nowhere/python"], '"/nowhere/python" cannot be run on the executors'),
        ([f"spark.pyspark.python={python()}"], 'the executors cannot import "pgsub"'),
    ):
        words = [word for setting in settings for word in ("--conf", setting)]
        case.end(case.run(*master, *words, *BOUND), 13)
        assert said in case.said() and "python -m pgsub.spark.archive" in case.said().replace(sys.executable, "python")
    case.end(case.run("--master", "sc://127.0.0.1", *BOUND), 13)
    assert "Spark Connect cannot run the workers" in case.said()
    small = [*cluster.conf(spark_cores_max="1"), "--conf", "spark.scheduler.maxRegisteredResourcesWaitingTime=5s"]
    case.end(case.run(*small, *BOUND), 3)
    assert "waiting for executors: 2 task slots are needed, 1 are registered" in case.said()
    case.end(case.run(*cluster.conf(spark_cores_max="2"), *BOUND))
    case.check()


def test_a_machine_that_hangs_is_taken_over_by_another(site: Callable[[], Site], cluster: Cluster) -> None:
    case = site()
    writer = case.make_ready("audit1", "keyed1")
    process = case.run(*cluster.conf(), "--timeout", "10m", PGSUB_WORKER_TIMEOUT="10")
    writer.some(20)
    machine, epoch = cluster.machine_of(case.worker_pid()), case.epoch()
    cluster.signal(machine, signal.SIGSTOP)
    until(lambda: shown(case)["state"] in ("waiting", "error"), case.said)
    begins(case, "a machine hangs", epoch)
    writer.some(20)
    cluster.signal(machine, signal.SIGCONT)
    case.wait_equal()
    case.terminate(process)
    case.check()


def test_each_command_of_the_standalone_page_works_as_it_stands(
    site: Callable[[], Site], cluster: Cluster, tmp_path: Path
) -> None:
    case = site()
    writer = case.make("audit1", "keyed1")
    case.end(case.create("--no-wait"))
    page = (ROOT / "docs" / "spark.md").read_text()
    commands = re.findall(r"```sh\n(.*?)```", page.partition("## Standalone")[2].partition("## Settings")[0], re.DOTALL)
    assert len(commands) == 3
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{spark_home() / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PGSUB_STATE_DIR": str(case.state),
    }
    environment.pop("PGSUB_FAILPOINTS", None)
    for number, command in enumerate(commands):
        text = command.replace("spark://head:7077", cluster.url)
        if number == 0:
            text = text.replace("pgsub_env.tar.gz", f"pgsub_env.tar.gz --python {python()}")
        else:
            text = f"{text.rstrip()} {' '.join(BOUND)}"
        done = subprocess.run(
            ["bash", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        writer.some(10)
    writer.rest()
    case.end(case.run(*cluster.conf(), *BOUND))
    case.check()
