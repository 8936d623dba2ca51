"""Spark as the launcher uses it: its driver, opened once and watched, and how many tasks it has room for.

Nothing of the server corresponds to it. What a job does is not known here, only which function it calls. Entry point:
:class:`~pgsub.launcher.spark.driver.Engine`.
"""
