"""``create``, ``drop``, ``enable``, ``disable``, ``disable-on-error``: creating, changing and removing a definition.

Mirrors CreateSubscription and DropSubscription (``subscriptioncmds.c``). Entry points:
:mod:`~pgsub.commands.subscription.create`, :mod:`~pgsub.commands.subscription.registration` (ledger, slot and state
store, or nothing).
"""
