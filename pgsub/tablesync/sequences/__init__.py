"""Sequences of a subscription: which exist, their definitions, and their values on both servers.

Mirrors sequencesync.c, also for publishers of older versions. Tables are not handled here, and nothing here may open
the state store. Entry points: :mod:`~pgsub.tablesync.sequences.synchronization` (all of a subscription),
:mod:`~pgsub.tablesync.sequences.reading` (both servers), :mod:`~pgsub.tablesync.sequences.writing` (the target),
:mod:`~pgsub.tablesync.sequences.comparison` (differences).
"""
