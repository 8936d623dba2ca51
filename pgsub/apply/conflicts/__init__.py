"""Describes conflicts and faults in the server's words, and records them.

Mirrors ``conflict.c`` and the error context of ``worker.c``. Nothing here decides how a conflict is handled. Entry
points: :class:`~pgsub.apply.conflicts.error_context.Place` (the change being applied),
:mod:`~pgsub.apply.conflicts.unique_violation` (the full report of a conflict).
"""
