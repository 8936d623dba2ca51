"""A random workload for minutes with pgsub and the server's own subscriber attached, and every trouble there is.

``make soak ARGS="--minutes 60 --json FILE"``. Servers, processes, lines, locks, origins and the state store are struck
at random, from the seed that is printed. At quiet points and at the end both targets must be equal to each other and to
the publisher; at the end every committed transaction is there exactly once, and nothing is left over. Between the
troubles some bursts are left alone: how their lag grows and vanishes is written as a time series, so that one that
swings shows.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import soak_audit as audit
import workload_meeting as meeting
from soak_ground import COMMON, LIMIT, Ground
from soak_lag import QUIET
from soak_scenes import Scenes
from soak_troubles import ALONE, Troubles

#: Seconds of lag after a burst has been drained and nobody writes, more than the server's: more is an oscillation.
_SWING = 1.0


class Soak:
    """The course of it.

    :param folder: private, for the program's state.
    :param burst: small transactions of a burst; its large one has as many rows.
    """

    def __init__(self, folder: Path, seed: int, burst: int) -> None:
        self.chance = random.Random(seed)
        self.ground = Ground(folder, self.chance)
        self.scenes = Scenes(self.ground, random.Random(self.chance.random()), burst)
        self.troubles = Troubles(self.ground, random.Random(self.chance.random()))
        self.events: list[tuple[float, str]] = []
        self.bursts: list[dict[str, Any]] = []
        self.wrong: list[str] = []  #: what was not equal
        self.transactions = self.comparisons = 0
        self._seed = seed

    def __enter__(self) -> Soak:
        self.ground.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.ground.__exit__()

    def work(self, minutes: float) -> None:
        """Bursts, troubles and pauses for so long, at least one trouble and one burst; then the audit."""
        deadline = time.monotonic() + minutes * 60
        self.ground.settle()
        self._say(f"encodings {self.ground.encodings}, {self.ground.origins} replication origins")
        rounds = [self._troubled, self._measured, self._troubled, self._copied, self._troubled, self._meeting]
        for number, one in enumerate(itertools.cycle(rounds)):
            if number >= 2 and time.monotonic() > deadline:
                break
            one()
            time.sleep(self.chance.choice([0.0, 0.2, 1.0]))
        self._audit()

    def _audit(self) -> None:
        ground = self.ground
        ground.disarm()
        ground.finish()
        with ground.rest():
            self._say("audit")
            ground.lag.stop()
            for target in (ground.subdb, ground.native):  # what the last beats wrote while it stopped
                last = int(ground.pubdb.value("SELECT coalesce(max(n), 0) FROM beat"))
                target.wait("SELECT coalesce(max(n), 0) FROM beat", value=last, seconds=LIMIT)
            self.wrong += [*audit.differences(ground), *audit.exactly_once(ground)]
            self.transactions = audit.transactions(ground)
            self.wrong += audit.end(ground)

    def _compare(self) -> None:
        """At a quiet point; what is prepared may hold locks that reading would wait for."""
        self.ground.finish()
        with self.ground.rest():
            found = audit.differences(self.ground, tuple(name for name in COMMON if name != "beat"))
        assert not found, f"not equal: {found}"
        self.comparisons += 1

    def _measured(self) -> None:
        """A burst that nobody disturbs, from no lag until there is none again, and a quiet time after it."""
        lag = self.ground.lag
        self.ground.disarm()
        self.ground.settle()
        begun = lag.now()
        self.scenes.burst()
        ended = lag.now()
        drained = self.ground.settle()
        time.sleep(QUIET)
        found = lag.behaviour(begun, drained, ended)
        self.bursts.append({"began": round(begun, 3), "ended": round(ended, 3), **found})
        self._say(f"burst of {ended - begun:.1f} s: {found}")
        self._compare()

    def _meeting(self) -> None:
        """A change of the schema while nothing is under way."""
        self.ground.finish()
        with self.ground.rest():
            action = self.chance.choice([one for one in meeting.ACTIONS if one is not meeting.stray])
            self._say(action(self.ground.sides, self.chance))
            if self.chance.random() < 0.3:
                self._say(self.scenes.huge_missing())

    def _copied(self) -> None:
        """Tables are copied while they are written to, in the middle of a trouble or with one of them locked."""
        self.ground.disarm()
        self.ground.finish()  # a slot waits for what is prepared
        self.ground.settle()
        copied = self.scenes.subscribe()
        if self.chance.random() < 0.25:
            self._say("copy with a locked table")
            copied.with_one_locked()
        else:
            copied.begin()
            trouble = self._next_trouble("copy and trouble")
            alone = trouble.__name__ in ALONE
            with self._beside(None if alone else trouble):
                copied.write()
            if alone:
                trouble()
        assert not (wrong := copied.finish()), wrong

    def _troubled(self) -> None:
        """Random transactions, and meanwhile something else or nothing, and troubles at any moment."""
        troubles = [self._next_trouble("trouble") for _ in range(self.chance.choice([1, 1, 2, 3]))]
        alone = [trouble for trouble in troubles if trouble.__name__ in ALONE]
        scenes = self.scenes
        meanwhile = self.chance.choice([scenes.burst, scenes.huge, scenes.rolled_back_late, scenes.looped, None])
        with self._beside(meanwhile), self._beside(*(trouble for trouble in troubles if trouble not in alone)):
            self._phase(self.chance.randrange(50, 200))
        for trouble in alone:
            trouble()

    def _next_trouble(self, what: str) -> Callable[[], None]:
        self.ground.alive()
        trouble = self.troubles.next()
        self.ground.counts[trouble.__name__] += trouble.__name__ != "failpoints"  # those that fire are counted
        self._say(f"{what}: {trouble.__name__.replace('_', ' ')}")
        return trouble

    @contextlib.contextmanager
    def _beside(self, *what: Callable[[], None] | None) -> Iterator[None]:
        """Run something in another thread meanwhile, after a random moment; its error is ours."""
        errors: list[BaseException] = []
        pause = self.chance.random()

        def body() -> None:
            time.sleep(pause)
            try:
                for one in what:
                    if one is not None:
                        one()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        try:
            yield
        finally:
            thread.join()
        if errors:
            raise errors[0]

    def _phase(self, transactions: int) -> None:
        run, pubdb = self.ground.run, self.ground.pubdb
        with contextlib.ExitStack() as stack:
            sessions = [stack.enter_context(contextlib.closing(pubdb.connect())) for _ in range(3)]
            for session in sessions:
                session.execute("SET lock_timeout = '10ms'")
            run.sessions, run.control = sessions, stack.enter_context(contextlib.closing(pubdb.connect()))
            seeds = [self.chance.randrange(2**24) for _ in range(transactions)]
            run.phase(seeds, lambda: time.sleep(self.chance.choice([0.0, 0.05, 0.2])))

    # what it comes to

    def swings(self) -> list[str]:
        """Bursts after whose end pgsub's lag came back."""
        return [
            f"burst at {one['began']:.1f} s"
            for one in self.bursts
            if one["pgsub"]["afterwards"] > _SWING + one["native"]["afterwards"]
        ]

    def document(self) -> dict[str, Any]:
        """All of it: seconds since the start."""
        return {
            "schema_version": 2,
            "seed": self._seed,
            "encodings": self.ground.encodings,
            "faults": dict(self.ground.counts),
            "transactions": self.transactions,
            "comparisons": self.comparisons,
            "statements": dict(self.ground.run.done),
            "bursts": self.bursts,
            "events": self.events,
            "wrong": self.wrong,
            "lag": [[at, lags["native"], lags["pgsub"]] for at, lags in self.ground.lag.series],
        }

    def _say(self, text: str) -> None:
        now = self.ground.lag.now()
        self.events.append((round(now, 3), text))
        self.ground.site.note(text)
        print(f"{now:8.1f} s  {text}", file=sys.stderr, flush=True)


