"""Workers as their launcher sees them: when one is started, whether it is alive, and what follows its end.

Mirrors logicalrep_worker_launch and the bookkeeping of ProcessSyncingTablesForApply. What a worker does is not
known here. Entry points: :mod:`~pgsub.launcher.workers.apply_worker`, :mod:`~pgsub.launcher.workers.sync_workers`.
"""
