"""Assembles the walsender's bytes into whole remote transactions.

Mirrors the outer half of LogicalRepApplyLoop and the stream files of ``worker.c``. Nothing here knows the target. Entry
points: :class:`~pgsub.apply.stream.receiver.Receiver` (the thread that reads the socket),
:class:`~pgsub.apply.stream.assembler.Assembler` (messages to transactions),
:class:`~pgsub.apply.stream.transactions.RemoteTransaction`.
"""
