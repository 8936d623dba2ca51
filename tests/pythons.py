"""The interpreters that pgsub allows and this machine has, and the tests that each of them is put to.

``python tests/pythons.py`` names them, ``oldest`` runs the demo and the fast tests on the oldest, ``core`` the suite's
core on the oldest of each minor version: what an interpreter gets wrong is mended in a later one. The one that runs
this has the whole suite, and is left out. ``PGSUB_TEST_PYTHONS=/usr/bin/python3.11:...`` names others than those that
are found. Each gets an environment of its own in the checkout's ``.venv``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv" / "pythons"
Version: TypeAlias = tuple[int, int, int]

#: The versions that should be there; newer ones are taken where they are found.
OLDEST, NEWEST = 11, 13
FAST = (
    "protocol",
    "cli",
    "catalog",
    "apply/test_runs.py",
    "apply/test_transactions.py",
    "guards/test_python_versions.py",
)
CORE = (
    *FAST,
    "spark",
    "publisher",
    "target",
    "launcher",
    "guards",
    "demo",
    "tablesync/test_copy.py",
    "tablesync/test_faults.py",
    "apply/test_conflict_words.py",
    "apply/test_parallel.py",
    "apply/test_random.py",
    "apply/test_sets.py",
    "apply/test_two_phase.py",
    "apply/test_types.py",
    "commands/test_run.py",
    "faults/test_handover.py",
)
#: Where interpreters lie that are not in the PATH: pyenv, asdf, mise, uv, the runners of hosted CI, images of Python.
_PLACES = (
    "~/.pyenv/versions/*/bin",
    "~/.asdf/installs/python/*/bin",
    "~/.local/share/mise/installs/python/*/bin",
    "~/.local/share/uv/python/*/bin",
    "~/.local/bin",
    "/opt/hostedtoolcache/Python/*/*/bin",
    "/opt/python/*/bin",
    "/usr/local/bin",
    "/usr/bin",
)
_NAME = re.compile(r"python3(\.1[1-9])?")
_ASK = (
    "import sys, json, importlib.util as u;"
    "print(json.dumps([sys.version_info[:3], sys.implementation.name, sys.version_info.releaselevel,"
    " sys.prefix == sys.base_prefix and u.find_spec('venv') is not None and u.find_spec('ensurepip') is not None]))"
)


def main(words: list[str]) -> int:
    """:return: 0, or 1 where something failed."""
    others = found()
    if words == ["core"]:
        return _all([_tests(version, python, CORE) for version, python in others.items()], others)
    if words == ["oldest"]:
        oldest = dict(list(others.items())[:1])
        return _all([_demo(*one) and _tests(*one, FAST) for one in oldest.items()], oldest)
    for version, python in others.items():
        print(_name(version), python)
    return 0


def found() -> dict[Version, Path]:
    """The oldest of each minor version besides the one that runs this, oldest first."""
    best: dict[int, tuple[Version, Path]] = {}
    for python in _candidates():
        version = _asked(python)
        if version is None or version == sys.version_info[:3] or version < (3, OLDEST):
            continue
        if version[1] not in best or version < best[version[1]][0]:
            best[version[1]] = version, python
    return dict(best[minor] for minor in sorted(best))


def _candidates() -> Iterator[Path]:
    named = os.environ.get("PGSUB_TEST_PYTHONS")
    if named is not None:
        yield from map(Path, filter(None, named.split(os.pathsep)))
        return
    folders = [Path(name) for name in os.environ.get("PATH", "").split(os.pathsep) if name]
    for place in _PLACES:
        path = Path(place).expanduser()
        folders += sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    for folder in dict.fromkeys(folders):
        with contextlib.suppress(OSError):  # the PATH may name what is not there, or somebody else's
            yield from sorted(file for file in folder.iterdir() if _NAME.fullmatch(file.name))


def _asked(python: Path) -> Version | None:
    """Its version; None where it is none of CPython's releases, or can make no environment."""
    try:
        said = subprocess.run([python, "-I", "-c", _ASK], capture_output=True, text=True, timeout=60, check=True)
        version, implementation, level, able = json.loads(said.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None  # a shim of a version that is not installed, for one
    major, minor, micro = version
    return (major, minor, micro) if able and implementation == "cpython" and level == "final" else None


def _all(passed: Iterable[bool], others: dict[Version, Path]) -> int:
    ran = list(passed)
    missing = {f"3.{minor}" for minor in range(OLDEST, NEWEST + 1)} - {
        f"3.{version[1]}" for version in (*others, sys.version_info[:3])
    }
    print(f"pythons: ran on {', '.join(map(_name, others)) or 'no other Python, none was found'}", flush=True)
    if missing and len(others) != 1:
        print(f"pythons: there is no {', '.join(sorted(missing))} here (PGSUB_TEST_PYTHONS names others)", flush=True)
    return 0 if all(ran) else 1


def _tests(version: Version, python: Path, files: Iterable[str]) -> bool:
    paths = [f"tests/{file}" for file in files]
    workers = os.environ.get("WORKERS") or str(max(2, min(4, os.cpu_count() or 2)))
    words = ["-m", "pytest", "-q", "-n", workers, "--dist", "loadfile", "--no-loadscope-reorder", *paths]
    return _run(version, python, "python", words)


def _demo(version: Version, python: Path) -> bool:
    return _run(version, python, "pgsub", ["demo"])


def _run(version: Version, python: Path, program: str, words: list[str]) -> bool:
    """Say what runs on which, and how it ended."""
    what = f"Python {_name(version)} ({python}): {' '.join([program, *words])}"
    print(f"pythons: {what}", flush=True)
    began = time.monotonic()
    folder = _environment(version, python)
    environment = {key: value for key, value in os.environ.items() if key != "PGSUB_TEST_THOROUGH"}
    done = subprocess.run([folder / "bin" / program, *words], cwd=ROOT, env=environment, check=False)
    how = "passed" if done.returncode == 0 else f"FAILED with exit code {done.returncode}"
    print(f"pythons: Python {_name(version)}: {how} after {time.monotonic() - began:.0f} s", flush=True)
    return done.returncode == 0


def _environment(version: Version, python: Path) -> Path:
    """Its virtual environment, made where it is not there or older than the list of what it has to hold."""
    folder, wanted = FOLDER / _name(version), ROOT / "pyproject.toml"
    stamp = folder / ".stamp"
    if not stamp.exists() or stamp.stat().st_mtime < wanted.stat().st_mtime:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        install = ["-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--use-pep517", "-e"]
        subprocess.run([folder / "bin" / "python", *install, f"{ROOT}[embedded,dev]"], check=True)
        stamp.touch()
    return folder


def _name(version: Version) -> str:
    return ".".join(map(str, version))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
