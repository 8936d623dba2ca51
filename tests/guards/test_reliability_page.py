"""Every promise of docs/reliability.md names an existing test."""

from __future__ import annotations

import re

import sources

PAGE = (sources.ROOT / "docs" / "reliability.md").read_text()
_NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def test_every_test_that_the_reliability_page_names_exists() -> None:
    named = _NAMED.findall(PAGE)
    missing = [f"{file}::{name}" for file, name in named if f"tests/{file}" not in sources.tests().get(name, [])]
    assert len(named) > 60 and missing == []


def test_the_reliability_page_has_a_row_for_each_of_the_65_faults() -> None:
    numbers = re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)
    assert [int(number) for number in numbers] == list(range(1, 66))
