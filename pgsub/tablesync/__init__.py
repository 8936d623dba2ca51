"""Table synchronization: copy of a table at its slot's snapshot, catch-up, hand-over to apply.

Mirrors ``tablesync.c``; the hand-over is explained in :mod:`~pgsub.tablesync.sync_worker`. The copy itself lives in
``copy``; what is here decides order, states and slots. ``sequences`` brings the values of sequences, which have no
part in that. Nothing here opens the state store. Entry points:
:mod:`~pgsub.tablesync.coordinator` (one table, as the launcher sees it), :mod:`~pgsub.tablesync.sync_worker`
(catch-up).
"""
