"""``refresh``: updates the set of tables to match the publications.

Mirrors AlterSubscription_refresh (``subscriptioncmds.c``). Entry points: :mod:`~pgsub.commands.refresh.refresh`,
:mod:`~pgsub.commands.refresh.diff` (the planned changes).
"""
