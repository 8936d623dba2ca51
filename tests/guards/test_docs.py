"""Modules, folders and pages that the documentation names exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def test_every_module_and_folder_that_a_page_names_exists() -> None:
    paths = [
        path.relative_to(ROOT).parts for name in ("pgsub", "tests", "benchmarks") for path in ROOT.glob(f"{name}/**/*")
    ]
    known = {"/".join(parts[start:]) for parts in paths for start in range(len(parts))}
    missing = [
        f"{page.name}: {name}"
        for page in PAGES
        for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:\.py|/))(?:::\w+)?`", page.read_text())
        if name.rstrip("/") not in known and not (ROOT / name).exists()
    ]
    assert missing == []


def test_every_link_between_pages_leads_to_a_file() -> None:
    links = [
        (page, target.partition("#")[0])
        for page in [*PAGES, *ROOT.glob("docs/tasks/*.md")]
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text())
        if not target.startswith(("http", "#"))
    ]
    assert [f"{page.name}: {target}" for page, target in links if not (page.parent / target).exists()] == []


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in PAGES if f"{page.name})" not in index and page.parent.name != "docs"] == []
    assert [
        path.name for path in (ROOT / "docs").iterdir() if f"({path.name})" not in index and path.name != "README.md"
    ] == []
