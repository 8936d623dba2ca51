"""Several writers: sessions execute units of one batch at once and commit them in the publisher's order.

A unit is a run of whole transactions; here each has a session of its own. Sessions die at any point, with the reply of
their COMMIT or without; another attempt of the task takes over while the old one goes on; a command changes table
states. A statement of the target is one step. What a unit finds when it is executed is what was committed by then.

Some dependencies of units are known from the changes, by their keys. Others are not: the publisher does not send which
value of a unique index a row gives back. Those are found on the target, by a lock or by a deviation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

DEATHS = 1
TAKE_OVERS = 1  #: of a task that still goes on


class Failure(Enum):
    """What can go wrong."""

    NEVER_WAS = "a reader sees a state that the publisher never had"
    FENCED = "a task that was fenced commits"
    WRONG_BLAME = "a change is blamed that is not at fault"


@dataclass(frozen=True)
class Rules:
    """The rules, all on."""

    #: A unit commits only if the ledger is where its predecessor leaves it.
    compared_and_set: bool = True
    #: And only under the epoch of its task.
    fenced: bool = True
    #: And only if the table states are those that it was executed by.
    states_compared: bool = True
    #: A unit is executed after those have committed with which it has a key in common.
    dependents_wait: bool = True
    #: A row that is missing, or in the way, makes the unit fail: nothing is skipped before its turn has come.
    deviations_fail: bool = True
    #: A unit whose effect depends on others without meeting them is executed alone.
    barriers_stand_alone: bool = True
    #: A fault is named by the replay, in order.
    named_by_replay: bool = True
    #: The end of the predecessor is waited for on the target, which sees who waits for whom.
    order_awaited_on_target: bool = True
    #: So is, where the predecessor has not begun, the end of the unit that it waits for.
    holder_up_awaited_on_target: bool = True


class Rows(NamedTuple):
    """The rows of the target: three rows with keys, a value of a unique index, and what a trigger made of ``b``."""

    a: int = 0
    b: int = 0
    v: int = 0
    made: int = 0
    w: int = 0


class Unit(NamedTuple):
    """One unit of a task: its session is ``idle``, has ``executed`` it, ``sent`` its end, or is ``done`` or ``failed``.

    ``effect`` is what it has written and not committed.
    """

    phase: str = "idle"
    effect: tuple[tuple[str, int], ...] = ()
    locks: str = ""


class Task(NamedTuple):
    """One attempt. ``base`` is where its batch began, ``states`` the version that it read."""

    epoch: int
    base: int
    states: int
    mode: str = "together"  #: together, draining, serial, dead
    units: tuple[Unit, ...] = (Unit(), Unit(), Unit(), Unit(), Unit())


class State(NamedTuple):
    """Target and tasks; the last task is the newest."""

    ledger: int = 0
    epoch: int = 1
    states: int = 0
    changed_at: int = -1  #: where the ledger was when a command changed table states
    rows: Rows = Rows()
    tasks: tuple[Task, ...] = (Task(1, 0, 0),)
    deaths: int = 0
    taken_over: int = 0
    failure: Failure | None = None


Steps: TypeAlias = Iterator[tuple[str, State]]

#: Units that a unit must wait for because of a common key.
_KEYS = {2: 0}
#: A trigger fires in this one.
_BARRIER = 4
#: Of 3 a lock that 0 needs, too, as two rows of one page of an index do.
_LOCKS = ("a", "bv", "av", "a", "m")
_UNITS = 5


def _effect(unit: int, rows: Rows, states: int) -> tuple[tuple[tuple[str, int], ...], bool]:
    """Execute a unit on what is committed: what it writes, and whether it found all as the publisher did.

    From ``states`` 1 on, changes of ``a`` are not apply's.
    """
    if unit == 0:
        return ((("a", 1),), rows.a == 0) if not states else ((), True)
    if unit == 1:  # needs what a gave back, takes v and gives it back
        return (("b", 1),), rows.b == 0 and rows.v == 0 and (rows.a == 1 or states > 0)
    if unit == 2:
        return ((("v", 1),), rows.v == 0) if states else ((("v", 1), ("a", 2)), rows.v == 0 and rows.a == 1)
    if unit == 3:
        return (("w", 1),), rows.w == 0
    return (("made", 1 + rows.b + rows.v),), True


def _publisher(ledger: int, changed_at: int) -> Rows:
    """Return the rows at a position of the ledger."""
    rows = Rows()
    for unit in range(ledger):
        effect, _ = _effect(unit, rows, int(0 <= changed_at <= unit))
        rows = rows._replace(**dict(effect))
    return rows


@dataclass(frozen=True)
class Writers:
    """The model."""

    rules: Rules

    def first(self) -> State:
        """A task has claimed the epoch and has a batch of five units."""
        return State()

    def failure(self, state: State) -> Failure | None:
        """Compare what a reader sees with what the publisher had."""
        if state.failure is not None:
            return state.failure
        return Failure.NEVER_WAS if state.rows != _publisher(state.ledger, state.changed_at) else None

    def is_end(self, state: State) -> bool:
        """All is applied."""
        return state.ledger == _UNITS

    def steps(self, state: State) -> Steps:
        """Everything that may happen next."""
        if state.states == 0:
            yield "a command changes table states", state._replace(states=1, changed_at=state.ledger)
        for number, task in enumerate(state.tasks):
            for name, after, changed in self._task(state, task):
                tasks = (*state.tasks[:number], changed, *state.tasks[number + 1 :])
                yield f"task {task.epoch}: {name}", after._replace(tasks=tasks)
        if state.tasks[-1].mode == "dead":
            yield "another attempt begins", self._begun(state)
        elif state.taken_over < TAKE_OVERS:
            yield "another attempt takes over", self._begun(state)._replace(taken_over=state.taken_over + 1)

    def _begun(self, state: State) -> State:
        """Begin where the ledger is. Of older tasks only the last is kept, and only where it still acts."""
        epoch = state.epoch + 1
        old = [task for task in state.tasks[-1:] if self._acts(task)]
        return state._replace(epoch=epoch, tasks=(*old, Task(epoch, state.ledger, state.states)))

    def _acts(self, task: Task) -> bool:
        return task.mode != "dead" or any(unit.phase == "sent" for unit in task.units)

    # --- one task

    def _task(self, state: State, task: Task) -> Iterator[tuple[str, State, Task]]:
        """Yield what may happen to a task: its name, the target behind it, the task behind it."""
        for number, unit in enumerate(task.units):
            if unit.phase == "idle" and task.mode == "together" and number >= task.base:
                yield from self._execute(state, task, number)
            elif unit.phase == "executed" and task.mode == "together":
                if self._is_seen(task, number) or self._is_turn(task, number):
                    yield f"sends the end of {number}", state, _with(task, number, unit._replace(phase="sent"))
            elif unit.phase == "sent":
                yield from self._end(state, task, number)
            if unit.phase in ("executed", "sent"):
                yield from self._victim(state, task, number)
        if task.mode != "dead" and state.deaths < DEATHS:
            yield "loses a session", state._replace(deaths=state.deaths + 1), _dead(task)
        if task.mode == "together" and any(unit.phase == "failed" for unit in task.units):
            yield "drains", state, task._replace(mode="draining")
        if task.mode == "draining":
            yield from self._drain(state, task)
        if task.mode == "serial":
            yield from self._replay(state, task)

    def _is_seen(self, task: Task, number: int) -> bool:
        """Return whether the target sees what a unit waits for: the predecessor, or who holds that up, has begun."""
        if not self.rules.order_awaited_on_target:
            return False
        before = number - 1
        if self.rules.holder_up_awaited_on_target:
            while before >= task.base and not self._has_begun(task, before) and before in _KEYS:
                before = _KEYS[before]
        return before < task.base or self._has_begun(task, before)

    def _has_begun(self, task: Task, number: int) -> bool:
        """Return whether a unit is executed, or waits for a lock."""
        if task.units[number].phase != "idle":
            return True
        key = not self.rules.dependents_wait or number not in _KEYS or self._is_turn(task, _KEYS[number] + 1)
        return key and (not self.rules.barriers_stand_alone or number != _BARRIER or self._is_turn(task, number))

    def _is_turn(self, task: Task, number: int) -> bool:
        return all(unit.phase == "done" for unit in task.units[task.base : number])

    def _execute(self, state: State, task: Task, number: int) -> Iterator[tuple[str, State, Task]]:
        if self.rules.dependents_wait and number in _KEYS and not self._is_turn(task, _KEYS[number] + 1):
            return
        if self.rules.barriers_stand_alone and number == _BARRIER and not self._is_turn(task, number):
            return
        if self._holders(state, task, number):
            return
        effect, good = _effect(number, state.rows, task.states)
        if good:
            yield f"executes {number}", state, _with(task, number, Unit("executed", effect, _LOCKS[number]))
        elif not self.rules.named_by_replay:
            yield f"reports a fault of {number}", state._replace(failure=Failure.WRONG_BLAME), task
        elif self.rules.deviations_fail:
            yield f"fails at {number}", state, _with(task, number, Unit("failed"))
        else:
            yield f"skips a row of {number}", state, _with(task, number, Unit("executed"))

    def _holders(self, state: State, task: Task, number: int) -> list[tuple[int, int]]:
        """Find units that hold a lock that one needs, by the epochs of their tasks."""
        return [
            (other.epoch, place)
            for other in state.tasks
            for place, unit in enumerate(other.units)
            if (other.epoch, place) != (task.epoch, number) and set(unit.locks) & set(_LOCKS[number])
        ]

    def _end(self, state: State, task: Task, number: int) -> Iterator[tuple[str, State, Task]]:
        """Wait for the predecessor, compare and set, commit; all of it on the target."""
        before = task.units[number - 1].phase if number > task.base else "done"
        open_before = before in ("executed", "sent") or (before == "idle" and task.mode == "together")
        if self.rules.order_awaited_on_target and open_before:
            return
        if self.rules.compared_and_set and state.ledger != number:
            yield f"is refused at {number}", state, _with(task, number, Unit("failed"))
        elif self.rules.fenced and task.epoch != state.epoch:
            yield f"is fenced at {number}", state, _with(task, number, Unit("failed"))
        elif self.rules.states_compared and task.states != state.states:
            yield f"has decided {number} by old states", state, _with(task, number, Unit("failed"))
        else:
            failure = Failure.FENCED if task.epoch != state.epoch else None
            rows = state.rows._replace(**dict(task.units[number].effect))
            after = state._replace(rows=rows, ledger=number + 1, failure=failure)
            yield f"commits {number}", after, _with(task, number, Unit("done"))

    def _victim(self, state: State, task: Task, number: int) -> Iterator[tuple[str, State, Task]]:
        """Let the target end a deadlock: an earlier unit needs what this one holds while this one waits for it."""
        waits = task.units[number].phase == "sent"
        for earlier in range(task.base, number):
            needed = task.units[earlier].phase == "idle" and set(_LOCKS[earlier]) & set(task.units[number].locks)
            if waits and needed and self.rules.order_awaited_on_target:
                yield f"{number} yields to {earlier}", state, _with(task, number, Unit("failed"))

    def _drain(self, state: State, task: Task) -> Iterator[tuple[str, State, Task]]:
        """End what was not sent; what was sent ends by itself."""
        left = tuple(unit if unit.phase in ("done", "sent") else Unit("failed") for unit in task.units)
        if left != task.units:
            yield "rolls back", state, task._replace(units=left)
        elif not any(unit.phase == "sent" for unit in left):
            yield "has drained", state, task._replace(mode="serial")

    def _replay(self, state: State, task: Task) -> Iterator[tuple[str, State, Task]]:
        """Apply the first unit that is left as one session does: under the lock, by the states of now; then go on."""
        done = [number for number in range(task.base, _UNITS) if task.units[number].phase == "done"]
        position = max(done, default=task.base - 1) + 1
        if position == _UNITS:
            return
        if state.epoch != task.epoch or state.ledger != position:
            yield "must restart", state, _dead(task)
            return
        if self._holders(state, task, position):
            return
        effect, good = _effect(position, state.rows, state.states)
        if not good:
            yield "reports a fault", state._replace(failure=Failure.WRONG_BLAME), task
            return
        after = state._replace(rows=state.rows._replace(**dict(effect)), ledger=position + 1)
        yield f"replays {position}", after, Task(task.epoch, position + 1, state.states)


def _with(task: Task, number: int, unit: Unit) -> Task:
    return task._replace(units=(*task.units[:number], unit, *task.units[number + 1 :]))


def _dead(task: Task) -> Task:
    """End a task: what was sent still happens, nobody hears of it; the rest is rolled back."""
    left = tuple(unit if unit.phase in ("done", "sent") else Unit("failed") for unit in task.units)
    return task._replace(mode="dead", units=left)
