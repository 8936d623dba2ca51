"""Conflicts and faults in the server's words, and the record of them.

Mirrors ``conflict.c`` and the error context of ``worker.c``. Nothing here decides what is done about a conflict.
Entry points: :class:`~pgsub.apply.conflicts.error_context.Place` (where apply is),
:mod:`~pgsub.apply.conflicts.report` (the whole report of a conflict).
"""
