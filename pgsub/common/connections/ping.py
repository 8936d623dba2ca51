"""PQping in a process of its own: libpq writes what a server says meanwhile to stderr as it is.

PQping takes no notice processor (fe-connect.c), and notices could control a terminal, or forge records of a log. Within
this process it would also keep every other thread of Python waiting until the server answers.
"""

from __future__ import annotations

import os
import subprocess
import sys

from psycopg import pq

from pgsub.common.machine.interpreter import importing_environment

_PROGRAM = "import sys; from psycopg import pq; print(int(pq.PGconn.ping(sys.stdin.buffer.read())))"


def ping(conninfo: str) -> pq.Ping:
    """Return what a server answers to an attempt to connect.

    :param conninfo: may hold a password; it is not part of a command line.
    :return: NO_ATTEMPT also where the machine has no process to spare.
    """
    command = [sys.executable, "-c", _PROGRAM]
    environment = {**os.environ, **importing_environment()}
    try:
        done = subprocess.run(
            command, input=conninfo.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
    except OSError:
        return pq.Ping.NO_ATTEMPT
    return pq.Ping(int(done.stdout)) if done.returncode == 0 else pq.Ping.NO_ATTEMPT
