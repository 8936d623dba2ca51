"""Variants of a test that find what others find too, only later; they run with ``PGSUB_TEST_THOROUGH=1``.

A suite that is run at every change has to end within minutes; what it leaves out is never a promise, only another
way to the same one. A test that takes long and is a promise of its own is marked ``long`` instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

Item = TypeVar("Item")


#: For a test that is such a variant as a whole.
only_thorough = pytest.mark.skipif(not os.environ.get("PGSUB_TEST_THOROUGH"), reason="part of make thorough")


def long(items: Iterable[Any]) -> list[Any]:
    """These items as parameters of tests that are marked ``long``; those beside them stay in ``make test``.

    :param items: a tuple has a value for each of the names.
    """
    return [pytest.param(*(item if isinstance(item, tuple) else (item,)), marks=pytest.mark.long) for item in items]


def thorough(items: Iterable[Item]) -> list[Item]:
    """These items where the thorough variants are wanted, else none."""
    return list(items) if os.environ.get("PGSUB_TEST_THOROUGH") else []
