"""A subscription's definition as a plain value, which ``create`` stores and workers receive."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from pgsub.common.errors import PgsubError, UsageError, WrongSystem
from pgsub.common.quoting import named, word

#: Default number of replaced or deleted rows of a table that an adoption keeps.
KEEP = 10_000
#: Suffix of a subscription that a switchover creates to lead back.
BACK_SUFFIX = "_back"
#: Connection parameters that authenticate by themselves, including SCRAM keys: none is stored or shown.
SECRETS = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")

#: Value of apply_workers for as many sessions as pay, as measured by apply.
AUTO = 0

_TIME = re.compile(r"\s*([+-]?\d+(?:\.\d*)?)\s*(us|ms|s|min|h|d)?\s*", re.ASCII)
_MILLISECONDS = {"us": 0.001, "ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


@dataclass(frozen=True, slots=True)
class Subscription:
    """The columns of pg_subscription that a worker needs, and pgsub's own options.

    Conninfos never contain a password; they may name a 0600 passfile that does.
    """

    subid: int
    name: str
    connection: str
    target: str
    publications: tuple[str, ...]
    slot_name: str | None
    enabled: bool = True
    binary: bool = False
    streaming: str = "parallel"  #: off, on, parallel
    synchronous_commit: str = "off"
    wal_receiver_timeout: str = "-1"  #: as given; -1 for the target's setting
    two_phase: str = "d"  #: d disabled, p pending, e enabled
    disable_on_error: bool = False
    password_required: bool = True
    password_enforced: bool = False  #: --password-required was given: applies to all roles but superusers of the target
    run_as_owner: bool = False
    origin: str = "any"  #: any, none
    failover: bool = False
    messages: bool = False  #: log pg_logical_emit_message()
    apply_mode: str = "batched"  #: batched, transactional
    copy_atomic: bool = False
    skip_lsn: int = 0
    skips: tuple[str, ...] = ()  #: everything to be skipped, in the form for display
    owner: str = ""  #: role name of the target connection
    dboid: int = 0  #: oid of the target database
    max_sync_workers: int = 2  #: max_sync_workers_per_subscription: tables that synchronize concurrently
    copy_workers: int = 2  #: chunks of one table that are copied concurrently
    #: max_parallel_apply_workers_per_subscription: transactions in progress that are applied concurrently
    max_parallel_apply_workers: int = 2
    apply_workers: int = AUTO  #: sessions that apply committed transactions concurrently
    on_conflict: tuple[str, ...] = ()  #: rules, see common/conflict_rules.py
    sequences: bool = False  #: repeatedly set the target's sequences to the publisher's values
    unavailable: tuple[str, ...] = ()  #: what the target's role may not use, see commands/preflight/servers.py
    moves: int = 0  #: number of rebuilds from the ledger, see target/ledger/definitions.py
    generation: int = 0  #: number of changes of its publications, see there
    unrefreshed: bool = False  #: a command changed them and has not confirmed that the tables follow
    recorded: int = 0  #: number of the newest copy of the definition that the ledger was given, see there
    table_set: int = 0  #: number of the newest set of tables that the ledger is known to have had, see there
    way_back_of: int | None = None  #: the subscription whose switchover created it, to lead back
    known_since: str | None = field(default=None, compare=False)  #: time of the state store's first record of it

    @property
    def switchover(self) -> str:
        """The command of the switchover that created this subscription, without options."""
        ended = self.name.removesuffix(BACK_SUFFIX)
        return f"pgsub switchover {word(ended)}{' --back' if ended == self.name else ''}"


def complete_hint(error: PgsubError, sub: Subscription) -> None:
    """Complete the hint of an error, which was made without the subscription that it concerns."""
    error.hint = named(error.hint, sub.name)
    # guard: nobody is told to make a way back anew, because that deletes what only its target still has
    if sub.way_back_of is not None and isinstance(error, WrongSystem) and not error.diverged:
        error.hint = (
            "The subscription leads back from a switchover, and only its target may still have what clients wrote on"
            f" the publisher. See what can be done:\n{sub.switchover} --status"
        )


def same_service(before: Subscription, after: Subscription) -> bool:
    """Return whether a running worker need not restart: only options differ that the server rereads without one."""
    fields = ("disable_on_error", "skip_lsn", "skips", "unavailable", "two_phase", "sequences", "unrefreshed")
    return replace(before, **{f: getattr(after, f) for f in (*fields, "recorded", "table_set")}) == after


def same_definition(before: Subscription, after: Subscription | None) -> bool:
    """Return whether no command has changed the definition."""
    return after is not None and replace(before, recorded=after.recorded, table_set=after.table_set) == after


def receiver_timeout(text: str) -> float | None:
    """Parse the option wal_receiver_timeout like ``parse_int`` (guc.c).

    :return: seconds, 0 for never; None if the target's setting applies.
    :raises UsageError: in the server's words.
    """
    if text == "-1":
        return None
    match = _TIME.fullmatch(text)
    if match is None:
        raise UsageError(
            f'invalid value for parameter "wal_receiver_timeout": "{text}"',
            hint='Valid units for this parameter are "us", "ms", "s", "min", "h", and "d".',
            sqlstate="22023",
        )
    milliseconds = round(float(match[1]) * _MILLISECONDS[match[2] or "ms"])
    if not 0 <= milliseconds < 2**31:
        raise UsageError(
            f'{milliseconds} ms is outside the valid range for parameter "wal_receiver_timeout"'
            " (0 ms .. 2147483647 ms)",
            sqlstate="22023",
        )
    return milliseconds / 1000
