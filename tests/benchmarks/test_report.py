"""What the benchmarks print and draw: verdicts, text and binary in one row, a plot that a browser can read."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks import report
from benchmarks.cases import CASES
from benchmarks.goals import GOALS
from benchmarks.measure import CaseResult, SideResult
from benchmarks.plot import Line, draw
from benchmarks.sampling import Usage
from benchmarks.subscribers import Options

_CASES = {case.name: case for case in CASES}


def _result(name: str, figure: str, native: float, pgsub: float, *, binary: bool = False) -> CaseResult:
    sides = {"native": SideResult(figures={figure: native}), "pgsub": SideResult(figures={figure: pgsub})}
    options = Options(binary=binary)
    return CaseResult(_CASES[name], 10, options, ("native", "pgsub"), floor=1.0, sides=sides)


def test_every_goal_is_one_of_a_case():
    assert {name for name, _ in GOALS} <= set(_CASES)
    assert all(goal.goal <= goal.ceiling for goal in GOALS.values())


@pytest.mark.parametrize(("pgsub", "said"), [(0.84, "goal"), (0.95, "ceiling"), (0.96, "above")])
def test_a_ratio_is_judged_by_goal_and_ceiling(pgsub, said):
    assert report.verdict(_result("insert", "time", 1.0, pgsub), "time") == said


@pytest.mark.parametrize(("p99", "said"), [(0.099, "goal"), (0.101, "above")])
def test_a_delay_is_judged_by_itself_and_not_by_the_other_side(p99, said):
    assert report.verdict(_result("latency", "p99", 0.001, p99), "p99") == said


def test_a_failure_has_no_verdict():
    failed = _result("insert", "time", 1.0, 0.1)
    failed.failure = "pgsub is not equal to the source"
    assert report.verdict(failed, "time") is None


def test_text_and_binary_are_columns_of_one_row(capsys):
    results = [_result("insert", "time", 1.0, 0.9), _result("insert", "time", 1.0, 0.8, binary=True)]
    report.show(dict.fromkeys(("cpu", "cores", "load_before", "postgresql", "python", "pgsub", "date"), "x"), results)
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("one INSERT transaction")]
    assert row.index("0.90 ceiling") < row.index("0.80 goal") < row.index("0.85 / 0.95")
    document = report.document({}, results)
    assert [one["verdict"] for one in document["results"]] == [{"time": "ceiling"}, {"time": "goal"}]


def test_a_time_is_compared_with_the_slowest_of_the_parts_that_it_needs(capsys):
    result = _result("update", "time", 4.0, 2.6)
    result.sides["pgsub"].usage = {"target": Usage(2.0), "python workers": Usage(0.7)}
    assert result.floors == {"walsender": 1.0, "target": 2.0, "Python": 0.7}
    facts = dict.fromkeys(("cpu", "cores", "load_before", "postgresql", "python", "pgsub", "date"), "x")
    report.show(facts, [result])
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("update ") and "1.25" in line]
    assert row.split()[-3:] == ["1.30", "above", "1.25"]
    assert report.document({}, [result])["results"][0]["floor_ratio"] == 1.3
    result.failure = "pgsub is not equal to the source"
    assert result.floors == {} and result.floor_ratio() is None


def test_a_side_that_is_only_shown_has_a_row_of_its_own(capsys):
    result = _result("slow-statements", "time", 12.0, 2.0)
    result.sides["one_session"] = SideResult(figures={"time": 10.0})
    facts = dict.fromkeys(("cpu", "cores", "load_before", "postgresql", "python", "pgsub", "date"), "x")
    report.show(facts, [result])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("5 ms a row")]
    assert ["0.20 goal" in row for row in rows] == [True, False]
    assert "beside native" in rows[1] and "12.00 s" in rows[1] and "0.17" in rows[1]


def test_a_plot_has_a_line_and_a_dot_for_each_point():
    points = [(10_000, 5.0), (1_000_000, 4.0), (10_000_000, -0.1)]
    lines = [Line("a < b", points, "a"), Line("c", points, "a", dashed=True)]
    picture = ElementTree.fromstring(draw("title", "a machine & its load", lines))
    name = "{http://www.w3.org/2000/svg}"
    assert len(picture.findall(f"{name}polyline")) == 2
    heights = [float(dot.attrib["cy"]) for dot in picture.findall(f"{name}circle")]
    assert len(heights) == 6 and heights[0] < heights[1] < heights[2]
    assert {"a < b", "c", "title", "10,000,000"} <= {text.text for text in picture.findall(f"{name}text")}
