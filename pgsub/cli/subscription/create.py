"""``pgsub create``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import typer

from pgsub.cli.command_tree.command import command
from pgsub.cli.command_tree.values import Conf, Master, Timeout, conninfo, fields, parse_settings
from pgsub.cli.pages import Page
from pgsub.cli.settings import current
from pgsub.cli.subscription import create_options as given
from pgsub.cli.subscription import plan
from pgsub.common.errors import UsageError

if TYPE_CHECKING:
    from pgsub.commands.subscription.create import CreateOptions

PAGE = Page(
    summary="Create a subscription and synchronize its tables",
    description="""
Registers the subscription, creates its replication slot on the publisher, copies the tables of its publications and
applies changes until the target has reached the publisher's position of that moment. The tables must exist on the
target.

With --no-wait the subscription is only registered and a running pgsub run does the work; with --follow the command
stays. Where pgsub run serves the state folder already, it does the work and this command watches.

Both servers are looked at first. With --dry-run nothing is changed: how each table would be copied is printed (with
--json as one document), and whatever does not fit is a warning: types, constraints, replica identities, privileges
with the GRANT to paste, room for slots and sessions, old transactions that slots will wait for. With --strict a
warning is an error.

With --two-phase the command ends when two_phase is enabled: once every table is synchronized, or from the start with
--no-copy-data. From then on no table can be copied: what would is refused. The target needs room for as many prepared
transactions as the publisher (max_prepared_transactions).

Changes and copies are made as the owner of each table where the user of --target may SET ROLE to it, and TRUNCATE as
that user; with --run-as-owner everything is made as that user. A member of the owner that may not SET ROLE is refused;
a user that is no member goes on as itself with its own privileges on the table, and is warned: the owner's code
(triggers, rules, expressions) then runs with the rights of the user.

With --on-conflict conflicts of a type are resolved by a rule, for all tables or for one; without, everything is as in
the server. pgsub-conflicts(7) has the types, the resolutions and what each of them does.

A password in a connection string is moved to a file that only you can read.

With --messages the publisher sends what pg_logical_emit_message() writes too, and pgsub run logs it: the message of a
transaction once that is committed here, any other as it comes, perhaps again after a restart. A large transaction that
is streamed can bring a message that was written after a savepoint and before any change of a row, though that savepoint
is rolled back.

With --password-required in so many words the publisher must ask for a password, at every connection, and --connection
must hold it; that binds every user of the target but superusers, who alone may give --no-password-required. Without
either nothing is enforced: the server keeps roles of the database from the credentials of its operating-system user,
and here those are your own.
""",
    examples=(
        (
            "Subscribe and wait until all rows are there.",
            'pgsub create sales --connection "host=db1 dbname=shop user=repl" --target "host=db2 dbname=shop"'
            " --publication sales",
        ),
        (
            "Register only; a pgsub run that serves the folder does the rest.",
            "pgsub create sales --connection service=shop --target service=copy --publication sales --no-wait",
        ),
    ),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "create", PAGE)(create)


def create(
    name: given.Name,
    publication: given.Publications,
    connection: given.Connection = None,
    target: given.Target = None,
    connect: given.Connect = None,
    create_slot: given.CreateSlot = None,
    slot_name: given.SlotName = None,
    enabled: given.Enabled = None,
    copy_data: given.CopyData = None,
    binary: given.Binary[bool] = False,
    streaming: given.Streaming[given.StreamingValue] = "parallel",
    synchronous_commit: given.SynchronousCommit[given.SynchronousCommitValue] = "off",
    wal_receiver_timeout: given.WalReceiverTimeout[str] = "-1",
    two_phase: given.TwoPhase = False,
    disable_on_error: given.DisableOnError[bool] = False,
    password_required: given.PasswordRequired = None,
    origin: given.Origin[given.OriginValue] = "any",
    failover: given.Failover = False,
    run_as_owner: given.RunAsOwner[bool] = False,
    messages: given.Messages[bool] = False,
    apply_mode: given.ApplyMode[given.ApplyModeValue] = "batched",
    copy_atomic: given.CopyAtomic[bool] = False,
    max_sync_workers: given.MaxSyncWorkers[int] = 2,
    copy_workers: given.CopyWorkers[int] = 2,
    max_parallel_apply_workers: given.MaxParallelApplyWorkers = 2,
    on_conflict: given.OnConflict = None,
    server: given.ForeignServer = None,
    retain_dead_tuples: given.RetainDeadTuples = None,
    max_retention_duration: given.MaxRetentionDuration = 0,
    if_not_exists: given.IfNotExists = False,
    dry_run: given.DryRun = False,
    as_json: given.AsJson = False,
    strict: given.Strict = False,
    wait: given.Wait = True,
    follow: given.Follow = False,
    timeout: Timeout = None,
    master: Master = None,
    conf: Conf = None,
) -> None:
    """Collect the options and create the subscription."""
    told = dict(locals())
    # Neither server is to be guessed from, nor children to inherit, what only this command was given
    from pgsub.common.conninfo import take_environment

    told["environment"] = take_environment()
    for variable in ("PGSUB_CONNECTION", "PGSUB_TARGET"):
        os.environ.pop(variable, None)
    from pgsub.commands.subscription.create import CreateOptions

    told |= {
        "connection": conninfo(connection, "--connection"),
        "target": conninfo(target, "--target"),
        "publications": tuple(publication),
        "state_dir": current.state_dir,
        "settings": {option: told[option] for option in given.SETTINGS},
        "on_conflict": tuple(on_conflict or ()),
        "conf": parse_settings(conf),
    }
    _create(CreateOptions(**fields(CreateOptions, told)), as_json=as_json)


def _create(options: CreateOptions, *, as_json: bool) -> None:
    if as_json and not options.dry_run:
        raise UsageError("--json needs --dry-run", hint="pgsub status --json shows what was created.")
    from pgsub.cli.output.reporting import ConsoleReporter
    from pgsub.commands.subscription.create import create as create_subscription

    # who follows sees the log as pgsub run shows it
    reporter = ConsoleReporter(log_from=0 if options.follow else 1)
    try:
        result = create_subscription(options, reporter=reporter)
    finally:
        reporter.done()
    if result.plan is not None:
        plan.show("create", options.name, result.plan, result.plan.document() if as_json else None)
