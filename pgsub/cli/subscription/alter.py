"""``pgsub alter``."""

from __future__ import annotations

import typer

from pgsub.cli.command_tree.command import command
from pgsub.cli.command_tree.values import Conf, Master, Timeout, conninfo, fields, parse_settings
from pgsub.cli.pages import Page
from pgsub.cli.settings import current
from pgsub.cli.subscription import alter_options as options
from pgsub.cli.subscription import create_options as given

PAGE = Page(
    summary="Change a subscription",
    description="""
Changes what is given and leaves the rest. A running pgsub run starts the workers again within a second.

With another list of publications the tables follow as with pgsub refresh, unless --no-refresh is given; that needs an
enabled subscription. A new --connection must lead to the same publisher, or to the standby that took its place, and a
new --target to the same database; the command returns once a running pgsub run has ended the workers of the old one.
The replication slot is not renamed with the subscription.

After pg_upgrade of the publisher, which takes logical slots along from PostgreSQL 17 on, the publisher is another
system at another position: --publisher-upgraded records both. Disable the subscription before the old publisher is
stopped for good, and say so only of a slot that pg_upgrade took along: changes that another slot does not have would
be missing.

With --two-phase the slot changes when the subscription is enabled again and every table is synchronized. To take it
back nothing may be prepared, and the publisher must be PostgreSQL 18 or newer.

With --hold a table stands still while the others go on: its changes are kept on the target, in the order in which they
came, and applied when it is released with --release, before any newer change of it. So a table that stops apply need
not stop the rest. Transactions that change it and other tables are not applied as a whole meanwhile, and what is kept
grows in schema pgsub of the target: pgsub status shows how much. A conflict of a kept change is one as ever: it stops
apply, names the transaction that the change came with, and ends when the row is mended, the transaction is skipped, or
the table is held again. A running worker heeds both from its next transaction on.

--on-conflict adds a rule for conflicts or replaces the one of its type and table, TYPE=default takes it back; see
pgsub-conflicts(7). What stops apply at present is tried again by the new rules at once.

A password in a connection string is moved to a file that only you can read. PGSUB_CONNECTION and PGSUB_TARGET are not
looked at here.
""",
    examples=(
        ("Subscribe to another publication and copy its tables.", "pgsub alter sales --add-publication returns"),
        ("Let the rest go on while a table is mended.", "pgsub alter sales --hold public.orders"),
        (
            "Go on after pg_upgrade of the publisher.",
            'pgsub alter sales --connection "host=db4 dbname=shop user=repl" --publisher-upgraded',
        ),
        ("Follow the publisher to another host.", 'pgsub alter sales --connection "host=db3 dbname=shop user=repl"'),
    ),
)

#: Options of SET (…) that take effect with the definition alone, by field of Subscription.
_SETTINGS = (*given.SETTINGS, "password_required")


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "alter", PAGE)(alter)


def alter(
    name: options.Name,
    connection: options.Connection = None,
    target: options.Target = None,
    rename_to: options.RenameTo = None,
    set_publication: options.SetPublication = None,
    add_publication: options.AddPublication = None,
    drop_publication: options.DropPublication = None,
    refresh: options.Refresh = None,
    copy_data: options.CopyData = None,
    slot_name: options.SlotName = None,
    hold: options.Hold = None,
    release: options.Release = None,
    binary: given.Binary[bool | None] = None,
    streaming: given.Streaming[given.StreamingValue | None] = None,
    synchronous_commit: given.SynchronousCommit[given.SynchronousCommitValue | None] = None,
    wal_receiver_timeout: given.WalReceiverTimeout[str | None] = None,
    two_phase: options.TwoPhase = None,
    disable_on_error: given.DisableOnError[bool | None] = None,
    password_required: given.PasswordRequired = None,
    origin: given.Origin[given.OriginValue | None] = None,
    failover: options.Failover = None,
    run_as_owner: given.RunAsOwner[bool | None] = None,
    messages: given.Messages[bool | None] = None,
    apply_mode: given.ApplyMode[given.ApplyModeValue | None] = None,
    copy_atomic: given.CopyAtomic[bool | None] = None,
    max_sync_workers: given.MaxSyncWorkers[int | None] = None,
    copy_workers: given.CopyWorkers[int | None] = None,
    max_parallel_apply_workers: options.MaxParallelApplyWorkers = None,
    publisher_upgraded: options.PublisherUpgraded = False,
    on_conflict: given.OnConflict = None,
    server: given.ForeignServer = None,
    retain_dead_tuples: given.RetainDeadTuples = None,
    max_retention_duration: given.MaxRetentionDuration = 0,
    strict: given.Strict = False,
    wait: given.Wait = True,
    timeout: Timeout = None,
    master: Master = None,
    conf: Conf = None,
) -> None:
    """Collect what was given and alter the subscription."""
    told = dict(locals())
    from pgsub.common.conninfo import take_environment

    told["environment"] = take_environment()
    from pgsub.cli.output.reporting import ConsoleReporter
    from pgsub.commands.alter.alter import AlterOptions
    from pgsub.commands.alter.alter import alter as alter_subscription

    told |= {
        "state_dir": current.state_dir,
        "connection": conninfo(connection, "--connection"),
        "target": conninfo(target, "--target"),
        "set_publication": tuple(set_publication or ()),
        "add_publication": tuple(add_publication or ()),
        "drop_publication": tuple(drop_publication or ()),
        "hold": tuple(hold or ()),
        "release": tuple(release or ()),
        "settings": {option: told[option] for option in _SETTINGS if told[option] is not None},
        "on_conflict": tuple(on_conflict or ()),
        "conf": parse_settings(conf),
    }
    reporter = ConsoleReporter()
    try:
        alter_subscription(AlterOptions(**fields(AlterOptions, told)), reporter=reporter)
    finally:
        reporter.done()
