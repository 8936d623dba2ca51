"""What the user set for Spark, read before its JVM runs, and pgsub's own defaults below it.

Spark's precedence is kept (SparkSubmitArguments.scala): settings made in code, then the submit arguments, then a
properties file or ``spark-defaults.conf``, then environment variables. pgsub's defaults come after all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pgsub.common.errors import StateForbids, UsageError
from pgsub.common.plural import counted

#: Tasks wait for IO, so a local master has many more slots than the machine has cores.
_LEAST_LOCAL_SLOTS = 16

_OPTIONS = {
    "--master": "spark.master",
    "--name": "spark.app.name",
    "--driver-memory": "spark.driver.memory",
    "--driver-java-options": "spark.driver.extraJavaOptions",
}

#: For any master.
_DEFAULTS = {
    "spark.ui.showConsoleProgress": "false",
    "spark.eventLog.enabled": "false",
    "spark.ui.killEnabled": "false",  # whoever reaches the page, which asks for no password, could end apply
    "spark.ui.liveUpdate.period": "0",  # else a task that runs may be shown as waiting until the next heartbeat, 10 s
    "spark.speculation": "false",  # a second attempt of a task that writes is fenced off, but wasted
    "spark.task.maxFailures": "1",  # the launcher retries, with a new epoch
    "spark.scheduler.mode": "FAIR",  # a copy does not wait for the tasks of another job
}

#: For a master on this machine.
_LOCAL_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def user_settings(conf: Mapping[str, str], spark_home: Path) -> dict[str, str]:
    """Return Spark settings that the user made, by name, as far as they can be known without the JVM.

    :param conf: of pgsub's command line.
    :param spark_home: whose ``conf/spark-defaults.conf`` counts, unless ``SPARK_CONF_DIR`` names another folder.
    """
    submitted = dict(_submit_arguments(shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))))
    defaults = Path(os.environ.get("SPARK_CONF_DIR") or spark_home / "conf") / "spark-defaults.conf"
    settings = _properties(Path(submitted.pop("", str(defaults))))
    if environment := os.environ.get("MASTER"):
        settings.setdefault("spark.master", environment)
    return {**settings, **submitted, **conf}


def _submit_arguments(arguments: list[str]) -> Iterator[tuple[str, str]]:
    for option, value in itertools.pairwise(arguments):
        if option in ("--conf", "-c") and "=" in value:
            name, _, text = value.partition("=")
            yield name, text
        elif option == "--properties-file":
            yield "", value
        elif option in _OPTIONS:
            yield _OPTIONS[option], value


def _properties(file: Path) -> dict[str, str]:
    """Read a Java properties file, without its rarely used continuation lines."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (re.split(r"\s*[=:\s]\s*", line.strip(), maxsplit=1) for line in lines if not line.lstrip().startswith("#"))
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def default_master(workers: int) -> str:
    """Return the master where the user names none.

    :param workers: tasks that run at the same time.
    """
    return f"local[{max(_LEAST_LOCAL_SLOTS, workers + 2)}]"


def is_local(master: str) -> bool:
    """Return whether the tasks run on this machine."""
    return master.startswith("local")


def defaults(master: str, run_folder: Path, own_spark: bool) -> dict[str, str]:
    """Return pgsub's own settings; each only where the user made none.

    :param run_folder: private folder for Spark's scratch files.
    :param own_spark: whether Spark is the one of the installed pyspark package.
    """
    if not is_local(master):
        return dict(_DEFAULTS)
    chosen = {**_DEFAULTS, **_LOCAL_DEFAULTS, "spark.local.dir": str(run_folder / "spark")}
    if own_spark:
        chosen["spark.python.daemon.module"] = "pgsub.spark.daemon"
    if not master.startswith("local-cluster"):  # Spark makes the secret by itself (SecurityManager.scala)
        chosen["spark.authenticate"] = "true"  # other users of this machine reach the loopback too
    return chosen


def private_sockets(folder: Path) -> dict[str, str]:
    """Return settings that keep other users from the python daemon, which forks for everyone who connects.

    :param folder: private, and with a path that is short enough for the address of a socket.
    """
    name = "spark.python.unix.domain.socket"
    return {f"{name}.enabled": "true", f"{name}.dir": str(folder)}


