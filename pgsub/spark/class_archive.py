"""The class-data-sharing archive that halves the start of Spark's JVM.

An archive belongs to one Java version and one set of jars; its name is their hash. It is made by a process of its
own in the background when the first session has ended (:mod:`pgsub.spark.training`), as dumping classes while a user
waits would cost him twice what it saves. Without an archive everything works, only slower.
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

from pgsub.spark.java import Java

#: The archive depends on the collector, so all JVMs have the same one unless the user chose another.
COLLECTOR = "-XX:+UseSerialGC"
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


def dump_base(java: Java, archive: Archive) -> None:
    """Make the archive of the JDK's own classes, without which a JVM cannot write one on top.

    :raises OSError: where the runtime cannot.
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


def mark_used(archive: Archive) -> None:
    """Keep an archive from :func:`remove_unused`."""
    for file in (archive.file, archive.base):
        try:
            if file is not None:
                os.utime(file)
        except OSError:
            pass
