"""Searches for obstacles to a switchover on both servers. Nothing is changed on either.

The server has no counterpart. The reverse subscription gets the checks of :mod:`pgsub.commands.preflight`. Entry point:
:func:`~pgsub.commands.switchover.obstacles.search.find`.
"""