def _soak(folder: Path, seed: int, arguments: argparse.Namespace) -> list[str]:
    with Soak(folder, seed, arguments.burst) as soak:
        try:
            soak.work(arguments.minutes)
            wrong = [*soak.wrong, *soak.swings()]
        except Exception as error:
            traceback.print_exc()
            wrong = [*soak.wrong, str(error), soak.ground.site.said()]
        document = soak.document()
        if arguments.json:
            arguments.json.write_text(json.dumps(document, indent=1) + "\n")
        if wrong and arguments.keep:
            _keep(soak.ground, arguments.keep)
    faults = document["faults"]
    print(", ".join(f"{name} {count}" for name, count in sorted(faults.items())))
    print(
        f"seed {seed}: {sum(faults.values())} faults, {document['transactions']} transactions audited,"
        f" {document['comparisons']} quiet points, {sum(document['statements'].values())} random statements"
    )
    return wrong


def _keep(ground: Ground, folder: Path) -> None:
    """What helps to find out why."""
    shutil.copytree(ground.folder, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("scratch", "*.sock"))
    for name, server in (("publisher.log", ground.publisher), ("target.log", ground.target)):
        shutil.copy(server.log, folder / name)


def main() -> int:
    """Run it.

    :return: exit status: 1 if something is lost, behind, left over, or swings.
    """
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=None, help="of an earlier run")
    parser.add_argument("--burst", type=int, default=20_000, metavar="N", help="transactions of a burst")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write lag over time, bursts and troubles")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where logs and state go if it fails")
    arguments = parser.parse_args()
    os.environ["PGSUB_TEST_THOROUGH"] = "1"  # every command is a process of its own, and none of them is kept
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the servers end with us
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", file=sys.stderr)
    folder = Path(tempfile.mkdtemp(prefix="pgsub-soak-"))
    try:
        wrong = _soak(folder, seed, arguments)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(
        "\n".join(f"FAILED: {text}" for text in wrong)
        or "both targets are equal to the publisher, nothing is left over"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
