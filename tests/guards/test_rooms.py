"""No package of the program has more boxes than can be taken in at once (CONTRIBUTING.md)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import PurePath

import sources


def test_a_package_has_at_most_fifteen_modules_and_packages() -> None:
    boxes: dict[str, set[str]] = defaultdict(set)
    for name in sources.modules():
        *packages, module = PurePath(name).with_suffix("").parts
        for depth, package in enumerate(packages):
            boxes["/".join(packages[:depth])].add(package)
        boxes["/".join(packages)].update({module} - {"__init__"})
    assert {package: sorted(names) for package, names in boxes.items() if len(names) > 15} == {}
    assert len(boxes) > 20
