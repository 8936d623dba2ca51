"""``create``, ``drop``, ``enable``, ``disable``, ``disable-on-error``: the life of a definition.

Mirrors CreateSubscription and DropSubscription (``subscriptioncmds.c``). Entry points:
:mod:`~pgsub.commands.subscription.create`, :mod:`~pgsub.commands.subscription.registration` (ledger, slot and state
store, or nothing).
"""
