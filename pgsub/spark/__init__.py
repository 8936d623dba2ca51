"""Spark session and job submission. Only this package imports pyspark. It does not know what jobs do.

``jvm`` starts the Java process, ``settings`` reads the user's settings, ``session`` opens and closes the context,
``executors`` waits for a cluster's executors, ``jobs`` runs functions. The package itself imports nothing, so commands
that move no data never load pyspark.
"""
