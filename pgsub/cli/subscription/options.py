"""The clauses and parameters of CREATE and ALTER SUBSCRIPTION as options of ``create`` and ``alter``.

A class is a group of options, whose attributes :func:`~pgsub.cli.command_tree.command.command` turns into parameters.
The terms are those of ``doc/src/sgml/ref/create_subscription.sgml``.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from pgsub.cli.command_tree.option_values import (
    PUBLISHER,
    Conf,
    Connection,
    Master,
    Name,
    Target,
    Timeout,
    Yes,
    choice,
    flag,
    receiver_timeout,
    repeatable,
    sessions_that_apply,
    switch,
    unsupported,
    value,
)
from pgsub.common.subscription import AUTO, KEEP

AsJson = Annotated[bool, typer.Option("--json", help="With --dry-run: one JSON document.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and print what would be done.")]

_DEAD = (
    "Only the target server itself can keep deleted rows; pgsub reports an UPDATE of such a row as update_missing.",
    "Leave out the option.",
)


Adopt = Annotated[bool, typer.Option("--adopt", help="Compare tables that have rows, and write only rows that differ.")]
KeepReplaced = Annotated[
    int,
    typer.Option(
        "--keep-replaced",
        metavar="N",
        min=0,
        help="Rows of each compared table to keep of those that are replaced or deleted; 0 for none.",
    ),
]
_COPY_DATA = switch("copy-data", "Copy pre-existing data of the tables.")


class Service:
    """Options of the synchronization that follows: who does it, and how long the command waits."""

    strict: Annotated[bool, flag("strict", "Treat warnings as errors.")] = False
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Synchronize in the foreground, or leave the work to pgsub run.")
    ] = True
    timeout: Timeout = None
    master: Master = None
    conf: Conf = []


class Unsupported:
    """Options that only the target server's own subscriber supports. The error gives an alternative."""

    server: Annotated[
        str | None,
        typer.Option(
            hidden=True,
            callback=unsupported(
                "a subscription cannot take its connection from a foreign server",
                "Only the server itself may read the password of a user mapping.",
                "Put the connection into a service file, and name it: --connection service=NAME",
            ),
        ),
    ] = None
    retain_dead_tuples: Annotated[
        bool | None, typer.Option(hidden=True, callback=unsupported("retain_dead_tuples is not supported", *_DEAD))
    ] = None
    max_retention_duration: Annotated[
        int, typer.Option(hidden=True, callback=unsupported("max_retention_duration is not supported", *_DEAD))
    ] = 0


class Parameters:
    """The values that ``create`` and ``alter`` store: fields of :class:`~pgsub.common.subscription.Subscription`."""

    binary: Annotated[
        bool, typer.Option(help="Request the publisher to send the data in binary format (as opposed to text).")
    ] = False
    streaming: Annotated[
        Literal["off", "on", "parallel"],
        choice(
            "off|on|parallel", "Enable streaming of in-progress transactions; with parallel, apply them as they arrive."
        ),
    ] = "parallel"
    synchronous_commit: Annotated[
        Literal["off", "on", "local", "remote_write", "remote_apply"],
        choice(
            "off|local|remote_write|on|remote_apply",
            "Override the synchronous_commit setting within the workers' sessions on the target.",
        ),
    ] = "off"
    wal_receiver_timeout: Annotated[
        str,
        value(
            "TIME",
            "Override the wal_receiver_timeout setting, as 30s or 5min; 0 disables it, -1 takes the target's.",
            callback=receiver_timeout,
        ),
    ] = "-1"
    disable_on_error: Annotated[
        bool, typer.Option(help="Disable the subscription if any errors are detected by its workers.")
    ] = False
    origin: Annotated[
        Literal["any", "none"],
        choice("any|none", "Request changes regardless of their origin, or only those that do not have one."),
    ] = "any"
    failover: Annotated[
        bool, typer.Option(help="Enable the slots of the subscription to be synced to standbys of the publisher.")
    ] = False
    run_as_owner: Annotated[
        bool, typer.Option(help="Perform all replication actions as the user of --target, not as each table's owner.")
    ] = False
    messages: Annotated[
        bool, typer.Option(help="Request logical decoding messages (pg_logical_emit_message) and log them.")
    ] = False
    sequences: Annotated[
        bool, typer.Option(help="Keep sequences close to the publisher's values; none goes backward.")
    ] = False
    apply_mode: Annotated[
        Literal["batched", "transactional"],
        choice(
            "batched|transactional",
            "Commit several transactions of the publisher at once on the target, or each of them.",
        ),
    ] = "batched"
    copy_atomic: Annotated[bool, typer.Option(help="Copy every table in one transaction, never in chunks.")] = False
    max_sync_workers: Annotated[
        int, value("N", "Table synchronization workers at once; small tables share one.", min=1)
    ] = 2
    copy_workers: Annotated[int, value("N", "Chunks of a table copied at the same time.", min=1)] = 2
    apply_workers: Annotated[
        int,
        value(
            "N|auto",
            "Sessions of the target that apply at the same time, each with a replication origin of its own;"
            " commits keep their order. auto adds sessions only while they pay and the target has room for them.",
            parser=sessions_that_apply,
            show_default="auto",
        ),
    ] = AUTO
    max_parallel_apply_workers: Annotated[
        int, value("N", "In-progress transactions applied at once with --streaming parallel.", min=0)
    ] = 2


