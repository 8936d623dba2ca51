"""``pgsub reconcile``: a subscription whose slot is gone, or whose publisher went back in time, gets another slot.

The WAL holds transactions, each of which inserts one row into the one table, which has no key. Transaction i is the
i-th of the WAL, and a position counts the transactions before it. Once the publisher goes back in time (a restore, a
standby that lagged): its last transactions are gone, and others take their positions. A slot is one number, from where
it sends.

Apply, the sync worker and the command may crash at any point (``CRASHES`` times together): what they remember is lost.
The command may also fail once before it has made the slot, and then puts right what it can.
The rules under test are the switches of :class:`Rules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

N = 3
CRASHES = 1
#: Positions by which the publisher goes back.
BACK = 2


class Failure(Enum):
    """What can go wrong."""

    DIFFERS = "everybody is through, and the target does not have the publisher's rows"


@dataclass(frozen=True)
class Rules:
    """The rules, all on; then what the publisher may do, and how the table begins."""

    #: The ledger says that a slot is about to be made before the old one is dropped.
    says_so_before: bool = True
    #: Apply does not start while the ledger says so.
    apply_heeds_it: bool = True
    #: Apply's epoch is raised, and its sessions are ended, before its position moves.
    fences_apply: bool = True
    #: Position and table states move in one commit.
    moves_in_one_commit: bool = True
    #: Which tables are compared is decided by their states in that commit, not by earlier ones.
    looks_in_the_commit: bool = True
    #: That commit ends the tasks of sync workers, which write the rows of older snapshots.
    ends_older_tasks: bool = True

    #: A command that fails takes away what it has said only if no slot was dropped or made since it was said first.
    keeps_saying_so: bool = True

    goes_back: bool = False
    #: The table is still to be copied when the slot is lost.
    copying: bool = False


class Table(NamedTuple):
    """The table's row in the ledger."""

    srsubstate: str = "r"
    srsublsn: int = 0
    claim: int | None = None


class Sync(NamedTuple):
    """The sync worker's memory: its epoch, and its position once it has a slot."""

    epoch: int
    position: int | None = None


class Apply(NamedTuple):
    """Apply's memory: its epoch, its place in the stream, where it left the ledger, and what it has received."""

    epoch: int
    next: int
    left: int
    received: str | None = None


class State(NamedTuple):
    """Everything."""

    wal: tuple[str, ...] = ()
    went_back: bool = False
    slot: int | None = 0
    lost: bool = False
    sync_slot: bool = True  #: whether the sync worker's slot still sends
    making: bool = False  #: the ledger says that a slot is being made
    changed: bool = False  #: the command knows of a slot that was dropped or made since that was said first
    failed: bool = False  #: a command has failed
    position: int = 0
    table: Table = Table()
    epoch: int = 0
    sync_epoch: int = 0
    sync_lsn: int = 0  #: the sync worker's progress in the ledger
    rows: tuple[str, ...] = ()
    apply: Apply | None = None
    sync: Sync | None = None
    late: tuple[str, ...] | None = None  #: rows that a task of an older sync worker is about to write
    step: int = 0  #: of the command
    point: int = 0  #: the consistent point that the command remembers
    saw: str = ""  #: the table's state as the command saw it when it began
    crashes: int = 0


Steps: TypeAlias = Iterator[tuple[str, State]]


