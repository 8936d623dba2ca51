"""The switchover: the right to write goes from the publisher to the target, and a subscription leads back.

Nothing of the server corresponds to it. Here is what both servers are told; the order of the steps is the business of
:mod:`pgsub.commands.switchover`. May not open the state store. Entry points: :mod:`~pgsub.switchover.journal` (who has
the right), :mod:`~pgsub.switchover.fence` (how clients are kept from writing), :mod:`~pgsub.switchover.drain` (all of
the publisher is on the target), :mod:`~pgsub.switchover.way_back` (the slot of the way back),
:mod:`~pgsub.switchover.pause_limit` (how long statements of the pause may take).
"""
