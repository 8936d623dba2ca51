"""The clauses and options of CREATE SUBSCRIPTION as words of the command line."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import typer

from pgsub.cli.command_tree.values import receiver_timeout, unsupported

#: Of an option that alter has too: its type there is ``T | None``, for what is not given stays as it is.
T = TypeVar("T")
StreamingValue = Literal["off", "on", "parallel"]
SynchronousCommitValue = Literal["off", "on", "local", "remote_write", "remote_apply"]
OriginValue = Literal["any", "none"]
ApplyModeValue = Literal["batched", "transactional"]

#: Options that are stored as they are given: fields of Subscription.
SETTINGS = (
    "binary",
    "streaming",
    "synchronous_commit",
    "wal_receiver_timeout",
    "disable_on_error",
    "run_as_owner",
    "origin",
    "failover",
    "messages",
    "apply_mode",
    "copy_atomic",
    "max_sync_workers",
    "copy_workers",
    "max_parallel_apply_workers",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the subscription.")]
Publications = Annotated[
    list[str], typer.Option("--publication", metavar="PUB", help="Publication to subscribe to; may be repeated.")
]
Connection = Annotated[
    str | None,
    typer.Option(
        "--connection",
        metavar="CONNINFO",
        envvar="PGSUB_CONNECTION",
        show_envvar=True,
        help="Publisher: a libpq conninfo, URI or service=NAME; - reads one line from standard input.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="CONNINFO",
        envvar="PGSUB_TARGET",
        show_envvar=True,
        help="Target database, in the same forms; PGHOST and its like complete it.",
    ),
]
Connect = Annotated[
    bool | None,
    typer.Option("--connect/--no-connect", show_default="--connect", help="Connect to the publisher now."),
]
CreateSlot = Annotated[
    bool | None,
    typer.Option(
        "--create-slot/--no-create-slot",
        show_default="--create-slot",
        help="Create the replication slot on the publisher.",
    ),
]
SlotName = Annotated[
    str | None,
    typer.Option("--slot-name", metavar="NAME|none", show_default="NAME", help="Replication slot to use."),
]
Enabled = Annotated[
    bool | None, typer.Option("--enabled/--no-enabled", show_default="--enabled", help="Start replicating at once.")
]
CopyData = Annotated[
    bool | None,
    typer.Option(
        "--copy-data/--no-copy-data", show_default="--copy-data", help="Copy the rows that the tables hold already."
    ),
]
Binary = Annotated[T, typer.Option("--binary/--no-binary", help="Ask the publisher for values in binary format.")]
Streaming = Annotated[
    T,
    typer.Option(
        "--streaming",
        metavar="off|on|parallel",
        case_sensitive=False,
        show_default=True,
        help="Receive large transactions while they are in progress.",
    ),
]
SynchronousCommit = Annotated[
    T,
    typer.Option(
        "--synchronous-commit",
        metavar="off|local|remote_write|on|remote_apply",
        case_sensitive=False,
        show_default=True,
        help="synchronous_commit of apply on the target.",
    ),
]
WalReceiverTimeout = Annotated[
    T,
    typer.Option(
        "--wal-receiver-timeout",
        metavar="TIME",
        callback=receiver_timeout,
        show_default=True,
        help="Silence after which the publisher counts as lost, as 30s or 5min; 0: never, -1: the target's setting.",
    ),
]
TwoPhase = Annotated[
    bool,
    typer.Option(
        "--two-phase/--no-two-phase",
        help="Apply PREPARE TRANSACTION as such, not at its commit, once every table is synchronized.",
    ),
]
DisableOnError = Annotated[
    T,
    typer.Option(
        "--disable-on-error/--no-disable-on-error", help="Disable the subscription when apply or a copy meets an error."
    ),
]
PasswordRequired = Annotated[
    bool | None,
    typer.Option(
        "--password-required/--no-password-required",
        show_default=False,
        help="Refuse a publisher that asks for no password, unless the target's user is a superuser.",
    ),
]
Origin = Annotated[
    T,
    typer.Option(
        "--origin",
        metavar="any|none",
        case_sensitive=False,
        show_default=True,
        help="Receive all changes, or only those that came from no other origin.",
    ),
]
Failover = Annotated[
    bool, typer.Option("--failover/--no-failover", help="Let standbys of the publisher synchronize the slots.")
]
RunAsOwner = Annotated[
    T,
    typer.Option("--run-as-owner/--no-run-as-owner", help="Apply as the target's user, not as the tables' owners."),
]
Messages = Annotated[
    T,
    typer.Option(
        "--messages/--no-messages",
        help="Receive logical decoding messages (pg_logical_emit_message) and write them to the log.",
    ),
]
ApplyMode = Annotated[
    T,
    typer.Option(
        "--apply-mode",
        metavar="batched|transactional",
        case_sensitive=False,
        show_default=True,
        help="One commit on the target for several transactions of the publisher, or for each one.",
    ),
]
CopyAtomic = Annotated[
    T, typer.Option("--copy-atomic/--no-copy-atomic", help="Copy every table in one transaction, never in chunks.")
]
MaxSyncWorkers = Annotated[
    T, typer.Option("--max-sync-workers", metavar="N", min=1, show_default=True, help="Tables copied at once.")
]
CopyWorkers = Annotated[
    T, typer.Option("--copy-workers", metavar="N", min=1, show_default=True, help="Chunks of a table copied at once.")
]
MaxParallelApplyWorkers = Annotated[
    int,
    typer.Option(
        "--max-parallel-apply-workers",
        metavar="N",
        min=0,
        show_default=True,
        help="Transactions in progress applied at once with --streaming parallel.",
    ),
]
OnConflict = Annotated[
    list[str] | None,
    typer.Option(
        "--on-conflict",
        metavar="[SCHEMA.TABLE:]TYPE=RESOLUTION",
        help="What is done with conflicts of a type, see pgsub-conflicts(7); may be repeated.",
    ),
]
# What cannot be had from outside the server is no unknown option: the error says why, and what to do instead.
ForeignServer = Annotated[
    str | None,
    typer.Option(
        "--server",
        hidden=True,
        callback=unsupported(
            "a subscription cannot take its connection from a foreign server",
            "Only the server itself may read the password of a user mapping.",
            "Put the connection into a service file, and name it: --connection service=NAME",
        ),
    ),
]
_DEAD = (
    "What was deleted on the target is invisible to its clients, so no conflict is ever update_deleted: such an UPDATE"
    " is reported as update_missing.",
    "Leave out the option.",
)
RetainDeadTuples = Annotated[
    bool | None,
    typer.Option(
        "--retain-dead-tuples/--no-retain-dead-tuples",
        hidden=True,
        callback=unsupported("retain_dead_tuples is not supported", *_DEAD),
    ),
]
MaxRetentionDuration = Annotated[
    int,
    typer.Option(
        "--max-retention-duration",
        hidden=True,
        callback=unsupported("max_retention_duration is not supported", *_DEAD),
    ),
]
IfNotExists = Annotated[
    bool, typer.Option("--if-not-exists", help="Do nothing, with a notice, if the subscription exists.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and print what would be done.")]
AsJson = Annotated[bool, typer.Option("--json", help="With --dry-run: one JSON document.")]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse what would only be a warning.")]
Wait = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Synchronize in the foreground, or leave the work to pgsub run.")
]
Follow = Annotated[bool, typer.Option("--follow", help="Stay and replicate once everything is synchronized.")]
