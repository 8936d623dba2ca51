"""The state of the ending subscription: everything must be replicated, and nothing held back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pgsub.commands.switchover.obstacles.obstacle import BOTH, ERROR, TAKING, Obstacle, Sides, several
from pgsub.common.plural import counted
from pgsub.common.quoting import word
from pgsub.target.ledger import skipped_changes
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.ledger.tables import held_tables


def find(sides: Sides, relations: Sequence[RelationState]) -> Iterator[Obstacle]:
    """Yield the obstacles."""
    name = word(sides.sub.name)
    if not sides.sub.enabled:
        message = f'subscription "{sides.sub.name}" is disabled'
        yield Obstacle(BOTH, ERROR, message, None, f"Enable it:\npgsub enable {name}")
    if not relations:
        message = f'subscription "{sides.sub.name}" has no tables'
        yield Obstacle(BOTH, ERROR, message, None, f"Publish some, and then:\npgsub refresh {name}")
    yield from several(
        [f"{one.schemaname}.{one.relname}" for one in relations if one.srsubstate != "r"],
        ("table", "tables"),
        "{} [is|are] not synchronized yet",
        "",
        f"Wait for it:\npgsub wait {name} --for synced",
        server=TAKING,
        severity=ERROR,
    )
    waiting = skipped_changes.usage(sides.taking, sides.sub.subid).waiting
    if waiting:
        yield Obstacle(
            TAKING,
            ERROR,
            f"{counted(waiting, 'skipped change', ('was', 'were'))} not replayed",
            "The subscription ends with the switchover, and nothing can replay them afterwards.",
            f"See them, and replay each, or give them up:\npgsub conflicts list {name}\n"
            f"pgsub conflicts replay {name} ID\npgsub conflicts prune {name} --older-than 0s",
        )
    held = held_tables.held(sides.taking, sides.sub.subid)
    names = [f"{one.schemaname}.{one.relname}" for one in relations if one.srrelid in held]
    options = " ".join(f"--release {word(one)}" for one in names)
    yield from several(
        names,
        ("table", "tables"),
        "changes of {} are held",
        "",
        f"Release them:\npgsub alter {name} {options}",
        server=TAKING,
        severity=ERROR,
    )
