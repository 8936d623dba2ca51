"""The Spark task that applies until it is asked to stop.

Mirrors ApplyWorkerMain, start_apply and LogicalRepApplyLoop (``worker.c``). Nothing here knows how a change is made.
Entry points: :mod:`~pgsub.apply.worker.worker` (the task), :mod:`~pgsub.apply.worker.loop` (receive, apply, report),
:mod:`~pgsub.apply.worker.committer` (batches into the target).
"""
