"""CPU seconds and private memory of groups of processes, sampled from /proc."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

#: Server processes that work for nobody in particular.
_BACKGROUND = (
    "checkpointer",
    "background writer",
    "walwriter",
    "autovacuum",
    "logical replication launcher",
    "io worker",
)


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a snapshot of /proc."""

    pid: int
    parent: int
    name: str
    ticks: int  #: user and system CPU time


class Processes:
    """All processes of one moment."""

    def __init__(self) -> None:
        self.by_pid = {process.pid: process for process in _snapshot()}
        self._children: dict[int, list[Process]] = defaultdict(list)
        for process in self.by_pid.values():
            self._children[process.parent].append(process)

    def children(self, pid: int | None) -> list[Process]:
        """Direct children."""
        return self._children.get(pid or 0, []) if pid else []

    def below(self, pid: int) -> Iterator[Process]:
        """Children, their children, and so on."""
        for child in self._children.get(pid, []):
            yield child
            yield from self.below(child.pid)


#: Process ids of each group, found anew in every sample.
Groups = Callable[[Processes], Mapping[str, list[Process]]]


def sessions(processes: Processes, postmaster: int | None, ignored: set[int]) -> list[Process]:
    """Backends, walsenders and replication workers of one server.

    :param ignored: process ids that do not count.
    """
    found = []
    for child in processes.children(postmaster):
        title = _title(child.pid)
        if child.pid not in ignored and title and not title.startswith(_BACKGROUND):
            found.append(child)
    return found


@dataclass(slots=True)
class Usage:
    """What one group of processes used.

    :ivar cpu: seconds, user and system.
    :ivar peak: bytes of anonymous resident memory of the group at its largest sample; a forked process's pages that
        are still its parent's count for both.
    :ivar largest: the same of the largest process of the group.
    """

    cpu: float = 0.0
    peak: int = 0
    largest: int = 0


@dataclass(slots=True)
class _Group:
    ticks: dict[int, int] = field(default_factory=dict)
    peak: int = 0
    largest: int = 0


class Sampler:
    """Samples from ``with`` to its end; processes that live already start at zero.

    :param groups: which process belongs where.
    :param interval: seconds; what a process used after its last sample is not seen.
    """

    def __init__(self, groups: Groups, interval: float = 0.2) -> None:
        self._groups = groups
        self._interval = interval
        self._before: dict[int, int] = {}
        self._busy = 0
        self._seen: dict[str, _Group] = defaultdict(_Group)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._busy = _busy_ticks()
        self._before = {process.pid: process.ticks for process in Processes().by_pid.values()}
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()
        self._busy = _busy_ticks() - self._busy

    def usage(self) -> dict[str, Usage]:
        """What was used, by group; ``others`` is the rest of the machine: much of it, and the figures mean little."""
        used = {
            name: sum(n - self._before.get(pid, 0) for pid, n in group.ticks.items())
            for name, group in self._seen.items()
        }
        ticks = os.sysconf("SC_CLK_TCK")
        found = {name: Usage(used[name] / ticks, group.peak, group.largest) for name, group in self._seen.items()}
        return {**found, "others": Usage(max(0, self._busy - sum(used.values())) / ticks)}

    def _run(self) -> None:
        self._sample()
        while not self._stop.wait(self._interval):
            self._sample()

    def _sample(self) -> None:
        for name, members in self._groups(Processes()).items():
            group = self._seen[name]
            for process in members:
                group.ticks[process.pid] = process.ticks
            memory = [_anonymous_memory(process.pid) for process in members]
            group.peak = max(group.peak, sum(memory))
            group.largest = max(group.largest, *memory, 0)


def _snapshot() -> Iterator[Process]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text(errors="replace")
        except OSError:  # ended meanwhile
            continue
        head, _, tail = text.rpartition(") ")
        fields = tail.split()
        yield Process(int(entry.name), int(fields[1]), head.partition(" (")[2], int(fields[11]) + int(fields[12]))


def _busy_ticks() -> int:
    """CPU time of the whole machine, idle and waiting left out, what the host took away included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]
    )
    return user + nice + system + irq + softirq + steal


def _title(pid: int) -> str:
    """What follows ``postgres:`` in a server process's title."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
    return text.removeprefix("postgres: ").strip() if text.startswith("postgres: ") else ""


def _anonymous_memory(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
