"""``pgsub refresh --sequences``: ALTER SUBSCRIPTION … REFRESH SEQUENCES, for publishers of any version."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.serve import sequences
from pgsub.commands.sessions import ledger_session, verified_publisher
from pgsub.commands.subscription.enable_disable import require_enabled
from pgsub.common.errors import TargetSchemaError, TimeoutExpired
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.tablesync.sequences.comparison import Compared
from pgsub.tablesync.sequences.synchronization import Outcome, failure, look


@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """The options of ``refresh --sequences``."""

    name: str
    state_dir: Path
    allow_backward: bool = False
    dry_run: bool = False


def refresh_sequences(options: SequenceOptions, *, reporter: Reporter) -> None:
    """Set the sequences of a subscription to the publisher's values.

    As in the server, sequences without obstacles are set even if others have some.

    :raises TargetSchemaError: a sequence is missing, differs in definition, or may not be read or written.
    :raises TimeoutExpired: open transactions of others hold a sequence.
    """
    with StateStore.open(options.state_dir, create=False) as store:
        sub = store.subscription(options.name)
        require_enabled(sub, "REFRESH SEQUENCES")
        if options.dry_run:
            outcomes = _dry_run(store, sub, reporter)
        else:
            outcomes = sequences.synchronize(store, sub, allow_backward=options.allow_backward)
            sequences.report(sub, outcomes, reporter)
    failed = failure(sub, outcomes, TargetSchemaError)
    if failed is not None:
        raise failed
    _refuse_busy(sub, outcomes)


def _dry_run(store: StateStore, sub: Subscription, reporter: Reporter) -> list[Outcome]:
    """Report what would be set, and return the obstacles of the others."""
    with ledger_session(store, sub) as session, verified_publisher(session, sub, sub.connection) as source:
        found: Compared = look(session, source, sub)
    for one in found.wanted:
        reporter.notice(f'sequence "{one.local.shown}" would be set to {one.position.last_value} if it is behind')
    return [Outcome(one.key, one.oid, obstacle=one) for one in found.obstacles]


def _refuse_busy(sub: Subscription, outcomes: Iterable[Outcome]) -> None:
    busy = [f'"{one.shown}"' for one in outcomes if one.busy]
    if busy:
        raise TimeoutExpired(
            "timeout while waiting for sequences that open transactions of the target took values of",
            detail=f"Sequences: {', '.join(busy)}. The others were set.",
            hint=f"Wait until the transactions end, and try again:\npgsub refresh {word(sub.name)} --sequences",
        )
