"""Reports from the state store: ``status``, ``wait``, ``conflicts list``, and the runbook.

Mirrors pg_stat_subscription and pg_stat_subscription_stats. No server is contacted, with two exceptions:
:mod:`~pgsub.commands.status.publisher_views` reads views of the publisher, and ``wait`` its position. Entry points:
:mod:`~pgsub.commands.status.status`, :mod:`~pgsub.commands.status.subscription_status` (one subscription),
:mod:`~pgsub.commands.status.health_check` (``--check``), :mod:`~pgsub.commands.status.next_steps`.
"""
