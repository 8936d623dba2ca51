"""One use case per module: plain values in, result objects out. Mirrors ``src/backend/commands/subscriptioncmds.c``.

Nothing here prints, asks or ends the process. Progress goes to a :class:`~pgsub.commands.reporter.Reporter`. Errors are
:class:`~pgsub.common.errors.PgsubError`, and SubscriptionNotFound for a name that no subscription has. The command line
uses nothing else. ``docs/python.md`` describes the use by programs.
"""