#: Names of options that are stored as given.
SETTINGS = tuple(Parameters.__annotations__)


class OtherParameters:
    """The values whose change in ``alter`` affects more than the definition."""

    two_phase: Annotated[
        bool, typer.Option(help="Enable two-phase commit: apply PREPARE TRANSACTION as such, not at its commit.")
    ] = False
    password_required: Annotated[
        bool | None,
        typer.Option(
            "--password-required/--no-password-required",
            show_default=False,
            help="Require connections to the publisher to use password authentication; ignored for superusers.",
        ),
    ] = None


class Conflicts:
    """Rules for conflicts."""

    on_conflict: Annotated[
        list[str],
        repeatable("[SCHEMA.TABLE:]TYPE=RESOLUTION", "Resolve conflicts of a type this way, see pgsub-conflicts(7)"),
    ] = []


class Create:
    """Clauses of CREATE SUBSCRIPTION, and parameters that only it has."""

    name: Name
    publication: Annotated[list[str], repeatable("PUB", "Publication to subscribe to")]
    connection: Connection = None
    target: Target = None
    connect: Annotated[bool | None, switch("connect", "Connect to the publisher at all.")] = None
    create_slot: Annotated[bool | None, switch("create-slot", "Create the replication slot on the publisher.")] = None
    slot_name: Annotated[
        str | None, value("NAME|none", "Name of the replication slot to use.", show_default="NAME")
    ] = None
    enabled: Annotated[bool | None, switch("enabled", "Replicate actively, or only set up but do not start.")] = None
    copy_data: Annotated[bool | None, _COPY_DATA] = None
    adopt: Adopt = False
    keep_replaced: KeepReplaced = KEEP
    yes: Yes = False


class Checks:
    """The checks of ``create``, and their consequences."""

    if_not_exists: Annotated[bool, flag("if-not-exists", "Issue a notice if it exists, and end.")] = False
    dry_run: DryRun = False
    as_json: AsJson = False
    follow: Annotated[bool, flag("follow", "Stay and replicate once everything is synchronized.")] = False


class Alter:
    """Clauses of ALTER SUBSCRIPTION."""

    name: Name
    connection: Annotated[str | None, value("CONNINFO", PUBLISHER)] = None
    target: Annotated[
        str | None,
        value(
            "CONNINFO", "Another way to the same target database, in the same forms; PGHOST and its like complete it."
        ),
    ] = None
    rename_to: Annotated[str | None, value("NEW", "New name of the subscription.")] = None
    set_publication: Annotated[list[str], repeatable("PUB", "Replace the list of publications")] = []
    add_publication: Annotated[list[str], repeatable("PUB", "Add a publication to the list")] = []
    drop_publication: Annotated[list[str], repeatable("PUB", "Drop a publication from the list")] = []
    refresh: Annotated[bool | None, switch("refresh", "Refresh the tables once the publications changed.")] = None
    copy_data: Annotated[bool | None, _COPY_DATA] = None
    slot_name: Annotated[str | None, value("NAME|none", "Name of the replication slot to use.")] = None
    hold: Annotated[list[str], repeatable("SCHEMA.TABLE", "Keep the changes of this table and apply the others")] = []
    release: Annotated[list[str], repeatable("SCHEMA.TABLE", "Apply the kept changes of a held table")] = []
    publisher_upgraded: Annotated[
        bool,
        flag("publisher-upgraded", "Accept the publisher that pg_upgrade made of the old one, together with its slot."),
    ] = False
