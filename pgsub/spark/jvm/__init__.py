"""Spark's Java process. It knows nothing of contexts and jobs.

``java`` finds a Java runtime, ``flags`` and ``class_archive`` speed up its start, ``folders`` makes private folders for
it, and ``process`` starts it and forgets it. The entry points are :func:`~pgsub.spark.jvm.java.find_java`,
:func:`~pgsub.spark.jvm.folders.scratch_folder` and :func:`~pgsub.spark.jvm.process.start_jvm`.
"""
