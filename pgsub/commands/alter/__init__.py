"""``alter``: everything of a subscription that can change.

Mirrors AlterSubscription (``subscriptioncmds.c``). Entry point: :mod:`~pgsub.commands.alter.alter`.
"""
