"""The clauses and options of ALTER SUBSCRIPTION as words of the command line, where create has others.

None is what was not given.
"""

from __future__ import annotations

from typing import Annotated

import typer

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the subscription.")]
Connection = Annotated[
    str | None,
    typer.Option(
        "--connection",
        metavar="CONNINFO",
        help="Publisher: a libpq conninfo, URI or service=NAME; - reads one line from standard input.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="CONNINFO",
        help="Another way to the same target database, in the same forms; PGHOST and its like complete it.",
    ),
]
RenameTo = Annotated[str | None, typer.Option("--rename-to", metavar="NEW", help="Another name.")]
SetPublication = Annotated[
    list[str] | None,
    typer.Option(
        "--set-publication", metavar="PUB", help="Subscribe to this publication and no other; may be repeated."
    ),
]
AddPublication = Annotated[
    list[str] | None,
    typer.Option("--add-publication", metavar="PUB", help="Subscribe to this publication too; may be repeated."),
]
DropPublication = Annotated[
    list[str] | None,
    typer.Option("--drop-publication", metavar="PUB", help="Subscribe to this publication no more; may be repeated."),
]
Refresh = Annotated[
    bool | None,
    typer.Option(
        "--refresh/--no-refresh", show_default="--refresh", help="Let the tables follow a change of publications."
    ),
]
CopyData = Annotated[
    bool | None,
    typer.Option(
        "--copy-data/--no-copy-data", show_default="--copy-data", help="Copy the rows that new tables hold already."
    ),
]
SlotName = Annotated[str | None, typer.Option("--slot-name", metavar="NAME|none", help="Replication slot to use.")]
Hold = Annotated[
    list[str] | None,
    typer.Option(
        "--hold",
        metavar="SCHEMA.TABLE",
        help="Keep the changes of this table and let the others go on; may be repeated.",
    ),
]
Release = Annotated[
    list[str] | None,
    typer.Option("--release", metavar="SCHEMA.TABLE", help="Apply what was kept of a held table; may be repeated."),
]
TwoPhase = Annotated[
    bool | None,
    typer.Option(
        "--two-phase/--no-two-phase",
        help="Apply PREPARE TRANSACTION as such, not at its commit; the subscription is disabled meanwhile.",
    ),
]
PublisherUpgraded = Annotated[
    bool,
    typer.Option(
        "--publisher-upgraded",
        help="Go on after pg_upgrade of the publisher, which took the slot along; the subscription is disabled.",
    ),
]
Failover = Annotated[
    bool | None,
    typer.Option(
        "--failover/--no-failover",
        help="Let standbys of the publisher synchronize the slot; the subscription is disabled meanwhile.",
    ),
]
MaxParallelApplyWorkers = Annotated[
    int | None,
    typer.Option("--max-parallel-apply-workers", metavar="N", min=0, help="Transactions in progress applied at once."),
]
