"""Walks all interleavings of a model: every state that any order of its steps can reach, crashes included.

A model is a first state, a function from a state to its possible next steps, a verdict on a state, and what counts as
a good end. The walk is breadth first, so a counterexample is a shortest one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from enum import Enum
from typing import NamedTuple, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class Model(Protocol[S]):
    """What :func:`explore` wants to know."""

    def first(self) -> S:
        """Return the state before anything happened."""

    def steps(self, state: S) -> Iterable[tuple[str, S]]:
        """Return what may happen next, each with its name."""

    def failure(self, state: S) -> Enum | None:
        """Return what is wrong in this state, if anything."""

    def is_end(self, state: S) -> bool:
        """Whether everything is done here (steps may still be possible)."""


class Exploration(NamedTuple):
    """What a walk found; it stops at the first failure.

    ``stranded`` counts states from which no good end can be reached any more: dead ends and endless loops.
    """

    states: int
    good_ends: int
    stranded: int
    failure: Enum | None
    trace: list[str]


def explore(model: Model[S]) -> Exploration:
    """Walk a model.

    :param model: the model; its states must be immutable values.
    :return: counts, or the first failure with the steps that lead to it.
    """
    first = model.first()
    came_from: dict[S, tuple[S, str] | None] = {first: None}
    predecessors: dict[S, list[S]] = {first: []}
    queue = deque([first])
    ends: list[S] = []
    while queue:
        state = queue.popleft()
        failure = model.failure(state)
        if failure is not None:
            return Exploration(len(came_from), len(ends), 0, failure, _trace(came_from, state))
        if model.is_end(state):
            ends.append(state)
        for name, successor in model.steps(state):
            if successor not in came_from:
                came_from[successor] = (state, name)
                predecessors[successor] = []
                queue.append(successor)
            predecessors[successor].append(state)
    stranded = len(came_from) - len(_reaching(ends, predecessors))
    return Exploration(len(came_from), len(ends), stranded, None, [])


def _trace(came_from: dict[S, tuple[S, str] | None], state: S) -> list[str]:
    names: list[str] = []
    while (link := came_from[state]) is not None:
        state, name = link
        names.append(name)
    return names[::-1]


def _reaching(ends: list[S], predecessors: dict[S, list[S]]) -> set[S]:
    found = set(ends)
    pending = list(ends)
    while pending:
        for state in predecessors[pending.pop()]:
            if state not in found:
                found.add(state)
                pending.append(state)
    return found
