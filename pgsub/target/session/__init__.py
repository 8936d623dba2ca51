"""Sessions on the target: how they are opened, as whom they write, whose ledger they trust, how writes are tagged.

Mirrors InitializeLogRepWorker (``worker.c``), ``usercontext.c`` and the session API of ``origin.c``. Entry points:
:func:`~pgsub.target.session.connect.connect`, :mod:`~pgsub.target.session.roles`,
:func:`~pgsub.target.session.origins.attach`.
"""
