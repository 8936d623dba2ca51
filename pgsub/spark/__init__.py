"""Spark session and job submission. Only this package imports pyspark. It does not know what jobs do.

``java`` finds a Java runtime, ``jvm_flags`` and ``class_archive`` speed up its start, ``settings`` reads the user's
settings, ``session`` opens and closes the context, ``executors`` waits for a cluster's executors, ``jobs`` runs
functions. The package itself imports nothing, so commands that move no data never load pyspark.
"""
