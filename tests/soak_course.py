"""The course of a soak: bursts, troubles, copies and comparisons, until the time is over; then the audit."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import soak_audit as audit
import workload_meeting as meeting
from soak_ground import COMMON, LIMIT, Ground
from soak_lag import QUIET
from soak_scenes import Scenes
from soak_troubles import ALONE, Troubles
from soak_verify import Planted, Verify

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
        self.verify = Verify(self.ground, random.Random(self.chance.random()))
        self.events: list[tuple[float, str]] = []
        self.bursts: list[dict[str, Any]] = []
        self.wrong: list[str] = []  #: what was not equal
        self.transactions = self.comparisons = 0
        self._seed = seed

    def __enter__(self) -> Soak:
        self.ground.__enter__()
        self.planted = Planted(self.ground, self.verify, random.Random(self.chance.random()))
        return self

    def __exit__(self, *_: object) -> None:
        self.ground.__exit__()

    def work(self, minutes: float) -> None:
        """Bursts, troubles and pauses for so long, at least one of each and one comparison; then the audit."""
        deadline = time.monotonic() + minutes * 60
        self.ground.settle()
        self._say(f"encodings {self.ground.encodings}, {self.ground.origins} replication origins")
        rounds = [self._troubled, self._measured, self._verified, self._troubled, self._copied, self._meeting]
        for number, one in enumerate(itertools.cycle(rounds)):
            if number >= 3 and time.monotonic() > deadline:
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
            self.wrong += self.planted.drop()
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

    def _verified(self) -> None:
        """Comparisons of what is written to, and repairs of what was planted, each in the middle of a trouble."""
        self.ground.disarm()
        self.ground.settle()
        wrong, planted = self.planted.plant(), self.planted
        with self._struck(), self._beside(self.scenes.burst), planted.written():
            self._must_not(self.verify.false_alarms(), planted.found(wrong))
        with self._struck(), planted.written():
            self._must_not(planted.repaired(wrong))
        with planted.written():
            self._must_not(planted.copied())
        self._say(
            f"{self.verify.compared} tables compared, {planted.rows} rows planted, {self.verify.again} times again"
        )

    def _must_not(self, *found: Iterator[str]) -> None:
        assert not (wrong := list(itertools.chain(*found))), "\n".join(wrong)

    @contextlib.contextmanager
    def _struck(self) -> Iterator[None]:
        """A trouble in the middle of the block, or behind it where it cannot be there."""
        trouble = self._next_trouble("verify and trouble")
        alone = trouble.__name__ in ALONE
        with self._beside(None if alone else trouble):
            yield
        if alone:
            trouble()
        self.ground.disarm()

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
            "verify": {"tables": self.verify.compared, "planted": self.planted.rows, "again": self.verify.again},
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
