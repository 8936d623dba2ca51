"""The machine that pgsub runs on: lack of resources, safety of paths, and how to start another Python process.

Entry points: :func:`~pgsub.common.machine.out_of_resources.out_of_resources`,
:func:`~pgsub.common.machine.path_safety.exchangeable`.
"""
