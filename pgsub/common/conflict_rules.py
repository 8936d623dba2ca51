"""What is done with a conflict, by its type and table: ``[SCHEMA.TABLE:]TYPE=RESOLUTION``, and what of that has sense.

A table's rule goes before the subscription's. Where there is none, everything is as in the server's own subscriber.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pgsub.common.errors import UsageError

ERROR, SKIP, APPLY_REMOTE, KEEP_LOCAL, LAST_UPDATE_WINS = (
    "error",
    "skip",
    "apply_remote",
    "keep_local",
    "last_update_wins",
)
DEFAULT = "default"
RESOLUTIONS = (ERROR, SKIP, APPLY_REMOTE, KEEP_LOCAL, LAST_UPDATE_WINS)
IDENTICAL = "identical"

#: What each type may be resolved by; the first is what the server does.
ALLOWED: Mapping[str, tuple[str, ...]] = {
    "insert_exists": (ERROR, SKIP, APPLY_REMOTE, KEEP_LOCAL, LAST_UPDATE_WINS),
    "update_exists": (ERROR, SKIP, APPLY_REMOTE, KEEP_LOCAL, LAST_UPDATE_WINS),
    "multiple_unique_conflicts": (ERROR, SKIP, APPLY_REMOTE, KEEP_LOCAL, LAST_UPDATE_WINS),
    "update_origin_differs": (APPLY_REMOTE, ERROR, SKIP, KEEP_LOCAL, LAST_UPDATE_WINS),
    "delete_origin_differs": (APPLY_REMOTE, ERROR, SKIP, KEEP_LOCAL, LAST_UPDATE_WINS),
    "update_missing": (KEEP_LOCAL, ERROR, SKIP, APPLY_REMOTE),
    "delete_missing": (KEEP_LOCAL, ERROR, SKIP),
    IDENTICAL: (ERROR, SKIP, KEEP_LOCAL),
}
#: Why others are refused.
_SENSELESS = {
    ("update_missing", LAST_UPDATE_WINS): "There is no local row whose time could be compared.",
    ("delete_missing", LAST_UPDATE_WINS): "There is no local row whose time could be compared.",
    ("delete_missing", APPLY_REMOTE): "The row is not there, which is what the publisher wants.",
    (IDENTICAL, APPLY_REMOTE): "The local row is the publisher's already: keep_local lets the insert pass.",
    (IDENTICAL, LAST_UPDATE_WINS): "Both rows are the same: keep_local lets the insert pass.",
}
_FORM = "[SCHEMA.TABLE:]TYPE=RESOLUTION"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    :ivar table: schema.table on the target, '' for every table.
    """

    table: str
    conflict: str
    resolution: str

    def __str__(self) -> str:
        where = f"{self.table}:" if self.table else ""
        return f"{where}{self.conflict}={self.resolution}"

    @property
    def needs_times(self) -> bool:
        """Whether the target must know who wrote a row last, and when."""
        differs = self.conflict.endswith("_origin_differs") and self.resolution != APPLY_REMOTE
        return differs or self.resolution == LAST_UPDATE_WINS


def parse(text: str) -> Rule:
    """A rule from the command line; ``default`` is a resolution, too.

    :raises UsageError: no rule, or one without sense.
    """
    left, equals, resolution = text.rpartition("=")
    table, _, conflict = left.rpartition(":")
    if not equals or not conflict or (":" in left and "." not in table.strip(".")):
        raise UsageError(
            f'invalid conflict rule "{text}"',
            detail=f"A rule reads {_FORM}.",
            hint="For example:\n--on-conflict insert_exists=keep_local --on-conflict public.t:update_missing=skip",
        )
    _check(conflict, resolution)
    return Rule(table, conflict, resolution)


def _check(conflict: str, resolution: str) -> None:
    if conflict == "update_deleted":
        raise UsageError(
            'conflict type "update_deleted" cannot be resolved',
            detail="Rows that were deleted cannot be seen from outside the server: it counts as update_missing.",
            hint="Give a rule for the type that is seen:\n--on-conflict update_missing=apply_remote",
        )
    if conflict not in ALLOWED:
        raise UsageError(f'unknown conflict type "{conflict}"', hint=f"Types are {', '.join(ALLOWED)}.")
    if resolution not in (*RESOLUTIONS, DEFAULT):
        raise UsageError(
            f'unknown resolution "{resolution}"', hint=f"Resolutions are {', '.join((*RESOLUTIONS, DEFAULT))}."
        )
    if resolution not in (*ALLOWED[conflict], DEFAULT):
        raise UsageError(
            f'conflict type "{conflict}" cannot be resolved by "{resolution}"',
            detail=_SENSELESS[conflict, resolution],
            hint=f"It can be resolved by {', '.join(ALLOWED[conflict])}.",
        )


def merged(present: Iterable[str], given: Sequence[str]) -> tuple[str, ...]:
    """The rules of a subscription after some were given: ``default`` takes one back.

    :param present: as this function returned them.
    :raises UsageError: see :func:`parse`; a type and table is given twice.
    """
    rules = {(rule.table, rule.conflict): rule for rule in map(parse, present)}
    seen = set()
    for rule in map(parse, given):
        place = rule.table, rule.conflict
        if place in seen:
            raise UsageError(f'conflict rule "{str(rule).rpartition("=")[0]}" is given more than once')
        seen.add(place)
        rules[place] = rule
    return tuple(sorted(str(rule) for rule in rules.values() if rule.resolution != DEFAULT))


def of_table(rules: Iterable[str], schema: str, name: str) -> tuple[tuple[str, str], ...]:
    """The rules for one table of the target, as pairs of type and resolution, defaults left out.

    :param rules: of the subscription, as :func:`merged` returned them.
    """
    found: dict[str, str] = {}
    own = f"{schema}.{name}"
    for rule in sorted(map(parse, rules), key=lambda rule: rule.table != ""):  # the table's own come last
        if rule.table in ("", own):
            found[rule.conflict] = rule.resolution
    return tuple((one, how) for one, how in found.items() if one == IDENTICAL or how != ALLOWED[one][0])


def tables(rules: Iterable[str]) -> set[str]:
    """Tables that rules name."""
    return {rule.table for rule in map(parse, rules)} - {""}


def needing_times(rules: Iterable[str]) -> list[str]:
    """Those rules that ask who wrote a row last, or when."""
    return [text for text in rules if parse(text).needs_times]
