"""The connections of one worker, and what belongs to each: the publisher's stream, and sessions on the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import psycopg

from pgsub.apply.assembler import Assembler
from pgsub.apply.receiver import Timing
from pgsub.apply.relations import RelationCache
from pgsub.apply.standby import StandbyNames
from pgsub.publisher.walsender import WalSender
from pgsub.target.progress import Progress


@dataclass(slots=True)
class TargetSession:
    """A writing session under the worker's claim."""

    connection: psycopg.Connection
    progress: Progress
    relations: RelationCache


@dataclass(slots=True)
class Streams:
    """Both ends of one worker: restarted together, never one alone."""

    session: TargetSession
    walsender: WalSender
    assembler: Assembler
    open_session: Callable[[], TargetSession]  #: a further writing session under the same claim
    standby: StandbyNames  #: commits on the publisher may wait for the flush position, those that send nothing too
    timing: Timing
    appliers: int = 0  #: transactions that may be applied while they arrive
    set_based: bool = True  #: changes may be executed as sets
    pending: bool = False  #: two_phase waits for every table to be r

    @property
    def connection(self) -> psycopg.Connection:
        """Of the worker's own target session."""
        return self.session.connection

    @property
    def progress(self) -> Progress:
        """Of the worker's own target session."""
        return self.session.progress

    @property
    def relations(self) -> RelationCache:
        """Of the worker's own target session."""
        return self.session.relations
