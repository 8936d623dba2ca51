"""Spark's JVM: starts it, separates it from the terminal, and makes pyspark forget it.

The JVM and its python workers write to ``log/spark.log`` of the state folder. The JVM ends with this process, because
it reads the end of its standard input (PythonGatewayServer.scala).
"""

from __future__ import annotations

import fcntl
import logging
import os
import shlex
import shutil
import tempfile
import time
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

from pgsub.common.errors import SparkUnusable
from pgsub.common.machine.interpreter import importing_environment
from pgsub.spark import deployment, jvm_flags, jvm_start, settings
from pgsub.spark.java import Java, write_atomically

_HEAP = "512m"
_LOG_LIMIT = 10 * 2**20
#: Size in bytes of a file that tests whether there is space.
_SMALL = 4096
#: Folders that Spark makes at its start: blocks, its own files, files of its jobs, and a few more.
_FOLDERS = 8
_SOCKET_FOLDER = 103 - 42
#: Name in a scratch folder of a link to the folder of its sockets.
_LINK = "sockets"
#: Seconds after which every started JVM has written the port of its gateway.
_STARTING = 600.0
_locks: dict[Path, int] = {}  #: descriptors of locked files, by the scratch folder

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
            with _connection_folder(state_dir / "run"), jvm_start.bounded():
                return launch_gateway(arguments, options)
        except (PySparkException, Py4JError, OSError) as error:
            text = log.read_bytes()[offset:].decode(errors="replace")[-2000:].strip()
            raise deployment.not_started("the Java process of Spark did not start", text or str(error)) from None


@contextmanager
def _connection_folder(run: Path) -> Iterator[None]:
    """Make pyspark exchange port and secret of the gateway in a file of the state folder.

    The file is removed afterwards. If this process is killed before that, a later start removes it with other scratch
    files. If the state folder has no space, the file is a temporary one, because apply must start nevertheless.
    """
    folder, before = run / f"gateway.{os.getpid()}", tempfile.tempdir
    if _has_room(folder):
        tempfile.tempdir = str(folder.absolute())
    try:
        yield
    finally:
        tempfile.tempdir = before
        shutil.rmtree(folder, ignore_errors=True)


def _has_room(folder: Path) -> bool:
    """Make a folder, and return whether a small file can be written there."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            return probe.write(bytes(_SMALL)) == _SMALL
    except OSError:
        return False


def scratch_folder(run: Path) -> Path:
    """Make a private folder for the blocks and sockets of one JVM, which is locked until it is removed.

    Those of processes that were killed are removed. Others may use the same state folder, from a container, too, where
    a PID says nothing.

    :param run: the one in the state folder. If that has no space, the folder is a temporary one, because apply must
        start nevertheless.
    :raises SparkUnusable: there is no room for that, either.
    """
    try:
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned(run)
        return _made(run)
    except OSError as error:
        with suppress(OSError):
            return Path(tempfile.mkdtemp(prefix="pgsub-"))
        raise SparkUnusable(
            f'could not make a folder for Spark in "{run}": {error.strerror}',
            hint=f"Free some space.\ndf -h {shlex.quote(str(run))}",
        ) from None


def _made(run: Path) -> Path:
    scratch = Path(tempfile.mkdtemp(prefix="spark.", dir=run.absolute()))
    try:
        # guard: no Spark starts in a folder that another start removes
        while not _is_ours(scratch):
            remove_scratch(scratch)
            scratch = Path(tempfile.mkdtemp(prefix="spark.", dir=run.absolute()))
        with tempfile.TemporaryDirectory(dir=scratch) as probe:  # Spark does not start where it can make none
            for number in range(_FOLDERS):
                (Path(probe) / str(number)).mkdir()
    except OSError:
        remove_scratch(scratch)
        raise
    return scratch


def _is_ours(scratch: Path) -> bool:
    """Lock a new folder; return False if another start took it for one whose process has ended, and removes it."""
    try:
        lock = _locks[scratch] = os.open(scratch / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there = (scratch / "lock").stat()
    except (FileNotFoundError, BlockingIOError):
        return False
    return os.path.samestat(os.fstat(lock), there)


def _remove_abandoned(run: Path) -> None:
    """Remove the folders of processes that have ended without that."""
    for scratch in run.glob("spark.*"):
        with _abandoned(scratch) as ended:
            # guard: the folder of a Spark that runs is not removed
            if ended:
                remove_scratch(scratch)
    # A JVM that cannot write its port runs forever. One that can ends with its standard input.
    for place in run.glob("gateway.*"):
        if _is_old(place):
            shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _abandoned(scratch: Path) -> Iterator[bool]:
    """Yield whether the process of a folder has ended. The folder stays locked, so that no process begins to use it."""
    try:
        lock = os.open(scratch / "lock", os.O_RDWR)
    except OSError:  # it may be made at this moment
        yield _is_old(scratch)
        return
    try:
        yield _could_lock(lock)
    finally:
        os.close(lock)


def _could_lock(lock: int) -> bool:
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _is_old(place: Path) -> bool:
    with suppress(OSError):
        return time.time() - place.stat().st_mtime > _STARTING
    return False


def remove_scratch(scratch: Path) -> None:
    """Remove the folder of a JVM that has ended, with its sockets."""
    with suppress(OSError):
        shutil.rmtree((scratch / _LINK).readlink(), ignore_errors=True)
    shutil.rmtree(scratch, ignore_errors=True)
    if (lock := _locks.pop(scratch, None)) is not None:
        os.close(lock)


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


def socket_folder(scratch: Path) -> Path | None:
    """Return a folder that other users cannot enter, for the sockets between the JVM and its python processes.

    A socket's address has 103 bytes on every system, of which Spark's name takes 42.

    :param scratch: from :func:`scratch_folder`. If its path is too long, a temporary folder is made, to which it links.
    :return: None if no path is short enough.
    """
    if _is_short(scratch):
        return scratch
    folder = Path(tempfile.mkdtemp(prefix="pgsub-"))
    (scratch / _LINK).symlink_to(folder)
    return folder if _is_short(folder) else None


def _is_short(folder: Path) -> bool:
    return len(os.fsencode(folder)) <= _SOCKET_FOLDER


def _environment(
    java: Java, master: str, run: Path, flags: list[str], launcher_flags: list[str]
) -> dict[str, str | None]:
    """Return variables of the JVM and its python workers. Any setting overrides MASTER and SPARK_DRIVER_MEMORY."""
    logging_option = f"-Dlog4j2.configurationFile={(run / 'log4j2.properties').absolute().as_uri()}"
    given = os.environ.get("SPARK_SUBMIT_OPTS", "")
    wanted: dict[str, str | None] = {
        "JAVA_HOME": str(java.home) if java.home else None,
        "SPARK_SUBMIT_OPTS": " ".join([logging_option, *flags, *jvm_flags.user_flags(), given]).strip(),
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
