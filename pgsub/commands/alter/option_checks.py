"""Checks the options of ``alter``, and turns them into changed fields. Mirrors AlterSubscription."""

from __future__ import annotations

from typing import Any

from pgsub.commands.alter import upgraded_publisher
from pgsub.commands.alter.options import AlterOptions
from pgsub.commands.preflight.tables import several_in_one
from pgsub.commands.subscription import definition
from pgsub.commands.subscription.enable_disable import require_disabled
from pgsub.common import conflict_rules, quoting
from pgsub.common.errors import StateForbids, UsageError
from pgsub.common.subscription import Subscription

_STATE, _DUPLICATE, _UNDEFINED = "55000", "42710", "42704"


def resolve(options: AlterOptions, sub: Subscription) -> dict[str, Any]:
    """Return the fields that get another value, except those that depend on a server.

    :raises UsageError: options are contradictory or not valid names.
    :raises StateForbids: the server's error for a change that is not allowed.
    """
    _check_words(options)
    fields = dict(options.settings)
    if options.rename_to is not None:
        definition.check_name(options.rename_to)
        fields["name"] = options.rename_to
    if options.slot_name is not None:
        none = options.slot_name.lower() == "none"
        if none:
            require_disabled(sub, "cannot set slot_name = NONE for enabled subscription")
        fields["slot_name"] = None if none else definition.valid_slot_name(options.slot_name)
    if options.publications:
        fields["publications"] = _merged_publications(options, sub)
        if options.refreshes and not sub.enabled:
            raise StateForbids(
                "ALTER SUBSCRIPTION with refresh is not allowed for disabled subscriptions",
                hint="Add --no-refresh, and refresh when the subscription is enabled.",
                sqlstate=_STATE,
            )
    if options.on_conflict:
        fields["on_conflict"] = conflict_rules.merged(sub.on_conflict, options.on_conflict)
    if "password_required" in fields:
        fields["password_enforced"] = fields["password_required"]
    changed = {name: value for name, value in fields.items() if getattr(sub, name) != value}
    if "failover" in changed:
        _check_failover(options, sub)
    if asks_two_phase(options, sub):
        _check_two_phase(options, sub)
    if options.publisher_upgraded:
        upgraded_publisher.check_allowed(sub)
    return changed


def asks_two_phase(options: AlterOptions, sub: Subscription) -> bool:
    """Return whether two_phase may change. The state store of a disabled subscription may lag behind the ledger."""
    if options.two_phase is None:
        return False
    return not sub.enabled or options.two_phase != (sub.two_phase != "d")


def _check_words(options: AlterOptions) -> None:
    _check_publications(options)
    single = (options.connection, options.target, options.rename_to, options.slot_name, options.two_phase)
    other = options.publications or options.settings or options.on_conflict or options.publisher_upgraded
    given = bool(other) or any(value is not None for value in single)
    if options.holds and given:
        raise UsageError(
            "--hold and --release cannot be used together with other changes", hint="Alter the subscription twice."
        )
    if not (options.holds or given):
        raise UsageError("nothing to alter", hint="Try this for the options and examples:\npgsub alter --help")


def _check_failover(options: AlterOptions, sub: Subscription) -> None:
    require_disabled(sub, 'cannot set option "failover" for enabled subscription')
    _check_slot("failover", sub)
    _check_same_slot(options, "slot_name and failover cannot be altered at the same time", _STATE)


def _check_two_phase(options: AlterOptions, sub: Subscription) -> None:
    """Check that two_phase may change. Enabling it changes the slot at its next start, disabling it requires a slot."""
    require_disabled(sub, 'cannot set option "two_phase" for enabled subscription')
    if not options.two_phase:
        if sub.two_phase != "d":
            _check_slot("two_phase", sub)
        _check_same_slot(options, '"slot_name" and "two_phase" cannot be altered at the same time', "42601")


def _check_same_slot(options: AlterOptions, message: str, sqlstate: str) -> None:
    if options.slot_name is not None:
        raise StateForbids(message, hint="Alter the subscription twice.", sqlstate=sqlstate)


def _check_slot(option: str, sub: Subscription) -> None:
    if sub.slot_name is None:
        raise StateForbids(
            f'cannot set option "{option}" for a subscription that does not have a slot name', sqlstate=_STATE
        )


def _check_publications(options: AlterOptions) -> None:
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


def _merged_publications(options: AlterOptions, sub: Subscription) -> tuple[str, ...]:
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
