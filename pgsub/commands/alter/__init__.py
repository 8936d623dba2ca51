"""``alter``: every change of a subscription.

Mirrors AlterSubscription (``subscriptioncmds.c``). Entry point: :mod:`~pgsub.commands.alter.alter`.
"""
