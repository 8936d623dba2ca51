"""The switchover: the right to write goes from the publisher, which gives it, to the target, which takes it.

Two runs of the command work at it, die, begin again and change their mind at any step, while clients write on whichever
side lets them. A step that is one transaction of one server is one step here; whatever is read first and written later
is two. The rules under test are the switches of :class:`Rules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

GIVING, TAKING = "giving", "taking"
#: The side that a step talks to, where it is only one; others need both.
_NEEDS = {
    **dict.fromkeys(("fence", "end_sessions", "sequences", "give", "take"), GIVING),
    **dict.fromkeys(("end_sessions_there", "set_sequence", "record", "advance", "taking"), TAKING),
}
WRITES = 2  #: of clients, on each side
DEATHS = 2


class Failure(Enum):
    """What can go wrong."""

    BOTH_WRITABLE = "clients can write on both sides"
    LOST = "a write of the giving side never came to the taking side"
    NO_WAY_BACK = "a write of the taking side is not sent back"
    SENT_BACK = "a write of the giving side is sent back to it"
    GIVEN_TWICE = "both sides gave the same value of a sequence"


@dataclass(frozen=True)
class Rules:
    """The rules, all on."""

    #: The right is given away by a commit on the giving side, which an abort there excludes.
    giving_excludes_release: bool = True
    #: It is taken only after it was given.
    taken_only_when_given: bool = True
    #: What was given is released only after the taking side has declined.
    declined_before_release: bool = True
    #: A taking side that has declined takes nothing.
    declined_is_final: bool = True
    #: Sessions from before the fence are ended before apply is waited for.
    old_sessions_end: bool = True
    #: And those of the taking side before the giving side is fenced, by every run.
    old_sessions_end_there: bool = True
    #: It is given only when all that was written is applied.
    drained: bool = True
    #: Sequences are read behind the fence.
    sequences_behind_the_fence: bool = True
    #: A sequence of the taking side never goes backward.
    sequences_never_go_backward: bool = True
    #: The slot of the way back goes to where the taking side was when nobody could write there, as recorded.
    slot_position_is_recorded: bool = True
    #: It is recorded after all was applied.
    slot_position_after_drain: bool = True
    #: A server is taken for gone only when it is.
    gone_does_not_answer: bool = True
    #: What the taking side has taken is brought to its end without the giving side.
    ends_without_giving: bool = True
    #: What was given to a taking side that is gone is released.
    released_without_taking: bool = True


class Run(NamedTuple):
    """One run of the command: its next step, and what it has read."""

    step: str = "look"
    sequence: int = 0
    position: int = 0


class State(NamedTuple):
    """Both servers and the runs.

    ``log`` holds what was committed on the taking side: ``f`` applied, ``c`` of clients; positions count in it.
    """

    giving: str = "open"  #: open, fenced, given, released
    fenced: bool = False
    old_session: bool = True
    written: int = 0
    sequence: int = 0
    taking: str = "prepared"  #: prepared, taken, declined; only an old session can write there before it is taken
    old_session_there: bool = True
    log: str = ""
    applied: int = 0
    taking_sequence: int = 0
    drawn: int = 0  #: values given on the giving side and on the taking side, as bits
    twice: bool = False
    recorded: int = -1  #: position of the slot to be
    slot: int = 0  #: where the slot of the way back is; it was created before
    turned: bool = False  #: the subscription has ended, the one of the way back runs
    runs: tuple[Run, Run] = (Run(), Run("idle"))
    deaths: int = 0
    gone: str = ""  #: the side that has died for good: what was on it is not asked for any more


Steps: TypeAlias = Iterator[tuple[str, State]]


@dataclass(frozen=True)
class Switchover:
    """The model."""

    rules: Rules

    def first(self) -> State:
        """The subscription runs, the slot of the way back exists, the taking side is fenced."""
        return State()

    def failure(self, state: State) -> Failure | None:
        """What shows at once; a loss shows when the subscription has ended."""
        if state.gone:
            return None
        if state.taking == "taken" and (not state.fenced or state.old_session):
            return Failure.BOTH_WRITABLE
        if state.twice:
            return Failure.GIVEN_TWICE
        if "c" in state.log[: state.slot]:
            return Failure.NO_WAY_BACK
        if state.turned and "f" in state.log[state.slot :]:
            return Failure.SENT_BACK
        if state.turned and state.applied < state.written:
            return Failure.LOST
        return None

    def is_end(self, state: State) -> bool:
        """The taking side writes with a way back, or the giving side as before; or the one that is left does."""
        if state.gone == GIVING:
            return state.turned or state.taking == "declined"
        if state.gone == TAKING:
            return state.giving == "released" and not state.fenced
        return state.turned or (state.giving == "released" and not state.fenced)

    def steps(self, state: State) -> Steps:
        """Everything that may happen next."""
        if not state.gone:
            yield from self._clients(state)
            yield from ((f"the {side} side dies for good", state._replace(gone=side)) for side in (GIVING, TAKING))
        if state.applied < state.written and not state.turned and not state.gone:
            yield "apply applies", state._replace(applied=state.applied + 1, log=state.log + "f")
        for number, run in enumerate(state.runs):
            for name, after, changed in self._run(state, run):
                runs = (changed, state.runs[1]) if number == 0 else (state.runs[0], changed)
                yield f"run {number}: {name}", after._replace(runs=runs)
            if state.deaths < DEATHS:
                runs = (Run("look"), state.runs[1]) if number == 0 else (state.runs[0], Run("look"))
                if runs != state.runs:
                    yield f"run {number} begins anew", state._replace(runs=runs, deaths=state.deaths + 1)

    def _clients(self, state: State) -> Steps:
        if state.written < WRITES and (not state.fenced or state.old_session):
            value = state.sequence + 1
            after = _drawn(state._replace(written=state.written + 1, sequence=value), value)
            yield "a client writes on the giving side", after
        # who has a session there writes when the giving side refuses
        there = state.taking == "taken" or (state.fenced and state.old_session_there)
        if there and state.log.count("c") < WRITES:
            value = state.taking_sequence + 1
            after = state._replace(taking_sequence=value, log=state.log + "c")
            yield "a client writes on the taking side", _drawn(after, value)

    def _run(self, state: State, run: Run) -> Iterator[tuple[str, State, Run]]:
        """Yield what a run may do: its name, both servers behind it, the run behind it."""
        if run.step not in ("idle", "release"):
            yield "decides to abort", state, Run("release")
        if state.gone != TAKING and (state.gone or not self.rules.gone_does_not_answer):
            yield from self._without_giving(state)
        if state.gone != GIVING and (state.gone or not self.rules.gone_does_not_answer):
            yield from self._without_taking(state)
        if _NEEDS.get(run.step, state.gone) != state.gone or not state.gone:
            yield from getattr(self, f"_{run.step}")(state, run)

    # --- one side is gone, as somebody says

    def _without_giving(self, state: State) -> Iterator[tuple[str, State, Run]]:
        if state.taking == "taken" and self.rules.ends_without_giving:
            yield "ends without the giving side", state._replace(turned=True), Run("idle")
        elif state.taking == "prepared":
            yield "declines without the giving side", state._replace(taking="declined"), Run("idle")

    def _without_taking(self, state: State) -> Iterator[tuple[str, State, Run]]:
        if state.giving in ("open", "fenced") or (state.giving == "given" and self.rules.released_without_taking):
            yield "releases without the taking side", state._replace(giving="released", fenced=False), Run("idle")

    # --- the steps

    def _idle(self, state: State, run: Run) -> Iterator[tuple[str, State, Run]]:
        yield from ()

    def _look(self, state: State, run: Run) -> Iterator[tuple[str, State, Run]]:
        early = not self.rules.sequences_behind_the_fence
        following = {"open": "sequences" if early else "end_sessions_there", "fenced": "end_sessions", "given": "take"}
        yield "looks", state, Run(following.get(state.giving, "idle"))

    def _end_sessions_there(self, state: State, run: Run) -> Iterator[tuple[str, State, Run]]:
        old = state.old_session_there and not self.rules.old_sessions_end_there
        yield "ends old sessions there", state._replace(old_session_there=old), run._replace(step="fence")

    def _fence(self, state: State, run: Run) -> Iterator[tuple[str, State, Run]]:
        if state.giving != "open":
            yield "is not the one to fence", state, Run("look")
        else:
            yield "fences", state._replace(giving="fenced", fenced=True), run._replace(step="end_sessions")

    def _end_sessions(self, state: State, run: Run) -> Iterator[tuple[str, State, Run]]:
        following = "drain" if self.rules.slot_position_after_drain else "record"
        if not self.rules.old_sessions_end:
            yield "leaves old sessions", state, run._replace(step=following)
        else:
            # before the fence is put again sessions are not ended
            old = state.old_session and not state.fenced
            yield "ends old sessions", state._replace(old_session=old), run._replace(step=following)

    def _drain(self, state: State, run: Run) -> Iterator[tuple[str, State, Run]]:
        if state.applied == state.written or not self.rules.drained:
            following = "sequences" if self.rules.sequences_behind_the_fence else "record"
            yield "sees that all is applied", state, run._replace(step=following)

    def _sequences(self, state: State, run: Run) -> Iterator[tuple[str, State, Run]]:
        yield "reads the sequence", state, run._replace(step="set_sequence", sequence=state.sequence)

    def _set_sequence(self, state: State, run: Run) -> Iterator[tuple[str, State, Run]]:
        value = run.sequence
        if self.rules.sequences_never_go_backward:
            value = max(value, state.taking_sequence)
        following = "record" if self.rules.slot_position_after_drain else "give"
        if not self.rules.sequences_behind_the_fence:
            following = "end_sessions_there"
        yield "sets the sequence", state._replace(taking_sequence=value), Run(following)

    def _record(self, state: State, run: Run) -> Iterator[tuple[str, State, Run]]:
        here = len(state.log)
        if not self.rules.slot_position_is_recorded:
            yield "reads the position", state, run._replace(step="advance", position=here)
        elif state.taking == "prepared":
            yield "records the position", state._replace(recorded=here), run._replace(step="advance", position=here)
        else:
            yield "records nothing any more", state, Run("look")

    def _advance(self, state: State, run: Run) -> Iterator[tuple[str, State, Run]]:
        position = run.position if self.rules.slot_position_is_recorded else len(state.log)
        following = "give" if self.rules.taken_only_when_given else "taking"
        if not self.rules.slot_position_after_drain:
            following = "drain"
        yield "advances the slot", state._replace(slot=max(state.slot, position)), Run(following)

    def _give(self, state: State, run: Run) -> Iterator[tuple[str, State, Run]]:
        if state.giving == "fenced" or not self.rules.giving_excludes_release:
            yield "gives", state._replace(giving="given"), Run("take")
        else:
            yield "cannot give", state, Run("look")

    def _take(self, state: State, run: Run) -> Iterator[tuple[str, State, Run]]:
        given = state.giving == "given"
        yield f"sees that it is {state.giving}", state, Run("taking" if given else "look")

    def _taking(self, state: State, run: Run) -> Iterator[tuple[str, State, Run]]:
        if state.taking == "prepared" or (state.taking == "declined" and not self.rules.declined_is_final):
            yield "takes", state._replace(taking="taken"), Run("turn")
        else:
            yield "cannot take", state, Run({"taken": "turn", "declined": "release"}[state.taking])

    def _turn(self, state: State, run: Run) -> Iterator[tuple[str, State, Run]]:
        if state.taking == "taken":
            yield "turns the direction", state._replace(turned=True), Run("idle")
        else:
            yield "finds nothing to turn", state, Run("idle")

    def _release(self, state: State, run: Run) -> Iterator[tuple[str, State, Run]]:
        if state.giving in ("open", "fenced") or not self.rules.giving_excludes_release:
            yield "releases", state._replace(giving="released", fenced=False), Run("look")
        elif state.giving == "given" and not self.rules.declined_before_release:
            yield "releases what was given", state._replace(giving="released", fenced=False), Run("look")
        elif state.giving == "given" and state.taking == "prepared":
            yield "declines", state._replace(taking="declined"), Run("release")
        elif state.giving == "given" and state.taking == "declined":
            yield "releases what was declined", state._replace(giving="released", fenced=False), Run("look")
        else:
            yield "is too late", state, Run("turn" if state.taking == "taken" else "idle")


def _drawn(state: State, value: int) -> State:
    """Note that a value was given to a client."""
    bit = 1 << value
    return state._replace(drawn=state.drawn | bit, twice=state.twice or bool(state.drawn & bit))
