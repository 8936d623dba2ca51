"""The parties of a switchover: the subscription that ends, the one that leads back, and sessions of both servers."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from pgsub.apply.verified_publisher import recorded_database
from pgsub.catalog.store import StateStore
from pgsub.commands.sessions import connect_publisher, ledger_session, verify_publisher
from pgsub.commands.subscription import passfiles
from pgsub.commands.subscription.definition import publisher_parameters, target_parameters
from pgsub.commands.switchover.obstacles.obstacle import seen_backward
from pgsub.common.errors import StateForbids, TargetUnavailable, UsageError
from pgsub.common.quoting import word
from pgsub.common.subscription import BACK_SUFFIX, Subscription
from pgsub.publisher import connect as publisher
from pgsub.switchover import fence
from pgsub.target.session import advisory_locks, ledger_privileges
from pgsub.target.session import connect as target
from pgsub.target.session.connect import must_use_password

#: The lock of a database that takes part in a switchover: "pgsw". Its fence is one, whatever subscriptions there are.
DATABASE_LOCK = (0x70677377, 0)
OTHER = "another switchover of the same database is under way"
#: Seconds of the pause after which everything is as before, where nothing else is asked for.
TIMEOUT = 30.0
#: Servers that may be gone for good.
PUBLISHER, TARGET = "publisher", "target"
_NAME_BYTES = 63


@dataclass(frozen=True, slots=True)
class SwitchoverOptions:
    """The options of ``switchover``.

    :ivar back: in the other direction: what the subscription ``NAME_back`` follows gives the right.
    :ivar timeout: seconds of the pause, None for :data:`TIMEOUT`.
    :ivar fence: one of :data:`pgsub.switchover.fence.WAYS`.
    :ivar fence_command: keeps clients from writing, and lets them (PGSUB_SWITCHOVER is fence, or release).
    :ivar promote_command: run once clients may write on the taking side.
    :ivar back_connection: how the way back reads the taking side; None for the connection string of the target.
    :ivar back_target: how it writes to the giving side; None for that of the publisher.
    :ivar back_publications: what it subscribes to; none for one of its name, or what the subscription had that ended.
    :ivar verify: compare all tables before.
    :ivar accept_explained: take rows for equal whose difference has a known reason.
    :ivar gone: the server that will not come back, :data:`PUBLISHER` or :data:`TARGET` of the subscription that ends.
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
        """Refuse connection strings that libpq would refuse, before any server is asked.

        :raises UsageError: naming the option.
        :raises StateForbids: a secret that no passfile can hold.
        """
        if self.back_connection is not None:
            publisher_parameters(self.back_connection, "way back (--back-connection)")
        if self.back_target is not None:
            target_parameters(self.back_target, {}, "way back (--back-target)")

    @property
    def names(self) -> tuple[str, str]:
        """Names of the subscription that ends, and of the one that leads back.

        :raises UsageError: the latter would be too long.
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
    def way(self) -> str:
        """How clients are kept from writing."""
        return fence.COMMAND if self.fence_command is not None else self.fence

    @property
    def command(self) -> str:
        """The command that goes on with it."""
        commands = (("--fence-command", self.fence_command), ("--promote-command", self.promote_command))
        given = "".join(f" {option} {shlex.quote(command)}" for option, command in commands if command is not None)
        accepted = " --accept-explained" if self.accept_explained else ""
        return f"pgsub switchover {word(self.name)}{' --back' if self.back else ''}{accepted}{given}"


@contextlib.contextmanager
def taking_session(sub: Subscription) -> Iterator[psycopg.Connection]:
    """Open a session on the taking side that holds the lock of the switchover.

    :raises LockHeld: another run of the command is at work.
    """
    with ledger_session(sub) as session:
        if not advisory_locks.take(session, DATABASE_LOCK, seconds=0.5):
            raise advisory_locks.held(session, DATABASE_LOCK, OTHER)
        yield session


@contextlib.contextmanager
def giving_source(taking: psycopg.Connection, sub: Subscription) -> Iterator[publisher.Connection]:
    """Open a session on the giving side as the subscription reads it, for its sequences.

    :raises WrongSystem: it is another server than the subscription follows.
    """
    verify_publisher(taking, sub, sub.connection)
    expected, must = recorded_database(taking, sub.subid), must_use_password(taking, sub)
    with connect_publisher(sub, expected=expected, must_use_password=must) as source:
        yield source


@contextlib.contextmanager
def giving_session(options: SwitchoverOptions, sub: Subscription, store: StateStore) -> Iterator[psycopg.Connection]:
    """Open a session on the giving side as the way back will write there, before that is made.

    It only reads there, and refuses views: a role that may create in the database could make a ledger meanwhile.

    :raises PermissionMissing: schema pgsub of that server is a stranger's.
    """
    conninfo = options.back_target or passfiles.revealed(sub.connection, "publisher", store.path.parent)
    with contextlib.closing(target.connect(conninfo, "pgsub switchover", replica=False, views=False)) as session:
        # guard: a ledger of an untrusted owner is not read
        with seen_backward():
            ledger_privileges.check(session)
        yield session


@contextlib.contextmanager
def giving_ledger(options: SwitchoverOptions, back: Subscription) -> Iterator[psycopg.Connection]:
    """Open a session on the giving side, where the subscription that leads back has its ledger.

    :raises TargetUnavailable: with what to do if it will never come back.
    """
    with contextlib.ExitStack() as stack:
        try:
            session = stack.enter_context(ledger_session(back))
        except TargetUnavailable as error:
            error.hint = (
                f"{error.hint or ''}\nIf the publisher is gone for good, this leaves the target as it was:\n"
                f"{options.command} --abort --gone {PUBLISHER}"
            ).strip()
            raise
        yield session


def found(store: StateStore, name: str) -> Subscription | None:
    """Return a subscription of the state store, None where it has none of this name."""
    return next((one for one in store.subscriptions() if one.name == name), None)


def the_one(store: StateStore, options: SwitchoverOptions) -> Subscription:
    """Return the subscription that is to end.

    :raises StateForbids: there is none, but the one of the other direction.
    :raises SubscriptionNotFound: there is neither.
    """
    active, back = options.names
    if found(store, active) is None and (there := found(store, back)) is not None and there.enabled:
        raise StateForbids(
            f'subscription "{active}" has been switched over already'
            if not options.back
            else f'subscription "{options.name}" has not been switched over',
            detail=f'Subscription "{back}" replicates now.',
            hint=f"To go the other way:\npgsub switchover {word(options.name)}{'' if options.back else ' --back'}",
        )
    return store.subscription(active)
