"""Who wins: the newer change, on both sides of a pair the same one, and never by chance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgsub.apply.resolve.winner import Action, evaluate, tied
from pgsub.common.conflict_rules import LAST_UPDATE_WINS
from pgsub.target.sql.conflict_search import ConflictingRow

SUBID = 17


def local(at: int | None, origin: str | None = None) -> ConflictingRow:
    return ConflictingRow("i", at=at, origin=origin)


def unasked() -> Action:
    raise AssertionError("there is no tie")


@pytest.mark.parametrize(
    ("remote", "rows", "verdict"),
    [
        (5, [local(4)], Action.APPLY),
        (5, [local(6)], Action.KEEP),
        (5, [local(4), local(6)], Action.KEEP),
        (5, [local(None)], Action.APPLY),
        (5, [], Action.APPLY),
        (5, [local(9, "pgsub_17")], Action.APPLY),
        (5, [local(9, "pgsub_17_2")], Action.APPLY),
        (5, [local(9, "pgsub_170")], Action.KEEP),
        (5, [local(9, "")], Action.KEEP),
    ],
)
def test_the_remote_change_wins_if_it_is_newer_than_all_that_others_wrote(remote, rows, verdict):
    assert evaluate(LAST_UPDATE_WINS, remote, rows, SUBID, unasked) is verdict


def test_a_tie_is_asked_about():
    assert evaluate(LAST_UPDATE_WINS, 5, [local(5), local(3)], SUBID, lambda: Action.SKIP) is Action.SKIP


names = st.tuples(st.integers(1, 2**63).map(str), st.text(max_size=3))


@pytest.mark.long
@given(names, names)
def test_of_two_databases_exactly_one_wins_a_tie_whichever_of_them_is_asked(one, other):
    here, there = tied(remote=one, local=other), tied(remote=other, local=one)
    if one == other:
        assert here is there is Action.STOP
    else:
        assert {here, there} == {Action.APPLY, Action.KEEP}
