"""The class-data-sharing archive, which halves the start time of Spark's JVM.

An archive belongs to one Java version and one set of jars, whose hash is its name. A background process makes it after
the first session (:mod:`pgsub.spark.training`), because making it while a user waits would take twice the time it
saves. Everything works without an archive, only slower.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pgsub.spark.jvm.java import Java

#: The archive depends on the garbage collector, so all JVMs use this one unless the user chose another.
COLLECTOR = "-XX:+UseSerialGC"
_UNUSED_DAYS = 60


@dataclass(frozen=True)
class Archive:
    """The two files of an archive. ``base`` contains the JDK's classes if the JDK has no such file."""

    file: Path
    base: Path | None

    @property
    def refused(self) -> Path:
        """The file that marks a failed attempt to make the archive."""
        return self.file.with_suffix(".failed")

    def wanted(self) -> bool:
        """Return whether to make the archive: it does not exist, and no attempt failed within a day."""
        if self.file.exists():
            return False
        try:
            return time.time() - self.refused.stat().st_mtime > 86400
        except OSError:
            return True


def find_archive(java: Java, spark_home: Path, cache: Path) -> Archive:
    """Return the archive of a runtime and a set of jars, which may not exist yet.

    :param spark_home: folder whose ``jars`` are on the class path.
    """
    digest = hashlib.sha256(f"{java.version}\0{java.real_home}\0{spark_home}".encode())
    base = None
    if java.real_home is not None and not any(java.real_home.glob("lib/server/classes*.jsa")):
        base = cache / f"java-{digest.hexdigest()[:16]}.jsa"
    for jar in sorted((spark_home / "jars").glob("*.jar")):
        status = jar.stat()
        digest.update(f"{jar.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return Archive(cache / f"spark-{digest.hexdigest()[:16]}.jsa", base)


def dump_base(java: Java, archive: Archive) -> None:
    """Make the archive of the JDK's own classes, which a JVM needs to write one on top.

    :raises OSError: the runtime cannot do it.
    """
    if archive.base is None or archive.base.exists():
        return
    draft = archive.base.with_suffix(f".{os.getpid()}")
    command = [str(java.executable), "-Xshare:dump", COLLECTOR, f"-XX:SharedArchiveFile={draft}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 0 or not draft.exists():
        raise OSError(f"-Xshare:dump ended with {done.returncode}")
    os.replace(draft, archive.base)


def train_in_background(archive: Archive, environment: Mapping[str, str]) -> None:
    """Start a process that makes the archive and outlives this one, like ``git gc --auto``.

    :param environment: environment in which pgsub can be imported.
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
    """Remove archives that have not been used for long."""
    oldest = time.time() - _UNUSED_DAYS * 86400
    for file in [*cache.glob("spark-*.*"), *cache.glob("java-*.jsa")]:
        if file.stat().st_mtime < oldest:
            file.unlink(missing_ok=True)


def mark_used(archive: Archive) -> None:
    """Protect an archive from :func:`remove_unused`."""
    for file in (archive.file, archive.base):
        try:
            if file is not None:
                os.utime(file)
        except OSError:
            pass
