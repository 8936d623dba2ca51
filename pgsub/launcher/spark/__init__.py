"""The launcher's use of Spark: its driver, which is opened once and watched, and the number of its task slots.

The server has no counterpart. This package knows which function a job calls, but not what the function does. Entry
point: :class:`~pgsub.launcher.spark.driver.Engine`.
"""
