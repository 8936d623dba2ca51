"""Fixtures of the command line's tests: real state stores, and the program in this process or in one of its own."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from pgsub.catalog.locks import Lock, subscription_lock
from pgsub.catalog.rows import RelationRow
from pgsub.catalog.store import StateStore
from pgsub.cli.general_options import Settings, current
from pgsub.cli.main import run
from pgsub.common.subscription import Subscription

ROOT = Path(__file__).parents[2]
_REMOVED = ("PGSUB_", "PG", "XDG_", "NO_COLOR", "CLICOLOR", "FORCE_COLOR", "CI")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a state folder may be created."""
    return tmp_path / "state"


@pytest.fixture
def store(folder: Path) -> Iterator[StateStore]:
    """An open store with the enabled subscription 5 "orders" of two tables, and 7 "bills" without a slot."""
    with StateStore.open(folder) as opened:
        opened.add_subscription(Subscription(5, "orders", "host=p", "host=t", ("pub", "other"), "orders"))
        opened.put_relations(
            5, [RelationRow(100, "r", 0x16, "public", "a"), RelationRow(101, "d", None, "public", "b")]
        )
        opened.add_subscription(Subscription(7, "bills", "host=p", "host=t", ("pub",), None, enabled=False))
        yield opened


@pytest.fixture
def served(store: StateStore, folder: Path) -> Iterator[Lock]:
    """This process serves the subscription 5, as far as others can see, until this lock is released."""
    lock = subscription_lock(folder, 5)
    assert lock.acquire()
    store.put_server(5, os.getpid(), "here")
    yield lock
    lock.release()


@pytest.fixture
def environment(folder: Path) -> dict[str, str]:
    """The environment of the program: nothing of the developer's own but what a process needs."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_REMOVED)}
    return {**kept, "PYTHONPATH": str(ROOT), "PGSUB_STATE_DIR": str(folder), "TERM": "xterm", "COLUMNS": "80"}


@pytest.fixture
def pgsub(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Run a command line in this process; tests of streams, signals and imports start one of their own."""
    for name in set(os.environ) - environment.keys():
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def call(*args: str) -> "subprocess.CompletedProcess[str]":
        vars(current).update(vars(Settings()))
        capfd.readouterr()
        code = run(args)
        return subprocess.CompletedProcess(args, code, *capfd.readouterr())

    yield call
    vars(current).update(vars(Settings()))


@pytest.fixture
def valid() -> Callable[[str, str], dict[str, Any]]:
    """Parse a document and validate it against a schema of the project."""

    def check(schema: str, text: str) -> dict[str, Any]:
        rules = json.loads((ROOT / "pgsub" / "cli" / "schema" / f"{schema}.schema.json").read_text())
        Draft202012Validator.check_schema(rules)
        document = json.loads(text)
        checker = Draft202012Validator.FORMAT_CHECKER
        Draft202012Validator(rules, format_checker=checker).validate(document)
        return document

    return check
