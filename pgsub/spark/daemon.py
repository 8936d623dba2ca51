"""The parent of all python workers on this machine (``spark.python.daemon.module``).

Spark puts its own ``pyspark.zip`` first on the workers' path, and what is imported from a zip is compiled anew each
time: half a second of the first job. Here the installed package, the same code, is imported instead.
"""

import sys

if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if not path.endswith(("/pyspark.zip", "-src.zip"))]
    from pyspark.daemon import manager

    manager()
