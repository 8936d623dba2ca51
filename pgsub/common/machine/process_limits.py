"""The limits of processes and threads: of the user (RLIMIT_NPROC) and of control groups (``pids.max``).

fork(2) and pthread_create(3) fail with EAGAIN at any of them, and do not say which one it was. Processes end after such
a failure, so their present number does not show it, either. Therefore every limit is named that leaves little room.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

#: More processes and threads than Spark and its workers need.
_ROOM = 500


def near(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> str | None:
    """Return a sentence for each limit that leaves little room, None if there is none.

    :param proc: where the system shows processes.
    :param groups: where it shows control groups.
    """
    return " ".join([*_of_user(proc), *_of_groups(proc, groups)]) or None


def _of_user(proc: Path) -> Iterator[str]:
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    user = os.getuid()
    if user == 0 or limit == resource.RLIM_INFINITY:  # root is exempt
        return
    used = 0
    for tasks in proc.glob("[0-9]*/task"):
        with contextlib.suppress(OSError):  # it has ended
            if tasks.stat().st_uid == user:
                used += len(os.listdir(tasks))
    # guard: a limit of processes that leaves little room is named
    if used + _ROOM > limit:
        yield f"User id {user} may have {limit} processes and threads (ulimit -u), and has {used}."


def _of_groups(proc: Path, groups: Path) -> Iterator[str]:
    """Yield the limits of the process's control groups, from its own to the root, in either version."""
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers in ("", "pids"):
                own = Path(name)
                for group in (own, *own.parents):
                    yield from _of_group(groups / controllers / group.relative_to("/"), str(group))


def _of_group(folder: Path, name: str) -> Iterator[str]:
    with contextlib.suppress(OSError, ValueError):  # a group without a limit
        most, used = (int((folder / file).read_text()) for file in ("pids.max", "pids.current"))
        # guard: a limit of processes that leaves little room is named
        if used + _ROOM > most:
            yield f'Control group "{name}" may have {most} processes and threads (pids.max), and has {used}.'
