"""Rules for conflicts (``--on-conflict``): which rule holds, who wins, and what is done.

Goes beyond ``conflict.c``, which only reports. Changes come here one by one. Entry points:
:class:`~pgsub.apply.resolve.resolver.Resolver`, :mod:`~pgsub.apply.resolve.rules`,
:mod:`~pgsub.apply.resolve.winner` (who wins, as a pure function).
"""
