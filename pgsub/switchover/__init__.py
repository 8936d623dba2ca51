"""The switchover: moves the right to write from the publisher to the target, and replicates in the reverse direction.

The server has no counterpart. This package makes the changes on both servers. :mod:`pgsub.commands.switchover` orders
the steps. It may not open the state store. Entry points: :mod:`~pgsub.switchover.journal` (who has the right),
:mod:`~pgsub.switchover.fence` (preventing clients from writing), :mod:`~pgsub.switchover.drain` (applying everything),
:mod:`~pgsub.switchover.way_back` (the slot of the reverse subscription), :mod:`~pgsub.switchover.pause_limit`
(canceling statements).
"""
