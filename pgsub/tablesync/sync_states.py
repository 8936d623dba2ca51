"""The states of a table's synchronization. Mirrors the NOTES of tablesync.c.

``i`` → ``d`` → ``f`` → ``s`` → ``r`` are stored (``pgsub/target/ledger/states.py`` goes from one to the next); ``w``
(syncwait) and ``c`` (catchup) exist only while a worker lives and are never stored. From ``f`` on a crash never copies
again.
"""

from __future__ import annotations

INIT, DATASYNC, FINISHEDCOPY, SYNCWAIT, CATCHUP, SYNCDONE, READY = "idfwcsr"
