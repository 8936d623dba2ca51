"""Fixture of tests in which pgsub is upgraded: a program that is newer than the one under test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
#: What is appended to a module: a step from the newest version of a schema to the next one.
_STEPS = {
    "target/ledger/schema/versions.py": """
MIGRATIONS[len(MIGRATIONS) + 1] = "ALTER TABLE pgsub.control ADD COLUMN newer integer;"
""",
    "catalog/schema.py": """
MIGRATIONS += ((MIGRATIONS[-1][0] + 1, "ALTER TABLE pgsub_worker ADD COLUMN newer INTEGER;"),)
""",
}


@pytest.fixture(scope="session")
def newer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which ``python -m pgsub`` is a copy whose ledger and state store are one version newer."""
    folder = tmp_path_factory.mktemp("newer")
    shutil.copytree(_ROOT / "pgsub", folder / "pgsub", ignore=shutil.ignore_patterns("__pycache__"))
    for file, text in _STEPS.items():
        with (folder / "pgsub" / file).open("a") as module:
            module.write(text)
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
