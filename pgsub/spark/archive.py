"""The class-data-sharing archive that halves the start of Spark's JVM, and the JVM's other flags.

An archive belongs to one Java version and one set of jars; its name is their hash. It is made by a process of its
own in the background when the first session has ended (:mod:`pgsub.spark.training`), as dumping classes while a user
waits would cost him twice what it saves. Without an archive everything works, only slower.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pgsub.spark.java import Java

#: Short-lived work: the second compiler and a parallel collector cost more than they bring.
_LEAN = ("-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
_COLLECTOR = "-XX:+UseSerialGC"
#: Any thread may be the one that finds no memory; without it py4j and Spark wait for an answer for ever, or jobs do.
_EXIT = "-XX:+ExitOnOutOfMemoryError"
#: How a JVM ends by that.
OUT_OF_MEMORY = 3

_UNUSED_DAYS = 60


@dataclass(frozen=True)
class Archive:
    """The two files of an archive: ``base`` holds the JDK's classes where the JDK brings no such file."""

    file: Path
    base: Path | None

    @property
    def refused(self) -> Path:
        """Written when an attempt to make the archive failed."""
        return self.file.with_suffix(".failed")

    def wanted(self) -> bool:
        """Return whether to make it: it is not there, and no attempt failed within a day."""
        if self.file.exists():
            return False
        try:
            return time.time() - self.refused.stat().st_mtime > 86400
        except OSError:
            return True


def find_archive(java: Java, spark_home: Path, cache: Path) -> Archive:
    """Return the archive of a runtime and a set of jars, whether it was made or not.

    :param spark_home: folder whose ``jars`` are on the class path.
    :param cache: private cache folder.
    """
    digest = hashlib.sha256(f"{java.version}\0{java.real_home}\0{spark_home}".encode())
    base = None
    if java.real_home is not None and not any(java.real_home.glob("lib/server/classes*.jsa")):
        base = cache / f"java-{digest.hexdigest()[:16]}.jsa"
    for jar in sorted((spark_home / "jars").glob("*.jar")):
        status = jar.stat()
        digest.update(f"{jar.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return Archive(cache / f"spark-{digest.hexdigest()[:16]}.jsa", base)


def user_options(settings: Mapping[str, str]) -> str:
    """Return all JVM options that the user set for the driver, in one text.

    :param settings: of :func:`pgsub.spark.settings.user_settings`.
    """
    variables = ("SPARK_SUBMIT_OPTS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS")
    names = ("spark.driver.defaultJavaOptions", "spark.driver.extraJavaOptions")
    return " ".join([os.environ.get(name, "") for name in variables] + [settings.get(name, "") for name in names])


def flags(archive: Archive, options: str) -> list[str]:
    """Return flags of the driver's JVM.

    :param options: the user's own; two collectors or two archives in one command line would be an error.
    """
    chosen = list(_LEAN)
    if not re.search(r"Use\w*GC\b", options):
        chosen.append(_COLLECTOR)
    if "OnOutOfMemoryError" not in options:
        chosen.append(_EXIT)
    if re.search(r"SharedArchive|-Xshare|-XX:AOT", options):
        return chosen
    file = archive.file if archive.file.exists() else archive.base
    if file is not None and file.exists():
        _mark_used(archive)
        chosen.append(f"-XX:SharedArchiveFile={file}")
    return chosen


def launcher_flags(archive: Archive) -> list[str]:
    """Return the flags of the small JVM that composes the command line; its output would be taken for one."""
    chosen = [*_LEAN, _COLLECTOR, "-Xlog:disable"]
    if archive.base is not None and archive.base.exists():
        chosen.append(f"-XX:SharedArchiveFile={archive.base}")
    return chosen


def training_flags(archive: Archive, draft: Path) -> list[str]:
    """Return flags of a JVM that writes its loaded classes when it ends.

    :param draft: file that it writes.
    """
    base = [f"-XX:SharedArchiveFile={archive.base}"] if archive.base is not None else []
    return [*_LEAN, _COLLECTOR, *base, f"-XX:ArchiveClassesAtExit={draft}"]


def dump_base(java: Java, archive: Archive) -> None:
    """Make the archive of the JDK's own classes, without which a JVM cannot write one on top.

    :raises OSError: where the runtime cannot.
    """
    if archive.base is None or archive.base.exists():
        return
    draft = archive.base.with_suffix(f".{os.getpid()}")
    command = [str(java.executable), "-Xshare:dump", _COLLECTOR, f"-XX:SharedArchiveFile={draft}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 0 or not draft.exists():
        raise OSError(f"-Xshare:dump ended with {done.returncode}")
    os.replace(draft, archive.base)


def train_in_background(archive: Archive, environment: Mapping[str, str]) -> None:
    """Have the archive made by a process that outlives this one, as ``git gc --auto`` does its work.

    :param environment: in which pgsub can be imported.
    """
    if not archive.wanted():
        return
    try:
        subprocess.Popen(
            [sys.executable, "-m", "pgsub.spark.training", str(archive.file.parent)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=dict(environment),
        )
    except OSError:
        pass  # only time is lost


def remove_unused(cache: Path) -> None:
    """Remove archives that no session has used for long.

    :param cache: private cache folder.
    """
    oldest = time.time() - _UNUSED_DAYS * 86400
    for file in [*cache.glob("spark-*.*"), *cache.glob("java-*.jsa")]:
        if file.stat().st_mtime < oldest:
            file.unlink(missing_ok=True)


def _mark_used(archive: Archive) -> None:
    for file in (archive.file, archive.base):
        try:
            if file is not None:
                os.utime(file)
        except OSError:
            pass
