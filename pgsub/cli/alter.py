"""``pgsub alter``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from pgsub.cli import create_options as given
from pgsub.cli.command import command
from pgsub.cli.pages import Page
from pgsub.cli.settings import current
from pgsub.cli.values import Conf, Master, Timeout, conninfo, parse_settings

PAGE = Page(
    summary="Change a subscription",
    description="""
Changes what is given and leaves the rest. A running pgsub run starts the workers again within a second.

With another list of publications the tables follow as with pgsub refresh, unless --no-refresh is given; that needs an
enabled subscription. A new --connection must lead to the same publisher, or to the standby that took its place, and a
new --target to the same database. The replication slot is not renamed with the subscription.

With --two-phase the slot changes when the subscription is enabled again and every table is synchronized. To take it
back nothing may be prepared, and the publisher must be PostgreSQL 18 or newer.

A password in a connection string is moved to a file that only you can read. PGSUB_CONNECTION and PGSUB_TARGET are not
looked at here.
""",
    examples=(
        ("Subscribe to another publication and copy its tables.", "pgsub alter sales --add-publication returns"),
        ("Follow the publisher to another host.", 'pgsub alter sales --connection "host=db3 dbname=shop user=repl"'),
    ),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "alter", PAGE)(alter)


def _publications(option: str, text: str) -> object:
    return typer.Option(option, metavar="PUB", help=f"{text}; may be repeated.")


def alter(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the subscription.")],
    connection: Annotated[
        str | None,
        typer.Option(
            "--connection",
            metavar="CONNINFO",
            help="Publisher: a libpq conninfo, URI or service=NAME; - reads one line from standard input.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="CONNINFO",
            help="Another way to the same target database, in the same forms; PGHOST and its like complete it.",
        ),
    ] = None,
    rename_to: Annotated[str | None, typer.Option("--rename-to", metavar="NEW", help="Another name.")] = None,
    set_publication: Annotated[
        list[str] | None, _publications("--set-publication", "Subscribe to this publication and no other")
    ] = None,
    add_publication: Annotated[
        list[str] | None, _publications("--add-publication", "Subscribe to this publication too")
    ] = None,
    drop_publication: Annotated[
        list[str] | None, _publications("--drop-publication", "Subscribe to this publication no more")
    ] = None,
    refresh: Annotated[
        bool | None,
        typer.Option(
            "--refresh/--no-refresh", show_default="--refresh", help="Let the tables follow a change of publications."
        ),
    ] = None,
    copy_data: Annotated[
        bool | None,
        typer.Option(
            "--copy-data/--no-copy-data",
            show_default="--copy-data",
            help="Copy the rows that new tables hold already.",
        ),
    ] = None,
    slot_name: Annotated[
        str | None, typer.Option("--slot-name", metavar="NAME|none", help="Replication slot to use.")
    ] = None,
    binary: Annotated[
        bool | None, typer.Option("--binary/--no-binary", help="Ask the publisher for values in binary format.")
    ] = None,
    streaming: Annotated[
        Literal["off", "on", "parallel"] | None,
        typer.Option(
            "--streaming",
            metavar="off|on|parallel",
            case_sensitive=False,
            help="Receive large transactions while they are in progress.",
        ),
    ] = None,
    synchronous_commit: Annotated[
        Literal["off", "on", "local", "remote_write", "remote_apply"] | None,
        typer.Option(
            "--synchronous-commit",
            metavar="off|local|remote_write|on|remote_apply",
            case_sensitive=False,
            help="synchronous_commit of apply on the target.",
        ),
    ] = None,
    two_phase: Annotated[
        bool | None,
        typer.Option(
            "--two-phase/--no-two-phase",
            help="Apply PREPARE TRANSACTION as such, not at its commit; the subscription is disabled meanwhile.",
        ),
    ] = None,
    disable_on_error: Annotated[
        bool | None,
        typer.Option(
            "--disable-on-error/--no-disable-on-error",
            help="Disable the subscription when apply or a copy meets an error.",
        ),
    ] = None,
    password_required: Annotated[
        bool | None,
        typer.Option(
            "--password-required/--no-password-required",
            help="Refuse a publisher that asks for no password, unless the target's user is a superuser.",
        ),
    ] = None,
    origin: Annotated[
        Literal["any", "none"] | None,
        typer.Option(
            "--origin",
            metavar="any|none",
            case_sensitive=False,
            help="Receive all changes, or only those that came from no other origin.",
        ),
    ] = None,
    failover: Annotated[
        bool | None,
        typer.Option(
            "--failover/--no-failover",
            help="Let standbys of the publisher synchronize the slot; the subscription is disabled meanwhile.",
        ),
    ] = None,
    run_as_owner: Annotated[
        bool | None,
        typer.Option("--run-as-owner/--no-run-as-owner", help="Apply as the target's user, not as the tables' owners."),
    ] = None,
    messages: Annotated[
        bool | None,
        typer.Option(
            "--messages/--no-messages",
            help="Receive logical decoding messages (pg_logical_emit_message) and write them to the log.",
        ),
    ] = None,
    apply_mode: Annotated[
        Literal["batched", "transactional"] | None,
        typer.Option(
            "--apply-mode",
            metavar="batched|transactional",
            case_sensitive=False,
            help="One commit on the target for several transactions of the publisher, or for each one.",
        ),
    ] = None,
    copy_atomic: Annotated[
        bool | None,
        typer.Option("--copy-atomic/--no-copy-atomic", help="Copy every table in one transaction, never in chunks."),
    ] = None,
    max_sync_workers: Annotated[
        int | None, typer.Option("--max-sync-workers", metavar="N", min=1, help="Tables copied at once.")
    ] = None,
    copy_workers: Annotated[
        int | None, typer.Option("--copy-workers", metavar="N", min=1, help="Chunks of a table copied at once.")
    ] = None,
    max_parallel_apply_workers: Annotated[
        int | None,
        typer.Option(
            "--max-parallel-apply-workers", metavar="N", min=0, help="Transactions in progress applied at once."
        ),
    ] = None,
    on_conflict: given.OnConflict = None,
    strict: given.Strict = False,
    wait: given.Wait = True,
    timeout: Timeout = None,
    master: Master = None,
    conf: Conf = None,
) -> None:
    """Collect what was given and alter the subscription."""
    from pgsub.conninfo import take_environment

    settings = {
        "binary": binary,
        "streaming": streaming,
        "synchronous_commit": synchronous_commit,
        "disable_on_error": disable_on_error,
        "password_required": password_required,
        "run_as_owner": run_as_owner,
        "origin": origin,
        "failover": failover,
        "messages": messages,
        "apply_mode": apply_mode,
        "copy_atomic": copy_atomic,
        "max_sync_workers": max_sync_workers,
        "copy_workers": copy_workers,
        "max_parallel_apply_workers": max_parallel_apply_workers,
    }
    environment = take_environment()
    from pgsub.cli.reporting import ConsoleReporter
    from pgsub.commands.alter import AlterOptions
    from pgsub.commands.alter import alter as alter_subscription

    options = AlterOptions(
        name=name,
        state_dir=current.state_dir,
        connection=conninfo(connection, "--connection"),
        target=conninfo(target, "--target"),
        rename_to=rename_to,
        set_publication=tuple(set_publication or ()),
        add_publication=tuple(add_publication or ()),
        drop_publication=tuple(drop_publication or ()),
        refresh=refresh,
        copy_data=copy_data,
        slot_name=slot_name,
        two_phase=two_phase,
        settings={option: value for option, value in settings.items() if value is not None},
        on_conflict=tuple(on_conflict or ()),
        environment=environment,
        strict=strict,
        wait=wait,
        timeout=timeout,
        master=master,
        conf=parse_settings(conf),
    )
    reporter = ConsoleReporter()
    try:
        alter_subscription(options, reporter=reporter)
    finally:
        reporter.done()
