"""Fixtures of the state store's tests: real files in a private folder, and other processes on them."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pgsub.catalog.store import StateStore
from pgsub.common.subscription import Subscription

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a state folder may be created."""
    return tmp_path / "state"


@pytest.fixture
def store(folder: Path) -> Iterator[StateStore]:
    """An open store with the subscriptions 5 "orders" and 7 "bills"."""
    with StateStore.open(folder) as opened:
        opened.add_subscription(Subscription(5, "orders", "host=p", "host=t", ("pub",), "orders"))
        opened.add_subscription(Subscription(7, "bills", "host=p", "host=t", ("pub",), None))
        yield opened


@pytest.fixture
def start() -> Iterator[Start]:
    """Start Python code in another process; it is ended with the test."""
    running: list[subprocess.Popen[str]] = []

    def run(code: str, *arguments: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", code, *map(str, arguments)]
        root = Path(__file__).parents[2]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root
        )
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()
