"""The user's settings for Spark, read before its JVM starts, and pgsub's defaults.

Spark's order of precedence is kept (SparkSubmitArguments.scala): settings made in code, submit arguments, a properties
file or ``spark-defaults.conf``, environment variables. pgsub's defaults come last.
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

#: Minimum slots of a local master. They may exceed the number of cores, because tasks wait for IO.
_LEAST_LOCAL_SLOTS = 16

_OPTIONS = {
    "--master": "spark.master",
    "--name": "spark.app.name",
    "--driver-memory": "spark.driver.memory",
    "--driver-java-options": "spark.driver.extraJavaOptions",
}

#: Defaults for any master.
_DEFAULTS = {
    "spark.ui.showConsoleProgress": "false",
    "spark.eventLog.enabled": "false",
    "spark.ui.killEnabled": "false",  # anyone who reaches the page, which has no password, could end apply
    "spark.ui.liveUpdate.period": "0",  # otherwise a running task may be shown as waiting for 10 s
    "spark.speculation": "false",  # a second attempt of a writing task would be fenced off
    "spark.task.maxFailures": "1",  # the launcher retries with a new epoch
    "spark.scheduler.mode": "FAIR",  # copies do not wait for tasks of other jobs
}

#: Defaults for a master on this machine.
_LOCAL_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def user_settings(conf: Mapping[str, str], spark_home: Path) -> dict[str, str]:
    """Return the user's Spark settings by name, as far as they are known without the JVM.

    :param conf: settings of pgsub's command line.
    :param spark_home: folder of ``conf/spark-defaults.conf``, unless ``SPARK_CONF_DIR`` names another.
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
    """Read a Java properties file, without the rare continuation lines."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (re.split(r"\s*[=:\s]\s*", line.strip(), maxsplit=1) for line in lines if not line.lstrip().startswith("#"))
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def default_master(workers: int) -> str:
    """Return the master if the user names none.

    :param workers: number of tasks that run at once.
    """
    return f"local[{max(_LEAST_LOCAL_SLOTS, workers + 2)}]"


def is_local(master: str) -> bool:
    """Return whether tasks run on this machine."""
    return master.startswith("local")


def defaults(master: str, scratch: Path, own_spark: bool) -> dict[str, str]:
    """Return pgsub's own settings, which apply where the user made none.

    :param scratch: private folder for Spark's scratch files.
    :param own_spark: whether Spark belongs to the installed pyspark package.
    """
    if not is_local(master):
        return dict(_DEFAULTS)
    chosen = {**_DEFAULTS, **_LOCAL_DEFAULTS, "spark.local.dir": str(scratch)}
    if own_spark:
        chosen["spark.python.daemon.module"] = "pgsub.spark.daemon"
    if master.startswith("local-cluster"):  # Spark makes the secret itself (SecurityManager.scala)
        chosen["spark.executor.extraJavaOptions"] = shlex.quote(f"-Djava.io.tmpdir={scratch}")
    else:
        chosen["spark.authenticate"] = "true"  # other users of this machine can reach the loopback, too
    return chosen


def private_sockets(folder: Path) -> dict[str, str]:
    """Return settings that keep other users from the python daemon, which forks for every connection.

    :param folder: a private folder with a path short enough for a socket's address.
    """
    name = "spark.python.unix.domain.socket"
    return {f"{name}.enabled": "true", f"{name}.dir": str(folder)}


def local_slots(master: str) -> int | None:
    """Return how many tasks a local master runs at once, None for a cluster.

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
    """Check slots that are known before the start, like :func:`check_slots`.

    They are those of a local master, or those to which ``spark.cores.max`` limits an application of a standalone
    cluster, where waiting for more executors would be useless.

    :param setting: returns a setting, or the given default.
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
    """Refuse a master on which long tasks would block the others.

    :param slots: number of tasks that it runs at once.
    :param workers: number of tasks that pgsub runs at once.
    :param hint: how to add slots.
    :raises StateForbids: there are fewer slots than workers.
    """
    if slots < workers:
        raise StateForbids(
            f'Spark master "{master}" has {counted(slots, "task slot")}, but {workers} are needed',
            detail="A worker occupies a slot for as long as it runs, so with too few of them others never begin.",
            hint=hint,
        )


def more_cores(master: str, cores: int) -> str:
    """Return the hint with the option for this number of cores."""
    if is_local(master):
        option = f"--master '{default_master(cores)}'"
    elif master.startswith("spark://"):
        option = f"--conf spark.cores.max={cores}"
    else:
        option = f"--conf spark.executor.instances={cores}"  # with one core each, the default of YARN and Kubernetes
    return f"Give it more cores, or fewer subscriptions to one launcher.\n{option}"


def check_version(spark_home: Path, pyspark_version: str) -> None:
    """Refuse a SPARK_HOME of another release than the Python package.

    :raises StateForbids: the first two version numbers differ. Patch level and suffix may differ.
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

    :raises UsageError: the value is not a port number.
    """
    if not re.fullmatch(r"\d{1,5}", text) or int(text) > 0xFFFF:
        raise UsageError(f'invalid value for spark.pgsub.heartbeat.port: "{text}"')
    return int(text)


def own_address(master: str) -> str:
    """Return this machine's address on the route to a master, without sending anything.

    A machine's own name often resolves to 127.0.0.1, which executors on other machines cannot reach.
    """
    if own := os.environ.get("SPARK_LOCAL_IP"):
        return own
    found = re.match(r"spark://(?:\[([0-9a-fA-F:]+)\]|([^:,/]+))", master)
    host = (found[1] or found[2]) if found else "192.0.2.1"  # RFC 5737: the address uses the default route
    for name in (host, socket.gethostname()):
        with contextlib.suppress(OSError):
            found_there = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
            # IPv4 first, like Spark itself.
            for family, kind, _, _, place in sorted(found_there, key=lambda one: one[0] != socket.AF_INET):
                with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                    probe.connect(place)
                    return str(probe.getsockname()[0])
    return "127.0.0.1"  # there is no network
