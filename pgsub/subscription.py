"""A subscription's definition as a plain value: what ``create`` stored and what workers are given."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Subscription:
    """The columns of pg_subscription that an engine needs, plus pgsub's own options.

    Conninfos never carry a password; a 0600 passfile named in them does.
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
    two_phase: str = "d"  #: d disabled, p pending, e enabled
    disable_on_error: bool = False
    password_required: bool = True
    password_enforced: bool = False  #: --password-required was given: binds every role but superusers of the target
    run_as_owner: bool = False
    origin: str = "any"  #: any, none
    failover: bool = False
    messages: bool = False  #: pg_logical_emit_message() into the log
    apply_mode: str = "batched"  #: batched, transactional
    copy_atomic: bool = False
    skip_lsn: int = 0
    skips: tuple[str, ...] = ()  #: all that is to be skipped, as it is shown
    owner: str = ""  #: role name of the target connection
    dboid: int = 0  #: oid of the target database
    max_sync_workers: int = 2  #: max_sync_workers_per_subscription: tables that synchronize at once
    copy_workers: int = 2  #: chunks of one table that copy at once
    #: transactions in progress that are applied at once (max_parallel_apply_workers_per_subscription)
    max_parallel_apply_workers: int = 2
    on_conflict: tuple[str, ...] = ()  #: rules, see conflict_rules.py
    unavailable: tuple[str, ...] = ()  #: what the target's role may not do, see preflight.py
