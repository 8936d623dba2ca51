"""The list of publications that ALTER SUBSCRIPTION sets, adds to, or drops from. Mirrors merge_publications."""

from __future__ import annotations

from pgsub.commands.alter.options import AlterOptions
from pgsub.commands.preflight.tables import several_in_one
from pgsub.commands.subscription import definition
from pgsub.common import quoting
from pgsub.common.errors import StateForbids, UsageError
from pgsub.common.subscription import Subscription

_DUPLICATE, _UNDEFINED = "42710", "42704"


def check(options: AlterOptions) -> None:
    """Check that at most one list of publications is given, and that options which need one have it.

    :raises UsageError: options are contradictory, or a list is not valid.
    """
    lists = {
        "--set-publication": options.set_publication,
        "--add-publication": options.add_publication,
        "--drop-publication": options.drop_publication,
    }
    given = [word for word, names in lists.items() if names]
    if len(given) > 1:
        raise UsageError(f"{given[0]} and {given[1]} cannot be used together", hint="Alter the subscription twice.")
    for names in lists.values():
        definition.check_publications(names)
    for word, value in (("refresh", options.refresh), ("copy-data", options.copy_data)):
        if not given and value is not None:
            raise UsageError(
                f"--{word if value else f'no-{word}'} needs a change of publications",
                hint=f"To refresh the tables alone:\npgsub refresh {quoting.word(options.name)}",
            )


def merged(options: AlterOptions, sub: Subscription) -> tuple[str, ...]:
    """Return the present publications in their order, then the new ones (``merge_publications``).

    :raises StateForbids: the server's error for a change that is not allowed.
    """
    if options.set_publication:
        return options.set_publication
    present = list(sub.publications)
    for name in options.add_publication:
        if name in present:
            raise _of_publication(f'publication "{name}" is already in subscription "{sub.name}"', sub, _DUPLICATE)
        present.append(name)
    for name in options.drop_publication:
        if name not in present:
            raise _of_publication(f'publication "{name}" is not in subscription "{sub.name}"', sub, _UNDEFINED, name)
        present.remove(name)
    if not present:
        raise _of_publication("cannot drop all the publications from a subscription", sub, "22023")
    return tuple(present)


def _of_publication(message: str, sub: Subscription, sqlstate: str, name: str = "") -> StateForbids:
    listed = ", ".join(f'"{name}"' for name in sub.publications)
    detail, hint = f"Its publications are {listed}.", several_in_one([name])
    return StateForbids(message, detail=detail, hint=hint, sqlstate=sqlstate)
