"""What stands in the way of a switchover, found on both servers; nothing is changed on either.

Nothing of the server corresponds to it; the way back is checked as :mod:`pgsub.commands.preflight` checks a new
subscription. Entry point: :func:`~pgsub.commands.switchover.obstacles.search.find`.
"""
