"""The same hand-over on a target that commits asynchronously: its crash takes back what was not flushed yet.

The workers outlive a crash of the target with all they remember; the publisher keeps what was confirmed to it and drops
a slot for good. Transactions and their LSNs are those of :mod:`handover_model`, one target transaction each. The rules
under test are the switches of :class:`Rules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from models.handover_model import commit_lsn, end_lsn

N = 3
CRASHES = 2


class Failure(Enum):
    """What can go wrong."""

    LOST = "a row is missing although both workers are through"
    DOUBLED = "a row came twice or out of order"
    CONFIRMED_TOO_MUCH = "the publisher will not send again what the target can still lose"
    SLOT_GONE = "the table is in state f and its slot no longer exists"


@dataclass(frozen=True)
class Rules:
    """The rules, all on; the first two guard against the same loss."""

    #: A commit moves remote_lsn by compare-and-set: it must be where this worker left it.
    compare_and_set: bool = True
    #: A lost target session restarts the publisher's streams from the ledger.
    lost_session_restarts_the_streams: bool = True
    #: The flush position of the feedback follows durable commits only.
    feedback_follows_durable_commits: bool = True
    #: A keepalive is confirmed only when everything received before it is durable.
    keepalives_wait_for_durable_commits: bool = True
    #: The sync worker drops its slot only when s is durable.
    slot_outlives_a_volatile_s: bool = True


class Target(NamedTuple):
    """What lives in the target database, data and ledger."""

    remote_lsn: int = 0
    srsubstate: str = "i"
    srsublsn: int = 0
    sync_lsn: int = 0
    rows: tuple[int, ...] = ()


class State(NamedTuple):
    """Publisher, target as seen by sessions and as on its disk, and what the workers remember."""

    committed: int = 0  #: transactions committed on the publisher
    target: Target = Target()
    durable: Target = Target()
    confirmed: int = 0  #: confirmed_flush_lsn of the subscription's slot
    sync_confirmed: int | None = None  #: that of the table's slot; None: no such slot
    apply_next: int | None = None  #: apply's stream position; None: not running
    apply_expects: int = 0  #: remote_lsn as apply left it
    sync_next: int | None = None
    sync_expects: int = 0
    crashes: int = 0


Steps: TypeAlias = Iterator[tuple[str, State]]


def first_sent_from(lsn: int) -> int:
    """The first transaction that a publisher sends when streaming starts at an LSN: the first not covered by it."""
    return next((i for i in range(1, N + 1) if commit_lsn(i) >= lsn), N + 1)


@dataclass(frozen=True)
class Durability:
    """The model."""

    rules: Rules

    def first(self) -> State:
        """Nothing committed, the table in state i, everything durable."""
        return State()

    def failure(self, state: State) -> Failure | None:
        """Doubles, a missing slot and too much confirmed show at once, a loss at the end."""
        rows, durable = state.target.rows, state.durable
        if any(a >= b for a, b in pairwise(rows)):
            return Failure.DOUBLED
        if state.target.srsubstate == "f" and state.sync_confirmed is None:
            return Failure.SLOT_GONE
        if any(durable.remote_lsn <= commit_lsn(i) < state.confirmed for i in range(1, state.committed + 1)):
            return Failure.CONFIRMED_TOO_MUCH
        if self.is_end(state) and len(rows) != N:
            return Failure.LOST
        return None

    def is_end(self, state: State) -> bool:
        """Everything is applied and durable, and the table handed over."""
        target = state.target
        through = state.committed == N and state.apply_next == N + 1 and target.remote_lsn >= commit_lsn(N)
        return through and target.srsubstate in "sr" and target == state.durable

    def steps(self, state: State) -> Steps:
        """Everything that may happen next."""
        if state.committed < N:
            yield f"publisher commits {state.committed + 1}", state._replace(committed=state.committed + 1)
        yield from self._target(state)
        yield from self._apply(state)
        yield from self._apply_confirms(state)
        yield from self._sync(state)
        if state.target.srsubstate == "s" and state.target.remote_lsn >= state.target.srsublsn:
            yield "apply sets r", state._replace(target=state.target._replace(srsubstate="r"))

    def _target(self, state: State) -> Steps:
        if state.target == state.durable:
            return
        yield "target flushes", state._replace(durable=state.target)
        if state.crashes < CRASHES:
            crashed = state._replace(target=state.durable, crashes=state.crashes + 1)
            if self.rules.lost_session_restarts_the_streams:
                crashed = crashed._replace(apply_next=None, sync_next=None)
            yield "target crashes and loses what was not flushed", crashed

    # --- apply

    def _apply(self, state: State) -> Steps:
        position, target = state.apply_next, state.target
        if position is None:
            start = first_sent_from(max(target.remote_lsn, state.confirmed))
            yield "apply starts", state._replace(apply_next=start, apply_expects=target.remote_lsn)
            return
        if position <= state.committed:
            yield self._apply_commits(state, position)
        if state.crashes < CRASHES:
            yield "apply crashes", state._replace(apply_next=None, crashes=state.crashes + 1)

    def _apply_commits(self, state: State, position: int) -> tuple[str, State]:
        target = state.target
        if self.rules.compare_and_set and target.remote_lsn != state.apply_expects:
            return "apply finds another remote_lsn and restarts", state._replace(apply_next=None)
        handed_over = target.srsubstate in "sr" and target.srsublsn <= commit_lsn(position)
        rows = (*target.rows, position) if handed_over else target.rows
        target = target._replace(remote_lsn=end_lsn(position), rows=rows)
        committed = state._replace(target=target, apply_next=position + 1, apply_expects=end_lsn(position))
        return f"apply commits {position} seeing {target.srsubstate}", committed

    def _apply_confirms(self, state: State) -> Steps:
        source = state.durable if self.rules.feedback_follows_durable_commits else state.target
        if source.remote_lsn > state.confirmed:
            yield f"apply confirms {source.remote_lsn}", state._replace(confirmed=source.remote_lsn)
        position = state.apply_next
        if position is None or position > N or commit_lsn(position) <= state.confirmed:
            return
        received = end_lsn(position - 1) if position > 1 else 0
        if state.durable.remote_lsn >= received or not self.rules.keepalives_wait_for_durable_commits:
            lsn = commit_lsn(position)
            yield f"apply confirms a keepalive's {lsn}", state._replace(confirmed=lsn)

    # --- tablesync

    def _sync(self, state: State) -> Steps:
        if state.target.srsubstate == "i":
            for lsn in (end_lsn(state.committed), commit_lsn(state.committed + 1)):
                yield f"sync creates its slot and copies at {lsn}", self._copied(state, lsn)
        elif state.target.srsubstate == "f":
            if state.sync_next is None and state.sync_confirmed is not None:
                start = first_sent_from(max(state.target.sync_lsn, state.sync_confirmed))
                yield "sync restarts", state._replace(sync_next=start, sync_expects=state.target.sync_lsn)
            elif state.sync_next is not None:
                yield from self._sync_works(state, state.sync_next)
        seen = state.durable if self.rules.slot_outlives_a_volatile_s else state.target
        if seen.srsubstate == "s" and state.sync_confirmed is not None:
            yield "sync drops its slot", state._replace(sync_confirmed=None, sync_next=None)

    def _copied(self, state: State, lsn: int) -> State:
        target = state.target._replace(srsubstate="f", sync_lsn=lsn, rows=tuple(range(1, state.committed + 1)))
        position = state.committed + 1
        return state._replace(target=target, sync_confirmed=lsn, sync_next=position, sync_expects=lsn)

    def _sync_works(self, state: State, position: int) -> Steps:
        target = state.target
        if self.rules.compare_and_set and target.sync_lsn != state.sync_expects:
            yield "sync finds another position and restarts", state._replace(sync_next=None)
        else:
            if position <= state.committed:
                lsn = end_lsn(position)
                applied = target._replace(sync_lsn=lsn, rows=(*target.rows, position))
                moved = state._replace(target=applied, sync_next=position + 1, sync_expects=lsn)
                yield f"sync commits {position}", moved
            if target.remote_lsn <= target.sync_lsn:
                done = target._replace(srsubstate="s", srsublsn=target.sync_lsn)
                yield f"sync sets s at {target.sync_lsn}", state._replace(target=done)
        source = state.durable if self.rules.feedback_follows_durable_commits else target
        if source.srsubstate == "f" and state.sync_confirmed is not None and source.sync_lsn > state.sync_confirmed:
            yield f"sync confirms {source.sync_lsn}", state._replace(sync_confirmed=source.sync_lsn)
