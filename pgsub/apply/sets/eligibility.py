"""Decides which relations can be changed by sets with the same result as row by row."""

from __future__ import annotations

from pgsub.apply.sets import keys
from pgsub.target.catalog.relation_map import RelationMap, is_updatable


def order_matters(relation: RelationMap) -> str | None:
    """Return why changes of this relation must keep their place among all others, None if there is no reason."""
    if relation.target.fires:
        return "a trigger fires"
    if relation.target.rules:
        return "it has a rule that applies"
    return None


def reason(relation: RelationMap) -> str | None:
    """Return why this relation is changed row by row, None if sets are allowed.

    Sets that have only inserts need no more than :func:`order_matters`: inserts row by row also use COPY in order.
    """
    target = relation.target
    found = order_matters(relation)
    if found is not None:
        return found
    if target.relkind == "p":
        return "it is partitioned"
    if target.row_security if target.acts_as is None else target.owner_row_security:
        return "a row security policy applies"
    if relation.rules and target.several_unique:
        return "its conflicts have rules, and of a second unique index sets check net effects only"
    if target.deferrable or target.checked_late:
        return "it has an exclusion constraint, a deferrable unique one, or a foreign key that is enforced"
    if not relation.by_identity:
        return "it has neither a replica identity index nor a primary key"
    if not is_updatable(relation):
        return "the publisher does not send the whole key"
    return keys.incomparable(relation)
