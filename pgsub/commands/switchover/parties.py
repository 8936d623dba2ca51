"""The parties of a switchover: the ending subscription, the reverse subscription, and sessions on both servers."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from pgsub.apply.verified_publisher import recorded_database
from pgsub.catalog.store import StateStore
from pgsub.commands.sessions import ledger_session
from pgsub.commands.subscription import passfiles
from pgsub.commands.subscription.definition import publisher_parameters, target_parameters
from pgsub.commands.switchover.obstacles.obstacle import in_their_words, seen_backward
from pgsub.common.errors import (
    LedgerLost,
    PublisherUnavailable,
    StateForbids,
    TargetReplaced,
    TargetUnavailable,
    UsageError,
    WrongSystem,
)
from pgsub.common.quoting import word
from pgsub.common.subscription import BACK_SUFFIX, Subscription
from pgsub.publisher import database
from pgsub.switchover import fence, journal
from pgsub.target.session import advisory_locks, ledger_privileges
from pgsub.target.session import connect as target

#: Lock key of a database in a switchover: "pgsw". A database has one fence, regardless of its subscriptions.
DATABASE_LOCK = (0x70677377, 0)
OTHER = "another switchover of the same database is under way"
#: Default limit of the pause in seconds, after which everything is undone.
TIMEOUT = 30.0
#: Servers that may be lost permanently.
PUBLISHER, TARGET = "publisher", "target"
_NAME_BYTES = 63


@dataclass(frozen=True, slots=True)
class SwitchoverOptions:
    """The options of ``switchover``.

    :ivar back: switch in the other direction: the publisher of ``NAME_back`` gives the right to write.
    :ivar timeout: limit of the pause in seconds, None for :data:`TIMEOUT`.
    :ivar fence: one of :data:`pgsub.switchover.fence.WAYS`.
    :ivar fence_command: prevents or allows writes of clients (PGSUB_SWITCHOVER is fence or release).
    :ivar promote_command: run when clients may write on the taking side.
    :ivar back_connection: the reverse subscription's connection to the taking side, None for the target's.
    :ivar back_target: its connection to the giving side, None for the publisher's.
    :ivar back_publications: its publications. Empty means those before the last switchover, or else one with its name.
    :ivar verify: compare all tables before.
    :ivar accept_explained: treat rows as equal if their difference has a known reason.
    :ivar gone: the permanently lost server of the ending subscription, :data:`PUBLISHER` or :data:`TARGET`.
    """

    name: str
    state_dir: Path
    back: bool = False
    timeout: float | None = None
    fence: str = fence.READ_ONLY
    fence_command: str | None = None
    promote_command: str | None = None
    back_connection: str | None = field(default=None, repr=False)
    back_target: str | None = field(default=None, repr=False)
    back_publications: tuple[str, ...] = ()
    verify: bool = True
    accept_explained: bool = False
    gone: str | None = None

    def __post_init__(self) -> None:
        """Refuse invalid connection strings before any server is asked.

        :raises UsageError: libpq would refuse one. The error names the option.
        :raises StateForbids: a secret that no password file can hold.
        """
        if self.back_connection is not None:
            publisher_parameters(self.back_connection, "way back (--back-connection)")
        if self.back_target is not None:
            target_parameters(self.back_target, {}, "way back (--back-target)")

    @property
    def names(self) -> tuple[str, str]:
        """The names of the ending and of the reverse subscription.

        :raises UsageError: the second name would be too long.
        """
        back = f"{self.name}{BACK_SUFFIX}"
        if len(back.encode()) > _NAME_BYTES:
            raise UsageError(
                f'the name of subscription "{self.name}" is too long for a switchover',
                detail=f'The way back is named "{back}", and a name has at most {_NAME_BYTES} bytes.',
                hint=f"Rename it:\npgsub alter {word(self.name)} --rename-to NEW",
            )
        return (back, self.name) if self.back else (self.name, back)

    @property
    def limit(self) -> float:
        """The limit of the pause in seconds."""
        return TIMEOUT if self.timeout is None else self.timeout

    @property
    def way(self) -> str:
        """How clients are prevented from writing."""
        return fence.COMMAND if self.fence_command is not None else self.fence

    @property
    def command(self) -> str:
        """The command that continues the switchover."""
        commands = (("--fence-command", self.fence_command), ("--promote-command", self.promote_command))
        given = "".join(f" {option} {shlex.quote(command)}" for option, command in commands if command is not None)
        accepted = " --accept-explained" if self.accept_explained else ""
        return f"pgsub switchover {word(self.name)}{' --back' if self.back else ''}{accepted}{given}"

    def to_taking(self, sub: Subscription) -> str:
        """Return the reverse subscription's connection string to the taking side, with its password."""
        return self.back_connection or passfiles.revealed(sub.target, "target", self.state_dir)

    def to_giving(self, sub: Subscription) -> str:
        """Return the reverse subscription's connection string to the giving side, with its password."""
        return self.back_target or passfiles.revealed(sub.connection, "publisher", self.state_dir)


@contextlib.contextmanager
def taking_session(store: StateStore, sub: Subscription) -> Iterator[psycopg.Connection]:
    """Open a session on the taking side that holds the lock of the switchover.

    :raises LockHeld: another run of the command is active.
    """
    with ledger_session(store, sub) as session:
        lock(session)
        yield session


def lock(taking: psycopg.Connection) -> None:
    """Take the lock of the switchover for the session.

    :param taking: a session on the taking side.
    :raises LockHeld: another run of the command is active.
    """
    # guard: runs of a switchover exclude each other
    if not advisory_locks.take(taking, DATABASE_LOCK, seconds=0.5):
        raise advisory_locks.held(taking, DATABASE_LOCK, OTHER)


