"""Sessions on the target: how they are opened, their role, the trust in the ledger, and the tags on their writes.

Mirrors InitializeLogRepWorker (``worker.c``), ``usercontext.c`` and the session API of ``origin.c``. Entry points:
:func:`~pgsub.target.session.connect.connect`, :mod:`~pgsub.target.session.roles`,
:func:`~pgsub.target.session.origins.attach`.
"""
