"""Random batches for :mod:`change_set_model`, executed both ways and compared."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from models.change_set_model import (
    Delete,
    Fallback,
    Insert,
    Operation,
    Result,
    Row,
    Rules,
    Table,
    Update,
    serial,
    set_based,
)

KEYS = range(5)


class Difference(Enum):
    """How a set-based execution can differ from the serial one."""

    HIDES_CONFLICT = "a conflict that stops serial execution passes unseen"
    TOAST_LOST = "an unchanged TOAST value is lost"
    LOCAL_COLUMN = "a column that only the target has differs"
    ROWS = "a row is missing or too many"
    VALUES = "a row has another value"
    RECORDS = "the same rows, but other records of skipped changes"


def random_batch(rng: random.Random, unique: bool) -> tuple[Table, list[Operation]]:
    """Draw a batch that a publisher could send, and a target that nearly has the publisher's rows.

    :param rng: source of all choices.
    :param unique: column a is unique on the publisher.
    :return: rows of the target, and the batch.
    """
    published: dict[int, int] = {key: 100 + key for key in rng.sample(KEYS, 3)}
    target = {key: Row(a, rng.choice("xy"), rng.choice([0, 7])) for key, a in published.items()}
    for key in list(target):
        if rng.random() < 0.08:
            del target[key]
    local = rng.choice(KEYS)
    if rng.random() < 0.15 and local not in target and local not in published:
        target[local] = Row(rng.choice([200 + local, 103]), "L", 9)
    drawn = [_random_operation(rng, published, unique) for _ in range(rng.randint(2, 5))]
    return target, [operation for operation in drawn if operation is not None]


def _random_operation(rng: random.Random, published: dict[int, int], unique: bool) -> Operation | None:
    dice, a = rng.random(), rng.randrange(100, 106)
    free = [key for key in KEYS if key not in published]
    if dice >= 0.3 and not published:
        return None
    if dice < 0.3:
        if not free or (unique and a in published.values()):
            return None
        key = rng.choice(free)
        published[key] = a
        return Insert(key, a, rng.choice("xyz"))
    key = rng.choice(sorted(published))
    if dice < 0.5:
        del published[key]
        return Delete(key)
    if unique and any(other == a for k, other in published.items() if k != key):
        return None
    new_key = rng.choice(free) if free and rng.random() < 0.25 else key
    del published[key]
    published[new_key] = a
    return Update(key, new_key, a, rng.choice([None, None, "x", "z"]))


@dataclass
class Simulation:
    """What a number of random batches showed."""

    set_based: int = 0
    fallbacks: int = 0
    differences: Counter[Difference] = field(default_factory=Counter)
    examples: dict[Difference, tuple[Table, list[Operation]]] = field(default_factory=dict)
    hidden: Counter[str] = field(default_factory=Counter)


def compare(rules: Rules, unique: bool, batches: int) -> Simulation:
    """Execute random batches both ways; a fallback is equal by construction.

    :param rules: the rules of the set-based execution.
    :param unique: column a has a unique index too.
    :param batches: how many.
    :return: counts, and the shortest example of each kind of difference.
    """
    rng = random.Random(1)
    found = Simulation()
    for _ in range(batches):
        target, operations = random_batch(rng, unique)
        expected = serial(target, operations, unique)
        try:
            result = set_based(target, operations, rules, unique, rng)
        except Fallback:
            found.fallbacks += 1
            continue
        found.set_based += 1
        difference = classify(expected, result)
        if difference is not None:
            found.differences[difference] += 1
            if expected.stopped is not None:
                found.hidden[expected.stopped] += 1
            example = found.examples.setdefault(difference, (target, operations))
            if len(operations) < len(example[1]):
                found.examples[difference] = (target, operations)
    return found


def classify(expected: Result, result: Result) -> Difference | None:
    """Name the difference between the serial result and the set-based one; None if they are equal."""
    if result == expected:
        return None
    if expected.stopped is not None:
        return Difference.HIDES_CONFLICT
    if result.rows == expected.rows:
        return Difference.RECORDS
    if any(row.big is None for row in result.rows.values()):
        return Difference.TOAST_LOST
    if set(result.rows) != set(expected.rows):
        return Difference.ROWS
    if any(row.local != expected.rows[key].local for key, row in result.rows.items()):
        return Difference.LOCAL_COLUMN
    return Difference.VALUES
