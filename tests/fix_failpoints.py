"""Failpoints of the workers that run in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from pgsub.common import failpoints
from pgsub.common.machine.out_of_resources import NO_THREAD
from pgsub.common.threads import SupervisedThread

At = Callable[[str], None]
WithoutThreads = Callable[..., contextlib.AbstractContextManager[list[str]]]


@pytest.fixture
def without_threads() -> WithoutThreads:
    """``with without_threads("writer") as refused``: none of these kinds can be started, as under RLIMIT_NPROC."""

    @contextlib.contextmanager
    def refusing(*kinds: str) -> Iterator[list[str]]:
        refused: list[str] = []

        def start(thread: SupervisedThread) -> None:
            if thread.kind in kinds:
                refused.append(thread.kind)
                raise RuntimeError(NO_THREAD)
            before(thread)

        with pytest.MonkeyPatch.context() as patched:
            before = SupervisedThread.start
            patched.setattr(SupervisedThread, "start", start)
            yield refused

    return refusing


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch, reached: Callable[[str], None]) -> Iterator[At]:
    """``at("copy.middle=error@2")``: actions at failpoints, each counted from here; ``at("")``: none any more.

    A point whose action ran is counted as reached.
    """
    armed = ""

    def count() -> None:
        for name, _, action in (item.partition("=") for item in armed.split(";")):
            if failpoints._counts.get(name, 0) >= int(action.partition("@")[2] or 1):
                reached(name)

    def set_(actions: str) -> None:
        nonlocal armed
        count()
        armed = actions
        monkeypatch.setattr(failpoints, "_counts", {})
        monkeypatch.setenv("PGSUB_FAILPOINTS", actions)

    yield set_
    count()
