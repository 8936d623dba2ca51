"""One point: a snapshot of the publisher at an LSN, and one of the target with all that this LSN covers, no more.

:mod:`~pgsub.reconcile.point_attempt` explains how apply is brought there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import psycopg

from pgsub.apply import verified_publisher
from pgsub.common.errors import TimeoutExpired
from pgsub.common.query import leave_transaction
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.publisher.slot_creation import Report
from pgsub.reconcile.point_attempt import Attempt, GivenUp, Point, Result, Standing

#: Maximum number of seconds that apply waits at a barrier before it continues by itself.
STAND_SECONDS = 10.0
_TRIES = 3


@contextlib.contextmanager
def one_point(
    session: psycopg.Connection,
    holder: psycopg.Connection,
    sub: Subscription,
    *,
    deadline: float,
    report: Report = lambda message, detail, hint: None,
    check: Callable[[], object] = lambda: None,
    seconds: float = STAND_SECONDS,
) -> Iterator[Point]:
    """Open one point. Apply goes on before the block begins.

    :param session: on the target, for the ledger.
    :param holder: on the target; its snapshot lasts as long as the block.
    :param deadline: time by which apply must have reached the point, by ``time.monotonic()``.
    :param report: receives reports about transactions of the publisher that delay the point.
    :param check: called from time to time while waiting for apply; raises an error if apply cannot reach the point.
    :param seconds: maximum time that apply may wait.
    :raises TimeoutExpired: apply was too late, or waited longer than ``seconds`` too often.
    """
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(contextlib.closing(verified_publisher.connect(session, sub)))
        make = partial(Attempt, session, source, sub, deadline, seconds, check, report)
        point, snapshot = _tried(sub, make, lambda attempt: attempt.run(holder))
        stack.callback(snapshot.close)
        stack.callback(leave_transaction, holder)
        yield point


def while_standing(
    session: psycopg.Connection,
    sub: Subscription,
    work: Callable[[Standing], Result | None],
    *,
    deadline: float,
    report: Report = lambda message, detail, hint: None,
    check: Callable[[], object] = lambda: None,
    seconds: float = STAND_SECONDS,
) -> Result:
    """Do work at one point while apply waits there; see :func:`one_point` for the other parameters and the errors.

    :param work: must remove the barrier in its writing transaction, and return None if it was gone.
    """
    with contextlib.closing(verified_publisher.connect(session, sub)) as source:
        make = partial(Attempt, session, source, sub, deadline, seconds, check, report)
        return _tried(sub, make, lambda attempt: attempt.stand(work))


def _tried(sub: Subscription, make: Callable[[], Attempt], run: Callable[[Attempt], Result]) -> Result:
    for left in range(_TRIES, 0, -1):
        attempt = make()
        try:
            return run(attempt)
        except GivenUp as reason:
            if left == 1:
                raise TimeoutExpired(
                    f'subscription "{sub.name}" could not be brought to one point',
                    detail=str(reason),
                    hint=f"Try again when less is written, or see what apply does:\npgsub status {word(sub.name)}",
                ) from None
        finally:
            attempt.abandon()
    raise AssertionError
