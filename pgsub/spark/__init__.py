"""Spark session and job submission: the only importer of pyspark, and ignorant of what a job does.

``java`` finds a runtime, ``jvm_flags`` and ``class_archive`` make its start short, ``settings`` reads what the user
set, ``session`` opens and closes the context, ``executors`` waits for those of a cluster, ``jobs`` runs functions in
it. This package itself imports nothing, so that commands which move no data never load pyspark.
"""
