"""The parent of all python workers on this machine (``spark.python.daemon.module``).

Spark puts its own ``pyspark.zip`` first on the workers' path, and what is imported from a zip is compiled anew each
time: half a second of the first job. Here the installed package, the same code, is imported instead.

A worker is a fork of this process, so what is imported here once is there in each of them: a copy, a catch-up, and
apply after its worker was killed begin a second sooner.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys

#: Names the modules that workers need, with commas between them.
IMPORTED = "PGSUB_WORKER_MODULES"

#: pyspark.worker imports them where they are installed, and they start threads, which are not there after a fork.
_WITH_THREADS = ("pandas", "pyarrow")


def _import_for_workers() -> None:
    """Import the modules of workers; a failure is left to the worker that needs the module."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start them when it is imported
    spark = () if any(map(importlib.util.find_spec, _WITH_THREADS)) else ("pyspark.worker",)
    for name in (*spark, *filter(None, os.environ.get(IMPORTED, "").split(","))):
        try:
            importlib.import_module(name)
        except Exception:
            pass
    gc.freeze()  # or the collector of every worker would copy all of it


if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if not path.endswith(("/pyspark.zip", "-src.zip"))]
    _import_for_workers()
    from pyspark.daemon import manager

    manager()
