"""Sequences of a subscription: which there are, how they are defined, and their values on both servers.

Mirrors sequencesync.c, for publishers that know nothing of it too. Tables are no business of this room, and it may not
open the state store. Entry points: :mod:`~pgsub.tablesync.sequences.synchronization` (all of a subscription),
:mod:`~pgsub.tablesync.sequences.reading` (both servers), :mod:`~pgsub.tablesync.sequences.writing` (the target),
:mod:`~pgsub.tablesync.sequences.comparison` (what differs).
"""
