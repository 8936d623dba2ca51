"""The launcher's view of workers: when to start one, whether it is alive, and what to do after its end.

Mirrors logicalrep_worker_launch and the bookkeeping of ProcessSyncingTablesForApply. The work of a worker is not known
here. Entry points: :mod:`~pgsub.launcher.workers.apply_worker`, :mod:`~pgsub.launcher.workers.sync_workers`.
"""
