"""One use case a module: plain values in, result objects out. Mirrors ``src/backend/commands/subscriptioncmds.c``.

Nothing here prints, asks or ends the process: what happens meanwhile goes to a
:class:`~pgsub.commands.reporter.Reporter`, what went wrong is a :class:`~pgsub.common.errors.PgsubError`, and a name
that no subscription has is a SubscriptionNotFound. The command line uses nothing else. ``docs/python.md`` describes
how programs do.
"""
