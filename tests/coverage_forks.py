"""Plugin of coverage for ``make coverage``: forks save what they have run every second, for most end by a signal.

Spark's Python workers do, which are forks of :mod:`pgsub.spark.daemon`.
"""

import contextlib
import os
import threading
import time

import coverage

_save = coverage.Coverage.save


class _Saves:
    """Saves of one process, one at a time: SQLite's library crashes if a fork ends while its thread saves."""

    lock = threading.RLock()  # a signal may interrupt a save of its own thread


def coverage_init(registry: object, options: object) -> None:
    """Called in every process that is measured, before anything of it runs."""
    coverage.Coverage.save = _save_alone  # type: ignore[method-assign]
    os.register_at_fork(after_in_child=_forked)


def _save_alone(current: coverage.Coverage) -> None:
    with _Saves.lock:
        _save(current)


def _forked() -> None:
    _Saves.lock = threading.RLock()  # a thread of the parent may hold the other one
    threading.Thread(target=_save_again, daemon=True).start()


def _save_again() -> None:
    while (current := coverage.Coverage.current()) is not None:
        time.sleep(1)
        with contextlib.suppress(Exception):  # a thread of the fork adds to what is being written: next time
            current.save()