@contextlib.contextmanager
def giving_session(options: SwitchoverOptions, sub: Subscription) -> Iterator[psycopg.Connection]:
    """Open a session on the giving side with the reverse subscription's connection, before that is created.

    It only reads, and refuses views, because a role with CREATE on the database could make a ledger meanwhile.

    :raises PermissionMissing: the owner of schema pgsub on that server is not trusted.
    :raises PublisherUnavailable: it cannot be reached.
    """
    try:
        opened = target.connect(options.to_giving(sub), "pgsub switchover", replica=False, views=False)
    except TargetUnavailable as error:
        raise publisher_away(error) from None
    with contextlib.closing(opened) as session:
        # guard: a ledger of an untrusted owner is not read
        with seen_backward():
            ledger_privileges.check(session)
        yield session


@contextlib.contextmanager
def giving_ledger(options: SwitchoverOptions, store: StateStore, back: Subscription) -> Iterator[psycopg.Connection]:
    """Open a session on the giving side, which has the reverse subscription's ledger.

    :raises PublisherUnavailable: the giving side cannot be reached. The hint covers a permanent loss.
    :raises LedgerLost: it was restored, or an abort was interrupted. :class:`TargetReplaced`: it is another database.
    """
    with contextlib.ExitStack() as stack:
        try:
            session = stack.enter_context(ledger_session(store, back))
        except TargetUnavailable as error:
            away = publisher_away(error)
            away.hint = (
                f"{away.hint or ''}\nIf the publisher is gone for good, this leaves the target as it was:\n"
                f"{options.command} --abort --gone {PUBLISHER}"
            ).strip()
            raise away from None
        except (LedgerLost, TargetReplaced) as error:
            error.message, error.detail, _ = in_their_words(error.message, error.detail, None)
            # guard: a publisher that has lost its ledger in a switchover is not a dead end
            error.hint = f"Leave the target as it was:\n{options.command} --abort"
            raise
        yield session


def publisher_away(error: TargetUnavailable) -> PublisherUnavailable:
    """Return the error for a giving side that cannot be reached. It is the target of the reverse subscription only."""
    message, detail, hint = in_their_words(error.message, error.detail, error.hint)
    return PublisherUnavailable(message, detail=detail, hint=hint, sqlstate=error.sqlstate)


@contextlib.contextmanager
def target_asked(options: SwitchoverOptions) -> Iterator[None]:
    """Tell what helps if the taking side is gone for good. It is the publisher of the reverse subscription.

    :raises TargetUnavailable: it cannot be reached.
    :raises WrongSystem: another server or another database answers.
    """
    gone = f"If the target is gone for good:\n{options.command} --abort --gone {TARGET}"
    try:
        yield
    except TargetUnavailable as error:
        error.hint = f"{error.hint or ''}\n{gone}".strip()
        raise
    except PublisherUnavailable as error:
        message, detail, hint = in_their_words(error.message, error.detail, error.hint)
        hint = f"{hint or ''}\n{gone}".strip()
        raise TargetUnavailable(message, detail=detail, hint=hint, sqlstate=error.sqlstate) from None
    except WrongSystem as error:
        message, detail, _ = in_their_words(error.message, error.detail, None)
        hint = f"See what can be done:\n{options.command} --status\n{gone}"
        raise WrongSystem(message, detail=detail, hint=hint) from None


@contextlib.contextmanager
def session_on_publisher(
    options: SwitchoverOptions, back: Subscription, giving: psycopg.Connection
) -> Iterator[psycopg.Connection]:
    """Open a session on the publisher of the reverse subscription that can change the journal there.

    It holds the lock of the switchover.

    :param giving: a session on the target of the reverse subscription, whose ledger has the publisher's identity.
    :raises WrongSystem: another server or another database answers.
    :raises TargetUnavailable: it cannot be reached, or a standby of it answers.
    :raises PermissionMissing: the owner of schema pgsub on that server is not trusted.
    """
    conninfo = passfiles.revealed(back.connection, "publisher", options.state_dir)
    opened = target.connect(conninfo, "pgsub switchover", replica=False, views=False)
    with contextlib.closing(opened) as session:
        if target.is_standby(session):
            raise target.standby_answers()
        if (expected := recorded_database(giving, back.subid)) is not None:
            # guard: a server that is not the target of the switchover is not changed by its abort
            database.check_database(expected, database.database(session))
        ledger_privileges.check(session)
        lock(session)
        yield session


def ended_way_back(store: StateStore, options: SwitchoverOptions) -> Subscription | None:
    """Return the reverse subscription of a switchover whose ending one has been dropped, None if there is none.

    Another subscription may have the name of that one by now.
    """
    back = store.find(options.names[1])
    if back is None or back.way_back_of is None or store.way_there(back) is not None:
        return None
    return back


def the_one(store: StateStore, options: SwitchoverOptions) -> Subscription:
    """Return the ending subscription.

    :raises StateForbids: only the subscription of the other direction exists, or a switchover of the other direction is
        under way.
    :raises SubscriptionNotFound: neither exists.
    """
    active, back = options.names
    if store.find(active) is None and (there := store.find(back)) is not None and there.enabled:
        raise StateForbids(
            f'subscription "{active}" has been switched over already'
            if not options.back
            else f'subscription "{options.name}" has not been switched over',
            detail=f'Subscription "{back}" replicates now.',
            hint=f"To go the other way:\npgsub switchover {word(options.name)}{'' if options.back else ' --back'}",
        )
    sub = store.subscription(active)
    # guard: a command for the wrong direction does not report that everything is as it was before
    if store.way_there(sub) is not None:
        raise journal.takes_part(active, sub.switchover)
    return sub
