"""What comparing costs beside copying: ``--reconcile``.

``verify`` of equal rows, ``--adopt`` of rows of which one in a thousand differs, and ``verify`` behind ten million
changes that finds the one row which is not as they left it, are measured beside the copy of the same rows, and of a
copy that is killed near its end the bytes that the publisher sends for the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing

from psycopg.conninfo import make_conninfo

from benchmarks.arena import PUBLICATION, Arena, BenchmarkFailed, Database
from benchmarks.cases import Sync
from benchmarks.link import Proxy
from benchmarks.subscribers import Pgsub

_TABLE = "pgbench_accounts"
#: Part of the rows that are there when the copy is killed.
_LOST_AT = 0.9
#: Chunks of that copy: as many as a table of 6 GB has.
_CHUNKS = 100
_LIMIT = 3600.0
#: Times that every row is changed, in transactions of so many rows.
_CHANGES, _ROWS_A_TRANSACTION = 2, 50_000
_UNLIMITED = 1e12
#: Most that a figure may be, on a quiet machine.
GOALS = {"verify": 0.5, "resume": 0.15}


def main(facts: Mapping[str, str | int | float], *, quick: bool) -> int:
    """Measure, and print what was found.

    :return: exit status: 1 where something failed.
    """
    size = Sync.quick if quick else Sync.full
    print(f"{facts['cpu']}, {facts['cores']} cores, PostgreSQL {facts['postgresql']}; {size:,} rows")
    try:
        with Arena() as arena, closing(Pgsub(arena)) as pgsub:
            for name, (found, said) in {**_times(arena, pgsub, size), **_bytes(arena, pgsub, size)}.items():
                goal = f"  (goal: at most {GOALS[name]:g})" if name in GOALS else ""
                print(f"{name:<8}{found:>8.3f}  {said}{goal}")
    except BenchmarkFailed as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    return 0


Figures = dict[str, tuple[float, str]]


def _times(arena: Arena, pgsub: Pgsub, size: int) -> Figures:
    """Times of a comparison as a part of that of the copy."""
    source, target = _fresh(arena, pgsub, size)
    pgsub.serve()
    copy = _seconds(lambda: _create(pgsub, source.conninfo, target))
    verify = _seconds(lambda: pgsub.command("verify", pgsub.name))
    target.execute(f"UPDATE {_TABLE} SET abalance = abalance + 1 WHERE aid % 1000 = 0")
    words = ("--resync", f"public.{_TABLE}", "--adopt", "--yes")
    adopt = _seconds(lambda: pgsub.command("refresh", pgsub.name, *words))
    _check(source, target)
    fault, said = _fault(source, target, pgsub, size)
    pgsub.command("drop", pgsub.name, "--yes")
    return {
        "verify": (verify / copy, f"{verify:.1f} s of equal rows, {copy:.1f} s for their copy"),
        "adopt": (adopt / copy, f"{adopt:.1f} s where one row in a thousand differs"),
        "fault": (fault / copy, said),
    }


def _fault(source: Database, target: Database, pgsub: Pgsub, size: int) -> tuple[float, str]:
    """Seconds in which the one row is found that was changed on the target behind as many changes."""
    begun = time.monotonic()
    for _ in range(_CHANGES):
        for first in range(1, size + 1, _ROWS_A_TRANSACTION):
            rows = f"aid BETWEEN {first} AND {first + _ROWS_A_TRANSACTION - 1}"
            source.execute(f"UPDATE {_TABLE} SET abalance = abalance + 1 WHERE {rows}")
    pgsub.command("wait", pgsub.name, "--for", "caught-up", "--timeout", "60m")
    replicated = time.monotonic() - begun
    planted = size // 3
    target.execute(f"UPDATE {_TABLE} SET abalance = abalance - 1 WHERE aid = {planted}")
    begun = time.monotonic()
    found = json.loads(pgsub.command("verify", pgsub.name, "--json", code=6))
    seconds = time.monotonic() - begun
    [table] = found["tables"]
    if [(one["kind"], one["key"]) for one in table["differences"]] != [("different", {"aid": str(planted)})]:
        raise BenchmarkFailed(f"not the planted row alone was found: {table}")
    pause = f"apply paused for {1000 * found['pause']:.0f} ms"
    return seconds, f"{seconds:.1f} s for one row behind {_CHANGES * size:,} changes ({replicated:.0f} s); {pause}"


def _bytes(arena: Arena, pgsub: Pgsub, size: int) -> Figures:
    """What the publisher sends once a copy was lost, as a part of what the whole table takes."""
    source, target = _fresh(arena, pgsub, size)
    with source.connection.cursor() as cursor, cursor.copy(f"COPY {_TABLE} TO STDOUT") as copy:
        whole = sum(len(block) for block in copy)
    pgsub.restart()
    large = int(str(source.value(f"SELECT pg_table_size('{_TABLE}')")))
    with (
        closing(Proxy(("127.0.0.1", arena.publisher.port), _UNLIMITED)) as line,
        _chunks_of(large // _CHUNKS),
    ):
        conninfo = make_conninfo(source.conninfo, host="127.0.0.1", port=line.port)
        pgsub.serve()
        _create(pgsub, conninfo, target, "--no-wait")
        done = "SELECT coalesce(sum(rows_done), 0) FROM pgsub.copy_chunk"
        _until(lambda: int(str(target.value(done))) >= size * _LOST_AT)
        pgsub.kill()
        there, before = int(str(target.value(done))), line.sent
        pgsub.serve()
        _until(lambda: target.value("SELECT bool_and(srsubstate IN ('s', 'r')) FROM pgsub.subscription_rel") is True)
        again = line.sent - before
        pgsub.command("wait", pgsub.name, "--for", "caught-up", "--timeout", "5m")
        _check(source, target)
        pgsub.command("drop", pgsub.name, "--yes")
    said = f"{again / 1e6:.1f} MB of {whole / 1e6:.1f} MB, lost at {there / size:.1%}"
    return {"resume": (again / whole, said)}


@contextlib.contextmanager
def _chunks_of(size: int) -> Iterator[None]:
    os.environ["PGSUB_CHUNK_BYTES"] = str(size)
    try:
        yield
    finally:
        del os.environ["PGSUB_CHUNK_BYTES"]


def _fresh(arena: Arena, pgsub: Pgsub, size: int) -> tuple[Database, Database]:
    source, targets = arena.fresh([pgsub.name])
    target = targets[pgsub.name]
    case = Sync()
    for database in (source, target):
        case.schema(database, size)
    case.source(source, size)
    return source, target


def _create(pgsub: Pgsub, connection: str, target: Database, *options: str) -> None:
    pgsub.command(
        *("create", pgsub.name, "--connection", connection, "--target", target.conninfo),
        *("--publication", PUBLICATION, "--no-binary", *options),
    )


def _check(source: Database, target: Database) -> None:
    if source.digest([_TABLE]) != target.digest([_TABLE]):
        raise BenchmarkFailed("the target is not equal to the source")


def _seconds(work: Callable[[], object]) -> float:
    begun = time.monotonic()
    work()
    return time.monotonic() - begun


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT
    while not condition():
        if time.monotonic() > deadline:
            raise BenchmarkFailed(f"it did not end within {_LIMIT:g} s")
        time.sleep(0.02)
