"""Flags of Spark's JVM and of the small JVM that composes its command line."""

from __future__ import annotations

import os
import pwd
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from pgsub.spark.jvm.class_archive import COLLECTOR, Archive, mark_used

#: For short-lived work: the second compiler and a parallel collector cost more than they gain.
_LEAN = ("-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
#: Any thread may run out of memory. Without this flag, py4j and Spark, or jobs, would wait forever for an answer.
_EXIT = "-XX:+ExitOnOutOfMemoryError"
#: Exit code of a JVM that ran out of memory.
OUT_OF_MEMORY = 3


def user_options(settings: Mapping[str, str]) -> str:
    """Return all of the user's JVM options for the driver, in one text.

    :param settings: from :func:`pgsub.spark.settings.user_settings`.
    """
    variables = ("SPARK_SUBMIT_OPTS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS")
    names = ("spark.driver.defaultJavaOptions", "spark.driver.extraJavaOptions")
    return " ".join([os.environ.get(name, "") for name in variables] + [settings.get(name, "") for name in names])


def flags(archive: Archive, options: str) -> list[str]:
    """Return the flags of the driver's JVM.

    :param options: the user's options. Two collectors or two archives on a command line would be an error.
    """
    chosen = list(_LEAN)
    if not re.search(r"Use\w*GC\b", options):
        chosen.append(COLLECTOR)
    if "OnOutOfMemoryError" not in options:
        chosen.append(_EXIT)
    if re.search(r"SharedArchive|-Xshare|-XX:AOT", options):
        return chosen
    file = archive.file if archive.file.exists() else archive.base
    if file is not None and file.exists():
        mark_used(archive)
        chosen.append(f"-XX:SharedArchiveFile={file}")
    return chosen


def launcher_flags(archive: Archive) -> list[str]:
    """Return the flags of the small JVM that composes the command line. It must not print anything else."""
    chosen = [*_LEAN, COLLECTOR, "-Xlog:disable"]
    if archive.base is not None and archive.base.exists():
        chosen.append(f"-XX:SharedArchiveFile={archive.base}")
    return chosen


def training_flags(archive: Archive, draft: Path) -> list[str]:
    """Return flags of a JVM that writes its loaded classes when it ends.

    :param draft: the file that it writes.
    """
    base = [f"-XX:SharedArchiveFile={archive.base}"] if archive.base is not None else []
    return [*_LEAN, COLLECTOR, *base, f"-XX:ArchiveClassesAtExit={draft}"]


def temporary_flags(folder: Path, options: str) -> list[str]:
    """Return the flag that keeps the JVM's temporary files from other users, unless the user names a folder.

    Libraries unpack native code among these files. lz4-java opens a file there whose name others know, and loads it
    (Native.java).

    :param folder: a private folder.
    :param options: the user's options.
    """
    return [] if "-Djava.io.tmpdir=" in options else [shlex.quote(f"-Djava.io.tmpdir={folder}")]


def user_name() -> str | None:
    """Return a name for a user without an entry in the user database, None if there is an entry.

    Java then has neither name nor home folder of the user, and Hadoop's login, which Spark needs, fails (HADOOP-19401).
    """
    user = os.getuid()
    try:
        pwd.getpwuid(user)
    except KeyError:
        return os.environ.get("HADOOP_USER_NAME") or f"uid{user}"
    return None


def user_flags(run: Path) -> list[str]:
    """Return flags with the name and the home folder of a user without an entry in the user database.

    :param run: a private folder, the home folder of a user whose environment names none.
    """
    name, home = user_name(), os.environ.get("HOME", "")
    if name is None:
        return []
    folder = home if os.path.isabs(home) else run.absolute()
    return [shlex.quote(f"-Duser.name={name}"), shlex.quote(f"-Duser.home={folder}")]
