"""Turns the options of ``create`` into a subscription's definition. Mirrors parse_subscription_options."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pgsub.commands.serve.synchronize import ServiceOptions
from pgsub.common import conflict_rules
from pgsub.common.connections import conninfo as ci
from pgsub.common.connections import conninfo_check
from pgsub.common.errors import StateForbids, UsageError
from pgsub.common.subscription import KEEP, SECRETS, Subscription
from pgsub.publisher.slot_names import valid_slot_name as valid_slot_name
from pgsub.target.ledger import two_phase_state

NAME_BYTES = 63  #: NAMEDATALEN - 1


@dataclass(frozen=True, slots=True)
class CreateOptions(ServiceOptions):
    """The options of ``create``. An option that was not given is None.

    :ivar settings: options of WITH (…) that are stored as given, by field of Subscription.
    """

    name: str
    connection: str | None
    target: str | None
    publications: tuple[str, ...]
    state_dir: Path
    environment: Mapping[str, str] = field(default_factory=dict)  #: PG* variables, removed from the environment
    connect: bool | None = None
    create_slot: bool | None = None
    enabled: bool | None = None
    copy_data: bool | None = None
    adopt: bool = False  #: compare existing rows, and write only differences
    keep_replaced: int = KEEP
    slot_name: str | None = None  #: ``none`` for no slot
    two_phase: bool = False
    password_required: bool | None = None  #: None: true, but not enforced
    on_conflict: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    if_not_exists: bool = False
    dry_run: bool = False
    strict: bool = False
    follow: bool = False
    subid: int | None = None  #: from :func:`new_subid` if recorded before


@dataclass(frozen=True, slots=True)
class Definition:
    """A new subscription, and the steps of its creation.

    :ivar keep: the maximum number of replaced or deleted rows to keep for each adopted table.
    :ivar passwords: connection parameters with a password, by the password file that will hold it.
    """

    sub: Subscription
    connect: bool
    create_slot: bool
    copy_data: bool
    adopt: bool = False
    passwords: Mapping[Path, Mapping[str, str]] = field(repr=False, default_factory=dict)
    keep: int = 0


def resolve(options: CreateOptions) -> Definition:
    """Apply the defaults and restrictions of CREATE SUBSCRIPTION.

    :raises UsageError: the server's error for invalid names, connection strings, or contradictory options.
    :raises StateForbids: something is not supported, or is a secret that no password file can hold.
    """
    check_name(options.name)
    if not options.publications:
        raise UsageError("no publication given", hint="Name one with --publication.")
    check_publications(options.publications)
    connect = options.connect is not False
    for option in ("enabled", "create_slot", "copy_data"):
        if not connect and getattr(options, option):
            raise _exclusive("connect = false", option, "--no-connect")
    if options.adopt and (not connect or options.copy_data is False):
        cause = "copy_data" if connect else "connect"
        raise _exclusive(f"{cause} = false", "adopt", f"--no-{cause.replace('_', '-')}")
    slot_name = _slot_name(options)
    create_slot = connect if options.create_slot is None else options.create_slot
    enabled = connect if options.enabled is None else options.enabled
    subid = options.subid or new_subid()
    folder = options.state_dir / "passfiles"
    connection, target = both_parameters(options.connection, options.target, options.environment)
    files = {folder / f"{subid}.publisher": connection, folder / f"{subid}.target": target}
    sub = Subscription(
        subid=subid,
        name=options.name,
        connection=public(connection, folder / f"{subid}.publisher"),
        target=public(target, folder / f"{subid}.target"),
        publications=options.publications,
        slot_name=slot_name,
        enabled=enabled,
        two_phase=two_phase_state.PENDING if options.two_phase else two_phase_state.DISABLED,
        password_required=options.password_required is not False,
        password_enforced=options.password_required is True,
        on_conflict=conflict_rules.merged((), options.on_conflict),
        **options.settings,
    )
    passwords = {path: params for path, params in files.items() if ci.split_password(params)[1] is not None}
    copy_data = connect if options.copy_data is None else options.copy_data
    return Definition(sub, connect, create_slot, copy_data, options.adopt, passwords, options.keep_replaced)


def new_subid() -> int:
    """Return a random number for a new subscription."""
    return secrets.randbelow(2**31 - 1) + 1


def check_name(name: str) -> None:
    """Check the name of a subscription.

    :raises UsageError: the server would not accept it.
    """
    if not name or len(name.encode()) > NAME_BYTES or not name.isprintable():
        raise UsageError(
            "invalid subscription name", detail=f"A name is 1 to {NAME_BYTES} bytes long, without control characters."
        )


def check_publications(names: Sequence[str]) -> None:
    """Refuse duplicates (``check_duplicates_in_publist``).

    :raises UsageError: a publication is named twice.
    """
    for name, count in Counter(names).items():
        if count > 1:
            raise UsageError(
                f'publication name "{name}" used more than once', hint="Name each publication once.", sqlstate="42710"
            )


def _exclusive(cause: str, option: str, words: str) -> UsageError:
    return UsageError(
        f"{cause} and {option} = true are mutually exclusive options",
        hint=f"Leave out {words}, or --{option.replace('_', '-')}.",
        sqlstate="42601",
    )


def _slot_name(options: CreateOptions) -> str | None:
    if options.slot_name is not None and options.slot_name.lower() == "none":
        for option, given in (("enabled", options.enabled), ("create_slot", options.create_slot)):
            if given:
                raise _exclusive("slot_name = NONE", option, "--slot-name none")
            if given is None and options.connect is not False:
                raise UsageError(
                    f"subscription with slot_name = NONE must also set {option} = false",
                    hint=f"Add --no-{option.replace('_', '-')}.",
                    sqlstate="42601",
                )
        return None
    return valid_slot_name(options.name if options.slot_name is None else options.slot_name)


def both_parameters(
    connection: str | None, target: str | None, environment: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the connection parameters of publisher and target.

    :param environment: PG* variables by keyword.
    :raises UsageError: options and environment lack a connection string. Both are named if both are missing.
    """
    if connection is None:
        neither = target is None and not environment
        said, give, variables = (
            (", and none for the target", "Give --connection and --target,", "PGSUB_CONNECTION and PGSUB_TARGET")
            if neither
            else ("", "Give --connection", "PGSUB_CONNECTION")
        )
        raise UsageError(
            f"no connection string for the publisher{said}",
            hint=f"{give} or set {variables}; PGHOST and its like never name the publisher.",
        )
    return publisher_parameters(connection), target_parameters(target, environment)


