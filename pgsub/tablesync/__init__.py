"""Table synchronization: copy of a table at its slot's snapshot, catch-up, hand-over to apply.

Mirrors ``tablesync.c``; :mod:`~pgsub.tablesync.sync_worker` explains the hand-over. ``copy`` contains the copy itself;
the modules here decide order, states and slots. ``sequences`` synchronizes the values of sequences, which have no part
in that. Nothing here opens the state store. Entry points: :mod:`~pgsub.tablesync.coordinator` (one table, as the
launcher sees it), :mod:`~pgsub.tablesync.sync_worker` (catch-up).
"""