@dataclass(frozen=True)
class Reconcile:
    """The model."""

    rules: Rules

    def first(self) -> State:
        """A table that is replicated, or one to be copied."""
        return State(table=Table("i" if self.rules.copying else "r"))

    def failure(self, state: State) -> Failure | None:
        """Compare the rows when nothing is left to do."""
        return Failure.DIFFERS if self._is_through(state) and sorted(state.rows) != sorted(state.wal) else None

    def is_end(self, state: State) -> bool:
        """Everything was written and applied, and the slot had been lost."""
        return self._is_through(state) and state.lost

    def _is_through(self, state: State) -> bool:
        apply = state.apply
        streams = apply is not None and apply.received is None and apply.epoch == state.epoch and state.slot is not None
        whole = len(state.wal) == N and state.went_back == self.rules.goes_back
        return whole and streams and state.position == N and state.table.srsubstate in "sr" and state.step == 0

    def steps(self, state: State) -> Steps:
        """Everything that may happen next."""
        yield from self._publisher(state)
        yield from self._apply(state)
        yield from self._sync(state)
        yield from self._command(state)

    # --- publisher

    def _publisher(self, state: State) -> Steps:
        if len(state.wal) < N:
            name = f"{'b' if state.went_back else 'a'}{len(state.wal) + 1}"
            yield f"publisher commits {name}", state._replace(wal=(*state.wal, name))
        if not state.lost and not self.rules.goes_back:
            yield "the slot is lost", state._replace(slot=None, lost=True)
        if self.rules.goes_back and not state.went_back and len(state.wal) >= BACK:
            before = state._replace(wal=state.wal[:-BACK], went_back=True)
            yield "publisher goes back", before._replace(slot=None, lost=True, sync_slot=False)

    # --- apply

    def _apply(self, state: State) -> Steps:
        apply = state.apply
        if apply is None:
            # what is looked at when a worker starts
            heeds = self.rules.apply_heeds_it and state.making
            if state.slot is not None and state.slot <= state.position <= len(state.wal) and not heeds:
                started = Apply(state.epoch, state.position, state.position)
                yield "apply starts", state._replace(apply=started)
            return
        if apply.received is None:
            if state.slot is not None and apply.next < len(state.wal):
                got = apply._replace(received=state.wal[apply.next], next=apply.next + 1)
                yield f"apply receives {got.received}", state._replace(apply=got)
        elif apply.epoch == state.epoch and apply.left == state.position:
            yield from self._apply_commits(state, apply, apply.received)
        if state.crashes < CRASHES:
            yield "apply crashes", state._replace(apply=None, crashes=state.crashes + 1)
        elif apply.epoch != state.epoch or state.slot is None or apply.left != state.position:
            yield "apply ends", state._replace(apply=None)

    def _apply_commits(self, state: State, apply: Apply, received: str) -> Steps:
        table, number = state.table, apply.next - 1
        if table.srsubstate in "df" and table.claim is not None and number >= table.claim:
            yield "apply takes the claim away", state._replace(table=table._replace(claim=None))
            return
        taken = table.srsubstate in "sr" and number >= table.srsublsn
        yield (
            f"apply commits {received}" + ("" if taken else " without the table"),
            state._replace(
                rows=(*state.rows, received) if taken else state.rows,
                position=apply.next,
                apply=apply._replace(received=None, left=apply.next),
            ),
        )

    # --- tablesync

    def _sync(self, state: State) -> Steps:
        table, sync = state.table, state.sync
        if state.late is not None:
            yield "a task from before writes its rows", state._replace(rows=state.late, late=None)
        if sync is None:
            if table.srsubstate in "idf":
                yield "sync starts", state._replace(sync=Sync(state.sync_epoch))
            return
        if sync.epoch != state.sync_epoch:
            yield "sync is fenced", state._replace(sync=None)
            return
        if table.srsubstate == "i" and sync.position is None:
            yield "sync claims before it copies", state._replace(table=Table("d", claim=state.position))
        elif table.srsubstate == "d" and sync.position is None:
            claim = table.claim
            at = sync._replace(position=len(state.wal))
            moved = table if claim is None else table._replace(claim=len(state.wal))
            yield "sync makes its slot", state._replace(sync=at, table=moved, sync_slot=True)
        elif sync.position is not None and table.srsubstate == "d" and state.sync_slot:
            rows, lsn = state.wal[: sync.position], sync.position
            copied = state._replace(rows=rows, table=Table("f", claim=table.claim), sync_lsn=lsn)
            yield "sync has compared and brought", copied._replace(sync=Sync(sync.epoch))
        if table.srsubstate == "f":
            yield from self._hands_over(state)
        if state.crashes < CRASHES:
            yield "sync crashes", state._replace(sync=None, crashes=state.crashes + 1)
        elif not state.sync_slot and table.srsubstate == "d":
            yield "sync ends", state._replace(sync=None)

    def _hands_over(self, state: State) -> Steps:
        table, at = state.table, state.sync_lsn
        if state.position <= at if table.claim is None else at >= table.claim:
            yield f"sync sets s at {at}", state._replace(table=Table("s", at))
        elif table.claim is None:
            yield "sync claims", state._replace(table=table._replace(claim=max(state.position, at)))
        elif state.sync_slot and at < len(state.wal):
            yield (
                f"sync applies {state.wal[at]}",
                state._replace(rows=(*state.rows, state.wal[at]), sync_lsn=at + 1),
            )

    # --- the command

    def _command(self, state: State) -> Steps:
        rules, step = self.rules, state.step
        if step == 0:
            broken = state.slot is None or state.slot > state.position or state.position > len(state.wal)
            if state.lost and (broken or state.making):
                begun = state._replace(step=1, saw=state.table.srsubstate, changed=state.making)
                yield "command says what it is about to do", begun._replace(making=rules.says_so_before)
            return
        if step == 1:
            ended = state._replace(epoch=state.epoch + 1, apply=None) if rules.fences_apply else state
            yield "command fences apply", ended._replace(step=2)
        elif step == 2:
            changed = state.changed or state.slot is not None
            yield "command drops the slot", state._replace(slot=None, step=3, changed=changed)
        elif step == 3:
            yield "command makes the slot", state._replace(slot=len(state.wal), point=len(state.wal), step=4)
        elif step == 4 and rules.moves_in_one_commit:
            moved = self._moved(self._set_back(state))
            yield "command moves position and tables", moved._replace(step=0, making=False)
        elif step == 4:
            yield "command moves the position", self._moved(state)._replace(step=5, making=False)
        elif step == 5:
            yield "command sets the table back", self._set_back(state)._replace(step=0)
        if step in (1, 2, 3) and not state.failed:
            says = state.making and state.changed and rules.keeps_saying_so
            yield "command fails", state._replace(step=0, making=says, failed=True)
        if state.crashes < CRASHES:
            yield "command is killed", state._replace(step=0, crashes=state.crashes + 1)

    def _moved(self, state: State) -> State:
        return state._replace(position=state.point)

    def _set_back(self, state: State) -> State:
        seen = state.table.srsubstate if self.rules.looks_in_the_commit else state.saw
        table = Table("i") if seen in "fsr" else state.table._replace(claim=None)
        late, sync = None, state.sync
        if not self.rules.ends_older_tasks and sync is not None and sync.position is not None:
            late = state.wal[: sync.position]
        return state._replace(table=table, late=late, sync_epoch=state.sync_epoch + 1)
