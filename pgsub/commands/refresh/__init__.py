"""``refresh``: the set of tables follows the publications.

Mirrors AlterSubscription_refresh (``subscriptioncmds.c``). Entry points: :mod:`~pgsub.commands.refresh.refresh`,
:mod:`~pgsub.commands.refresh.diff` (what would change).
"""