def publisher_parameters(connection: str, side: str = "publisher") -> dict[str, str]:
    """Return the parameters of the publisher's connection, including its password.

    :param side: the name of the server in errors.
    :raises UsageError: libpq refuses the text, or a value in it.
    :raises StateForbids: the text has a secret that no password file can hold.
    """
    params = ci.parse(connection, side)
    conninfo_check.check(params, side, uri=_is_uri(connection))
    return _storable(params, side)


def target_parameters(target: str | None, environment: Mapping[str, str], side: str = "target") -> dict[str, str]:
    """Return the parameters of the target's connection, completed from the environment.

    :param environment: PG* variables by keyword.
    :param side: the name of the server in errors.
    """
    if target is None and not environment:
        raise UsageError("no connection string for the target", hint="Give --target or set PGSUB_TARGET.")
    params = ci.complete_target(ci.parse(target or "", side), environment)
    conninfo_check.check(params, side, uri=_is_uri(target or ""))
    return _storable(params, side)


def _is_uri(text: str) -> bool:
    """Return whether libpq reads a connection string as a URI (``uri_prefix_length``)."""
    return text.startswith(("postgresql://", "postgres://"))


def _storable(params: dict[str, str], side: str) -> dict[str, str]:
    """Refuse secrets other than a password. libpq reads them only from a service file."""
    for key in SECRETS:
        if key != "password" and key in params:
            raise StateForbids(
                f"cannot store {key} of the {side}'s connection string",
                detail="Secrets are kept out of the state store, and a passfile holds passwords only.",
                hint="Put the connection into a service file that only you can read (PGSERVICEFILE), and name"
                " it: service=NAME.",
            )
    return params


def public(params: Mapping[str, str], passfile: Path) -> str:
    """Return the connection string to store, in which a password is replaced by its password file."""
    without, password = ci.split_password(params)
    return ci.join({**without, "passfile": str(passfile)} if password is not None else without)
