"""The parent of all python workers on this machine (``spark.python.daemon.module``).

Spark puts its own ``pyspark.zip`` first on the workers' path. Modules from a zip file are compiled at each import,
which takes half a second of the first job. This module imports the same code from the installed package instead.

Workers are forks of this process, so they inherit its imported modules. A copy, a catch-up, or apply after its worker
was killed starts a second sooner.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys

#: Variable with the comma-separated names of modules that workers need.
IMPORTED = "PGSUB_WORKER_MODULES"

#: Modules that pyspark.worker imports if installed. They start threads, which do not survive a fork.
_WITH_THREADS = ("pandas", "pyarrow")


def _import_for_workers() -> None:
    """Import the workers' modules. A failure is left to the worker that needs the module."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start threads at its import
    spark = () if any(map(importlib.util.find_spec, _WITH_THREADS)) else ("pyspark.worker",)
    for name in (*spark, *filter(None, os.environ.get(IMPORTED, "").split(","))):
        try:
            importlib.import_module(name)
        except Exception:
            pass
    gc.freeze()  # otherwise garbage collection would copy everything in each worker


if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if not path.endswith(("/pyspark.zip", "-src.zip"))]
    _import_for_workers()
    from pyspark.daemon import manager

    manager()
