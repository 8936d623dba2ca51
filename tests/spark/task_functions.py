"""Functions that tests run in python workers, where PYTHONPATH names the folder of the tests."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from pgsub.common.errors import ApplyError


def double(number: int) -> int:
    return 2 * number


def words(size: int) -> str:
    return "w" * size


def fail_as_apply_does(number: int) -> int:
    error = ApplyError("could not apply", detail="Key (id)=(1) already exists.", sqlstate="23505")
    error.relation, error.finish_lsn, error.xid, error.conflict = "public.t", "0/15F2A40", 740, "insert_exists"
    raise error


def imported(name: str) -> bool:
    return name in sys.modules


def divide_by(number: int) -> float:
    return 1 / number


def exit_quietly(code: int) -> None:
    sys.exit(code)


def die(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_until(work: tuple[str, int]) -> int:
    """Die as often as the number says, by files in a folder."""
    folder, times = work
    done = len(list(Path(folder).iterdir()))
    if done < times:
        (Path(folder) / str(done)).touch()
        die(done)
    return done


def die_or_double(number: int) -> int:
    if number == 1:
        die(number)
    time.sleep(0.5)
    return 2 * number


def interval(seconds: float) -> tuple[float, float]:
    began = time.monotonic()
    time.sleep(seconds)
    return began, time.monotonic()


def mark_and_wait(folder: str) -> None:
    """Leave a file named after this process, and stay."""
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(600)


def worker(number: int) -> tuple[int, str, str | None, int]:
    print("a task that prints", file=sys.stderr, flush=True)
    mask = os.umask(0o077)
    return os.getpid(), sys.executable, sys.modules["pyspark"].__file__, mask
