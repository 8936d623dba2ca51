"""The program installed from a checkout as its pages say, without fetching again what it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: What wheel and program are made of.
SOURCES = ("pgsub", "man", "completions", "pyproject.toml", "README.md", "LICENSE")
#: pip says one of these where there is no index to fetch from.
_NOTHING_TO_BE_HAD = ("setuptools", "No matching distribution")


def copy_sources(folder: Path) -> None:
    """Make a checkout, for setuptools leaves a folder of its own in it."""
    folder.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)


def run_lines(script: str, folder: Path, *, needs: bool = False, **variables: str) -> None:
    """Run lines of a shell in a checkout; each has to succeed.

    :param needs: whether pip installs what a package needs, too.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "PG"))}
    quick = {} if needs else {"PIP_NO_DEPS": "1"}
    environment = {**kept, **quick, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables}
    words = ["bash", "-e", "-o", "pipefail", "-c", script]
    ended = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode and any(text in ended.stderr for text in _NOTHING_TO_BE_HAD):
        pytest.skip("NOT TESTED: the installation: what builds the wheel cannot be had")
    assert ended.returncode == 0 and "ERROR: " not in ended.stderr, ended.stdout + ended.stderr
