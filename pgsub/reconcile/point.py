"""One point: a snapshot of the publisher at an LSN, and one of the target with all that this LSN covers, no more.

How apply is brought there: :mod:`~pgsub.reconcile.point_attempt`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import psycopg

from pgsub.apply import verified_publisher
from pgsub.common.errors import TimeoutExpired
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.publisher.slot_creation import Report
from pgsub.reconcile.point_attempt import Attempt, GivenUp, Point, Result, Standing, roll_back
from pgsub.target.session.connect import must_use_password

#: Seconds for which apply stands at a barrier at most; then it goes on by itself.
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
    """Open one point; apply goes on before the block begins.

    :param session: on the target, for the ledger.
    :param holder: on the target; its snapshot lasts as long as the block.
    :param deadline: on the clock of ``time.monotonic()``: until then apply must have come there.
    :param report: told which transactions of the publisher are waited for.
    :param check: called now and then while apply is waited for; raises what keeps it from coming.
    :param seconds: for which apply may stand still.
    :raises TimeoutExpired: apply did not come there in time, or took too often longer than ``seconds``.
    """
    with contextlib.ExitStack() as stack:
        password = must_use_password(session, sub)
        source = stack.enter_context(contextlib.closing(verified_publisher.connect(session, sub)))
        point, snapshot = _tried(
            sub,
            lambda: Attempt(session, source, sub, deadline, seconds, check),
            lambda attempt: attempt.run(holder, password, report),
        )
        stack.callback(snapshot.close)
        stack.callback(roll_back, holder)
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
    """Work at one point while apply stands there; parameters and errors as of :func:`one_point`.

    :param work: must take the barrier away, in the transaction in which it writes; None where it was gone.
    """
    password = must_use_password(session, sub)
    with contextlib.closing(verified_publisher.connect(session, sub)) as source:
        return _tried(
            sub,
            lambda: Attempt(session, source, sub, deadline, seconds, check),
            lambda attempt: attempt.stand(work, password, report),
        )


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
