"""The states of a table as a table. Mirrors the NOTES of tablesync.c.

``i`` → ``d`` → ``f`` → ``s`` → ``r`` are stored; ``w`` (syncwait) and ``c`` (catchup) exist only while a worker lives
and are never stored. From ``f`` on a crash never copies again.
"""

from __future__ import annotations

INIT, DATASYNC, FINISHEDCOPY, SYNCWAIT, CATCHUP, SYNCDONE, READY = "idfwcsr"

WORDS = {
    INIT: "initialize",
    DATASYNC: "data is being copied",
    FINISHEDCOPY: "finished table copy",
    SYNCWAIT: "waiting for apply",
    CATCHUP: "catching up with apply",
    SYNCDONE: "synchronized",
    READY: "ready (normal replication)",
}

#: Which stored state may follow which.
TRANSITIONS = {
    INIT: {DATASYNC},
    DATASYNC: {DATASYNC, FINISHEDCOPY},
    FINISHEDCOPY: {SYNCDONE},
    SYNCDONE: {READY},
    READY: frozenset[str](),
}

STORED = frozenset(TRANSITIONS)


def may_follow(before: str, after: str) -> bool:
    """Whether a stored state may follow another.

    :raises KeyError: ``before`` is never stored.
    """
    return after in TRANSITIONS[before]


def live(stored: str, *, claimed: bool, streaming: bool) -> str:
    """The state shown of a running sync worker: ``w`` and ``c`` are told from what it is doing.

    :param claimed: it fixed where the table changes hands.
    :param streaming: its slot is being streamed.
    """
    if stored != FINISHEDCOPY:
        return stored
    return CATCHUP if claimed or streaming else SYNCWAIT
