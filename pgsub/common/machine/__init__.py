"""The machine that pgsub runs on: what it may run out of, who could exchange a path, and how it runs Python again.

Entry points: :func:`~pgsub.common.machine.out_of_resources.out_of_resources`,
:func:`~pgsub.common.machine.path_safety.exchangeable`.
"""
