"""The values of a row as the publisher sent them."""

from __future__ import annotations

from dataclasses import replace

from pgsub.apply.preview.finding import Finding
from pgsub.protocol.messages import Delete, Insert, Message, Relation, Tuple, Update
from pgsub.protocol.reader import UNCHANGED
from pgsub.target.catalog.relation_map import RelationMap


def with_sent(finding: Finding, remote: Relation, message: Message) -> Finding:
    """Add the row as the publisher sent it, which is all that is known if the target's table does not match."""
    if not isinstance(message, Insert | Update | Delete):
        return finding
    new = None if isinstance(message, Delete) else message.new
    searched = new if isinstance(message, Insert) else message.old or new
    assert searched is not None
    sent = [
        {c.name: text(one, i) for i, c in enumerate(remote.columns) if one.kinds[i] != UNCHANGED}
        for one in (searched, new)
        if one is not None
    ]
    key = {c.name: sent[0][c.name] for c in remote.columns if c.is_key and c.name in sent[0]}
    return replace(finding, key=key, remote=None if new is None else sent[-1])


def by_column(relation: RelationMap, values: Tuple, *, nulls: bool = False) -> dict[str, str | None]:
    """Return values by column; an unchanged TOAST value is left out, or NULL if a whole row is needed."""
    wanted = [i for i in range(len(relation.columns)) if nulls or values.kinds[i] != UNCHANGED]
    return {relation.columns[i].name: text(values, i) for i in wanted}


def text(values: Tuple, position: int) -> str | None:
    """Return one value; None for NULL."""
    raw = values.values[position]
    return None if raw is None else raw.decode("utf-8", "replace")
