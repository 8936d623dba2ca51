"""Change sets: what a batch does to each row, executed set by set, against the same batch executed row by row.

A row has a column ``a``, a column ``big`` that an update may leave unsent (unchanged TOAST), and a column ``local``
that only the target has. :func:`serial` is what the server's apply worker does; :func:`set_based` folds the batch into
one effect a key and executes those; where a rule sees a deviation the batch falls back to serial execution. The rules
under test are the switches of :class:`Rules`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class Row(NamedTuple):
    """A row of the target; ``big`` is None only if its value was lost."""

    a: int
    big: str | None
    local: int = 0


class Insert(NamedTuple):
    """Insert a row."""

    key: int
    a: int
    big: str | None


class Update(NamedTuple):
    """Set a row's columns and perhaps its key; ``big`` None: unchanged and not sent."""

    key: int
    new_key: int
    a: int
    big: str | None


class Delete(NamedTuple):
    """Delete a row."""

    key: int


Operation: TypeAlias = Insert | Update | Delete
Table: TypeAlias = dict[int, Row]
Record: TypeAlias = tuple[str, int]


class Result(NamedTuple):
    """How a batch ended: the rows and the skipped changes, or the conflict that stopped it."""

    rows: Table
    skipped: list[Record]
    stopped: str | None = None


class Stop(Exception):
    """A conflict that stops apply."""


class Fallback(Exception):
    """The batch is rolled back and executed serially."""


@dataclass(frozen=True)
class Rules:
    """The rules, all on."""

    #: A batch with an update that changes a key is executed serially.
    key_changes_are_serial: bool = True
    #: An insert after a delete of the same key replaces the row, columns of the target included.
    delete_then_insert_replaces: bool = True
    #: That a row must be absent first is checked even if it is absent in the end.
    absent_rows_are_checked: bool = True
    #: A batch whose update or delete finds no row is executed serially.
    missing_rows_are_serial: bool = True


# --- serial execution


def serial(target: Table, operations: list[Operation], unique: bool) -> Result:
    """Execute a batch row by row.

    :param target: rows by key; not changed.
    :param operations: the batch.
    :param unique: column a has a unique index too.
    :return: the result.
    """
    rows, skipped = dict(target), list[Record]()
    try:
        for operation in operations:
            _serial_step(rows, skipped, operation, unique)
    except Stop as stop:
        return Result({}, [], str(stop))
    return Result(rows, sorted(skipped))


def _serial_step(rows: Table, skipped: list[Record], operation: Operation, unique: bool) -> None:
    match operation:
        case Insert(key, a, big):
            if key in rows:
                raise Stop("insert_exists")
            if unique and _is_taken(rows, key, a):
                raise Stop("unique")
            rows[key] = Row(a, big)
        case Delete(key):
            if rows.pop(key, None) is None:
                skipped.append(("delete_missing", key))
        case Update(key, new_key, a, big):
            if key not in rows:
                skipped.append(("update_missing", key))
                return
            if new_key != key and new_key in rows:
                raise Stop("update_exists")
            if unique and _is_taken(rows, key, a):
                raise Stop("unique")
            old = rows.pop(key)
            rows[new_key] = Row(a, old.big if big is None else big, old.local)


def _is_taken(rows: Table, key: int, a: int) -> bool:
    return any(row.a == a for other, row in rows.items() if other != key)


# --- set-based execution


@dataclass
class Effect:
    """What a batch does to one key: the precondition of its first change, and the state after its last."""

    first: type[Operation]
    present_after: bool = False
    inserted: bool = False
    a: int = 0
    big: str | None = None


def set_based(target: Table, operations: list[Operation], rules: Rules, unique: bool, rng: random.Random) -> Result:
    """Execute a batch as one effect a key.

    :param target: rows by key; not changed.
    :param operations: the batch.
    :param rules: what is checked.
    :param unique: column a has a unique index too.
    :param rng: decides the order in which the one UPDATE statement visits its rows.
    :return: the result, which never says stopped.
    :raises Fallback: a rule sends the batch to serial execution.
    """
    effects = fold(operations, rules)
    rows, skipped = dict(target), list[Record]()
    _check_preconditions(rows, skipped, effects, rules)
    _delete(rows, effects, rules)
    _update_and_insert(rows, effects, rules, unique, rng)
    return Result(rows, sorted(skipped))


def fold(operations: list[Operation], rules: Rules) -> dict[int, Effect]:
    """Fold a batch into one effect a key.

    :param operations: the batch.
    :param rules: whether a change of key is folded as delete and insert, or refused.
    :return: effects in the order of first touch.
    :raises Fallback: a key changes.
    """
    effects: dict[int, Effect] = {}
    for operation in operations:
        if isinstance(operation, Update) and operation.key != operation.new_key:
            if rules.key_changes_are_serial:
                raise Fallback
            _fold_one(effects, Delete(operation.key))
            _fold_one(effects, Insert(operation.new_key, operation.a, operation.big))
        else:
            _fold_one(effects, operation)
    return effects


def _fold_one(effects: dict[int, Effect], operation: Operation) -> None:
    effect = effects.setdefault(operation.key, Effect(type(operation)))
    match operation:
        case Delete():
            effect.present_after, effect.big = False, None
        case Insert(_, a, big):
            effect.present_after, effect.inserted, effect.a, effect.big = True, True, a, big
        case Update(_, _, a, big):
            effect.present_after, effect.a = True, a
            effect.big = effect.big if big is None else big


def _check_preconditions(rows: Table, skipped: list[Record], effects: dict[int, Effect], rules: Rules) -> None:
    for key, effect in effects.items():
        if effect.first is Insert:
            if key in rows and (effect.present_after or rules.absent_rows_are_checked):
                raise Fallback
        elif key not in rows:
            if rules.missing_rows_are_serial:
                raise Fallback
            skipped.append(("update_missing" if effect.first is Update else "delete_missing", key))


def _replaces(effect: Effect, rules: Rules) -> bool:
    return rules.delete_then_insert_replaces and effect.inserted and effect.first is not Insert


def _delete(rows: Table, effects: dict[int, Effect], rules: Rules) -> None:
    for key, effect in effects.items():
        if not effect.present_after or _replaces(effect, rules):
            rows.pop(key, None)


def _update_and_insert(rows: Table, effects: dict[int, Effect], rules: Rules, unique: bool, rng: random.Random) -> None:
    present = [(key, effect) for key, effect in effects.items() if effect.present_after]
    updates = [(key, effect) for key, effect in present if effect.first is not Insert and not _replaces(effect, rules)]
    inserts = [(key, effect) for key, effect in present if effect.first is Insert or _replaces(effect, rules)]
    # One UPDATE statement visits its rows in any order and checks the index at each.
    rng.shuffle(updates)
    for key, effect in updates:
        if key in rows:
            if unique and _is_taken(rows, key, effect.a):
                raise Fallback
            old = rows[key]
            rows[key] = Row(effect.a, old.big if effect.big is None else effect.big, old.local)
    for key, effect in inserts:
        if key in rows or (unique and _is_taken(rows, key, effect.a)):
            raise Fallback
        rows[key] = Row(effect.a, effect.big)
