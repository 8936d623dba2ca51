"""Conflict rules, ``[SCHEMA.TABLE:]TYPE=RESOLUTION``: their names, their meaning, and the allowed combinations.

A rule for a table takes precedence over a rule for all tables. Without a rule the outcome of a conflict is that of the
server's own subscriber.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pgsub.common.errors import UsageError

RESOLUTIONS = ("error", "skip", "apply_remote", "keep_local", "last_update_wins")
ERROR, SKIP, APPLY_REMOTE, KEEP_LOCAL, LAST_UPDATE_WINS = RESOLUTIONS
#: Resolutions that compare the times of both rows; a copy requests them from the publisher.
BY_TIME = frozenset((LAST_UPDATE_WINS,))
DEFAULT = "default"
IDENTICAL = "identical"

#: Allowed resolutions per conflict type; the first is the server's behaviour.
ALLOWED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("insert_exists", "update_exists", "multiple_unique_conflicts"), RESOLUTIONS),
    "update_origin_differs": (APPLY_REMOTE, ERROR, SKIP, KEEP_LOCAL, LAST_UPDATE_WINS),
    "delete_origin_differs": (APPLY_REMOTE, ERROR, SKIP, KEEP_LOCAL, LAST_UPDATE_WINS),
    "update_missing": (KEEP_LOCAL, ERROR, SKIP, APPLY_REMOTE),
    "delete_missing": (KEEP_LOCAL, ERROR, SKIP),
    IDENTICAL: (ERROR, SKIP, KEEP_LOCAL),
}
#: Reasons why other resolutions are refused.
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
    :ivar limit: number of further changes that the rule decides, None for no limit.
    """

    table: str
    conflict: str
    resolution: str
    limit: int | None = None

    def __str__(self) -> str:
        where = f"{self.table}:" if self.table else ""
        return f"{where}{self.conflict}={self.resolution}"

    @property
    def place(self) -> tuple[str, str]:
        """The conflicts that the rule decides: table and type."""
        return self.table, self.conflict

    @property
    def lets_updates_win(self) -> bool:
        """Whether a remote update may win by the rule over a row that another origin wrote."""
        return self.conflict == "update_origin_differs" and self.resolution in (APPLY_REMOTE, *BY_TIME)

    @property
    def needs_times(self) -> bool:
        """Whether the rule needs the time and origin of the last change of a row."""
        differs = self.conflict.endswith("_origin_differs") and self.resolution != APPLY_REMOTE
        return differs or self.resolution in BY_TIME


def parse(text: str) -> Rule:
    """Parse a rule from the command line; ``default`` is also a resolution.

    :raises UsageError: not a rule, or a meaningless one.
    """
    left, equals, resolution = text.rpartition("=")
    table, _, conflict = left.rpartition(":")
    if not equals or not conflict or (":" in left and "." not in table.strip(".")):
        bare = equals and conflict and ":" in left
        raise UsageError(
            f'invalid conflict rule "{text}"',
            detail=f'Table "{table}" needs its schema, as in public.{table}.' if bare else f"A rule reads {_FORM}.",
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
    """Return the rules of a subscription after changes; ``default`` removes a rule.

    :param present: result of an earlier call.
    :raises UsageError: see :func:`parse`; a type and table is given twice.
    """
    rules = {rule.place: rule for rule in map(parse, present)}
    seen = set()
    for rule in map(parse, given):
        if rule.place in seen:
            raise UsageError(f'conflict rule "{str(rule).rpartition("=")[0]}" is given more than once')
        seen.add(rule.place)
        rules[rule.place] = rule
    return tuple(sorted(str(rule) for rule in rules.values() if rule.resolution != DEFAULT))


def of_table(rules: Iterable[str], schema: str, name: str) -> tuple[tuple[str, str], ...]:
    """Return the rules for one table of the target as pairs of type and resolution, without defaults.

    :param rules: rules of the subscription, from :func:`merged`.
    """
    found: dict[str, str] = {}
    own = f"{schema}.{name}"
    for rule in sorted(map(parse, rules), key=lambda rule: rule.table != ""):  # the table's own rules come last
        if rule.table in ("", own):
            found[rule.conflict] = rule.resolution
    return tuple((one, how) for one, how in found.items() if one == IDENTICAL or how != ALLOWED[one][0])


class RuleSet:
    """The rules of a subscription; rules with a limit take precedence until it is reached.

    :param lasting: rules from :func:`merged`.
    :param limited: rules with a limit, each for one table.
    """

    def __init__(self, lasting: Sequence[str] = (), limited: Iterable[Rule] = ()) -> None:
        self.lasting = lasting
        self._limited = {rule.place: rule for rule in limited}

    def __bool__(self) -> bool:
        return bool(self.lasting or self._limited)

    def decides_alike(self, other: RuleSet) -> bool:
        """Return whether both decide the same conflicts if their lasting rules are the same."""
        return self._limited.keys() == other._limited.keys()

    def of_table(self, schema: str, name: str) -> tuple[tuple[str, str], ...]:
        """Return the rules as :func:`of_table` does, including every rule with a limit, used up or not."""
        return of_table((*self.lasting, *map(str, self._limited.values())), schema, name)

    def find(self, schema: str, name: str, conflict: str) -> Rule | None:
        """Return the rule that now decides a conflict type on a table."""
        limited = self._limited.get((f"{schema}.{name}", conflict))
        if limited is not None and limited.limit:
            return limited
        resolution = dict(of_table(self.lasting, schema, name)).get(conflict)
        return None if resolution is None else Rule("", conflict, resolution)

    def use(self, rule: Rule) -> None:
        """Count a change that a rule with a limit has decided."""
        if rule.limit is not None:
            self._limited[rule.place] = replace(rule, limit=rule.limit - 1)


def tables(rules: Iterable[str]) -> set[str]:
    """Return the tables that rules name."""
    return {rule.table for rule in map(parse, rules)} - {""}


def needing_times(rules: Iterable[str]) -> list[str]:
    """Return the rules that need the time or origin of the last change of a row."""
    return [text for text in rules if parse(text).needs_times]
