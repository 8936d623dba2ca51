"""Spark's JVM: starts it, separates it from the terminal, and makes pyspark forget it.

The JVM and its python workers write to ``log/spark.log`` of the state folder. The JVM ends with this process, because
it reads the end of its standard input (PythonGatewayServer.scala).
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import py4j.java_gateway
import pyspark
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.find_spark_home import _find_spark_home
from pyspark.java_gateway import launch_gateway

from pgsub.common.machine.interpreter import importing_environment
from pgsub.spark import deployment, settings
from pgsub.spark.jvm import flags as jvm_flags
from pgsub.spark.jvm import folders
from pgsub.spark.jvm import start as jvm_start
from pgsub.spark.jvm.java import Java, write_atomically

_HEAP = "512m"
_LOG_LIMIT = 10 * 2**20

#: The appender writes to standard error, which is the log file.
_LOG4J = """rootLogger.level = warn
rootLogger.appenderRef.log.ref = log
appender.log.type = Console
appender.log.name = log
appender.log.target = SYSTEM_ERR
appender.log.layout.type = PatternLayout
appender.log.layout.pattern = %d{yyyy-MM-dd HH:mm:ss.SSS} [%pid] %p %c{1}: %m%n%ex
"""


def spark_home() -> Path:
    """Return the folder of the Spark that pyspark uses: SPARK_HOME, else its own.

    :raises StateForbids: SPARK_HOME contains another version than the package.
    """
    home = Path(_find_spark_home())
    if "SPARK_HOME" in os.environ:
        settings.check_version(home, pyspark.__version__)
    return home


def start_jvm(
    java: Java, submitted: Mapping[str, str], master: str, state_dir: Path, flags: list[str], launcher_flags: list[str]
) -> Any:
    """Start spark-submit's JVM.

    :param submitted: settings for its command line, which every user of the machine can read.
    :param master: used if no setting names another.
    :param launcher_flags: flags of the JVM that composes the command line.
    :return: pyspark's gateway.
    :raises SparkUnusable: the JVM does not start. The detail is the end of its log.
    """
    log = log_file(state_dir)
    offset = log.stat().st_size
    arguments = SparkConf(loadDefaults=False).setAll(list(submitted.items()))
    with log.open("ab") as stream, environ(_environment(java, master, state_dir / "run", flags, launcher_flags)):
        # A session of its own, because this process handles the signals of the terminal or shell to its process group.
        options: dict[str, Any] = {"stdout": stream, "stderr": stream, "umask": 0o077, "start_new_session": True}
        try:
            with folders.connection_folder(state_dir / "run"), jvm_start.bounded():
                return launch_gateway(arguments, options)
        except (PySparkException, Py4JError, OSError) as error:
            text = log.read_bytes()[offset:].decode(errors="replace")[-2000:].strip()
            raise deployment.not_started("the Java process of Spark did not start", text or str(error)) from None


def reason(error: Exception) -> str:
    """Return why a call to the JVM failed, in one line."""
    text = error.java_exception.toString() if isinstance(error, Py4JJavaError) else str(error)
    return str(text).partition("\n")[0]


def log_file(state_dir: Path) -> Path:
    """Make the log with mode 0600 and its private folders."""
    for name in ("log", "run"):
        (state_dir / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    configuration = state_dir / "run" / "log4j2.properties"
    if not configuration.exists() or configuration.read_text() != _LOG4J:  # a full disk has no space to rewrite it
        write_atomically(configuration, _LOG4J)
    rotate(state_dir)
    log = state_dir / "log" / "spark.log"
    os.close(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    return log


def rotate(state_dir: Path) -> None:
    """Limit the size of the log, even while others append to it."""
    log = state_dir / "log" / "spark.log"
    with suppress(OSError):
        if log.stat().st_size > _LOG_LIMIT:
            with suppress(OSError):  # without space for a copy, truncating is even more urgent
                shutil.copyfile(log, log.with_suffix(".log.1"))
                log.with_suffix(".log.1").chmod(0o600)
            os.truncate(log, 0)


def _environment(
    java: Java, master: str, run: Path, flags: list[str], launcher_flags: list[str]
) -> dict[str, str | None]:
    """Return variables of the JVM and its python workers. Any setting overrides MASTER and SPARK_DRIVER_MEMORY."""
    logging_option = f"-Dlog4j2.configurationFile={(run / 'log4j2.properties').absolute().as_uri()}"
    given = os.environ.get("SPARK_SUBMIT_OPTS", "")
    wanted: dict[str, str | None] = {
        "JAVA_HOME": str(java.home) if java.home else None,
        "SPARK_SUBMIT_OPTS": " ".join([logging_option, *flags, *jvm_flags.user_flags(run), given]).strip(),
        "SPARK_LAUNCHER_OPTS": os.environ.get("SPARK_LAUNCHER_OPTS", " ".join(launcher_flags)),
        "SPARK_DRIVER_MEMORY": os.environ.get("SPARK_DRIVER_MEMORY", _HEAP),
        "MASTER": os.environ.get("MASTER", master),
    }
    if settings.is_local(master):
        wanted["SPARK_LOCAL_IP"] = os.environ.get("SPARK_LOCAL_IP", "127.0.0.1")
        wanted.update(importing_environment())
    return wanted


def log_in(jvm: Any) -> None:
    """Log a user without an entry in the user database in to Hadoop, before that asks the system for the name."""
    name = jvm_flags.user_name()
    # guard: Spark starts for a user without an entry in the user database
    if name is not None and jvm.proc is not None:
        hadoop = jvm.jvm.org.apache.hadoop.security.UserGroupInformation
        hadoop.setLoginUser(hadoop.createRemoteUser(name))


def silence_py4j() -> None:
    """Silence py4j's log records, because a dead JVM is reported by one exception.

    Some use the functions of the logging module, which log to the root logger and give it a handler that prints.
    """
    logger = logging.getLogger("py4j")
    logger.setLevel(logging.CRITICAL)
    py4j.java_gateway.logging = logger


def forget() -> None:
    """Make pyspark forget its JVM, which class attributes hold, so that the next context starts another."""
    gateway, SparkContext._gateway, SparkContext._jvm = SparkContext._gateway, None, None
    SparkContext._active_spark_context = None
    if gateway is None:
        return
    if gateway.proc is not None and gateway.proc.poll() is None:
        gateway.proc.kill()
        gateway.proc.wait()
    gateway.close(keep_callback_server=False, close_callback_server_connections=True)


@contextmanager
def environ(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables temporarily, for children. None removes a variable."""
    before = {name: os.environ.get(name) for name in changes}
    _set_environ(changes)
    try:
        yield
    finally:
        _set_environ(before)


def _set_environ(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
