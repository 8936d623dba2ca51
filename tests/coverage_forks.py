"""Plugin of coverage for ``make coverage``: forks save what they have run every second, for most end by a signal.

Spark's Python workers do, which are forks of :mod:`pgsub.spark.daemon`.
"""

import contextlib
import os
import threading
import time

import coverage


def coverage_init(registry: object, options: object) -> None:
    """Called in every process that is measured, before anything of it runs."""
    os.register_at_fork(after_in_child=lambda: threading.Thread(target=_save, daemon=True).start())


def _save() -> None:
    while (current := coverage.Coverage.current()) is not None:
        time.sleep(1)
        with contextlib.suppress(Exception):  # a thread of the fork adds to what is being written: next time
            current.save()