def local_slots(master: str) -> int | None:
    """Return how many tasks a local master runs at once; None for a cluster.

    :param master: ``local``, ``local[N]``, ``local[*]``, ``local[N,F]`` or ``local-cluster[N,cores,memory]``
        (SparkContext.scala, SparkMasterRegex).
    """
    if master == "local":
        return 1
    if found := re.fullmatch(r"local\[(\d+|\*)\s*(?:,\s*\d+\s*)?\]", master):
        return (os.cpu_count() or 1) if found[1] == "*" else int(found[1])
    if found := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", master):
        return int(found[1]) * int(found[2])
    return None


def check_known_slots(setting: Callable[[str, str], str | None], workers: int, master: str) -> None:
    """Check the slots that are known before anything runs, as :func:`check_slots`.

    They are those of a local master, and those to which ``spark.cores.max`` limits an application of a standalone
    cluster: waiting for more executors would be in vain there.

    :param setting: returns a setting, or the default that it is given.
    """
    slots = local_slots(master)
    if slots is None and master.startswith("spark://"):
        limit = setting("spark.cores.max", "")
        slots = _number("spark.cores.max", limit) if limit else None
    if slots is not None:
        cpus = _number("spark.task.cpus", setting("spark.task.cpus", "1") or "1")
        check_slots(slots // cpus, workers, master, hint=more_cores(master, workers * cpus))


def _number(name: str, value: str) -> int:
    if not value.strip().isdecimal() or not int(value):
        raise UsageError(f'invalid value for {name}: "{value}"', hint="Give it a number of cores, 1 or more.")
    return int(value)


def check_slots(slots: int, workers: int, master: str, *, hint: str) -> None:
    """Refuse a master on which long tasks would starve the others.

    :param slots: tasks that it runs at once.
    :param workers: tasks that pgsub runs at once.
    :param hint: what gives it more.
    :raises StateForbids: where there are fewer slots than workers.
    """
    if slots < workers:
        raise StateForbids(
            f'Spark master "{master}" has {counted(slots, "task slot")}, but {workers} are needed',
            detail="A worker occupies a slot for as long as it runs, so with too few of them others never begin.",
            hint=hint,
        )


def more_cores(master: str, cores: int) -> str:
    """Return the hint with the option that gives as many cores."""
    if is_local(master):
        option = f"--master '{default_master(cores)}'"
    elif master.startswith("spark://"):
        option = f"--conf spark.cores.max={cores}"
    else:
        option = f"--conf spark.executor.instances={cores}"  # of one core, as YARN and Kubernetes have it
    return f"Give it more cores, or fewer subscriptions to one launcher.\n{option}"


def check_version(spark_home: Path, pyspark_version: str) -> None:
    """Refuse a SPARK_HOME of another release than the Python package.

    :raises StateForbids: where release and feature version differ; a vendor's suffix and a patch level may.
    """
    for jar in spark_home.glob("jars/spark-core_*.jar"):
        version = jar.stem.partition("-core_")[2].partition("-")[2]
        if version.split(".")[:2] != pyspark_version.split(".")[:2]:
            raise StateForbids(
                f"SPARK_HOME holds Spark {version}, but the Python package pyspark is {pyspark_version}",
                detail=f'SPARK_HOME is "{spark_home}".',
                hint="Use the Spark that came with pyspark.\nunset SPARK_HOME",
            )


def heartbeat_port(text: str) -> int:
    """Read spark.pgsub.heartbeat.port.

    :raises UsageError: it is no port.
    """
    if not re.fullmatch(r"\d{1,5}", text) or int(text) > 0xFFFF:
        raise UsageError(f'invalid value for spark.pgsub.heartbeat.port: "{text}"')
    return int(text)


def own_address(master: str) -> str:
    """Return this machine's address on the way to a master; nothing is sent to find it.

    The name of a machine often leads to 127.0.0.1 on itself, where no executor of another one arrives.
    """
    if own := os.environ.get("SPARK_LOCAL_IP"):
        return own
    found = re.match(r"spark://(?:\[([0-9a-fA-F:]+)\]|([^:,/]+))", master)
    host = (found[1] or found[2]) if found else "192.0.2.1"  # RFC 5737: the way there is the default route
    for name in (host, socket.gethostname()):
        with contextlib.suppress(OSError):
            found_there = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
            # version 4 first: Spark itself uses it
            for family, kind, _, _, place in sorted(found_there, key=lambda one: one[0] != socket.AF_INET):
                with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                    probe.connect(place)
                    return str(probe.getsockname()[0])
    return "127.0.0.1"  # there is no network
