"""Modules, folders and pages that documentation, docstrings and comments name exist."""

from __future__ import annotations

import re
from pathlib import Path

import sources

ROOT = sources.ROOT
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
#: Every text in which a name of the program may have become old.
TEXTS = [
    *(path for end in ("md", "txt") for path in (*ROOT.glob(f"*.{end}"), *ROOT.glob(f"docs/**/*.{end}"))),
    *(path for name in ("pgsub", "tests", "benchmarks", "examples") for path in ROOT.glob(f"{name}/**/*.py")),
]
#: A module, or something in it; pgsub.progress and its like are tables of the ledger.
DOTTED = re.compile(r"(?<![\w./@-])pgsub((?!\.toml)(?:\.[A-Za-z_]\w*)+)")
#: A file as docstrings and comments name it, with the end of its path at least.
FILE = re.compile(r"(?<![\w./-])((?:[a-z_]+/)*[a-z_]+\.py)\b")


def _stale(name: str) -> bool:
    """Return whether no module has this dotted name, or the module does not have what the rest of it names."""
    first, *rest = name.split(".")
    known = sources.modules()
    path = first
    if not any(module.startswith(f"{first}/") for module in known):
        tables = known["target/ledger/schema/versions.py"]
        return bool(rest) and not re.search(rf"\b{first}\b", tables)
    while rest and any(module.startswith(f"{path}/{rest[0]}/") for module in known):
        path = f"{path}/{rest.pop(0)}"
    text = known[f"{path}/__init__.py"]
    if rest and f"{path}/{rest[0]}.py" in known:
        text = known[f"{path}/{rest.pop(0)}.py"]
    return any(not re.search(rf"\b{part}\b", text) for part in rest)


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


def test_every_module_that_any_text_names_exists() -> None:
    found = [(path, name) for path in TEXTS for name in DOTTED.findall(path.read_text())]
    assert len(found) > 1000
    assert sorted({f"{path.relative_to(ROOT)}: pgsub{name}" for path, name in found if _stale(name[1:])}) == []
    assert _stale("apply.worker.no_such_module") and _stale("apply.worker.loop.no_such_name")


def test_every_file_that_a_docstring_or_comment_names_exists() -> None:
    known = {"/".join(path.parts[start:]) for path in TEXTS for start in range(len(path.parts))}
    found = [(module, name) for module, text in sources.modules().items() for name in FILE.findall(text)]
    assert len(found) > 10
    assert [f"{module}: {name}" for module, name in found if name not in known] == []


def test_the_map_shows_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = [Path(name).parent.name for name in sources.modules() if name.count("/") and name.endswith("__init__.py")]
    assert len(rooms) > 50
    assert [room for room in rooms if not re.search(rf"`(?:\w+/)*{room}/`", page)] == []


def test_every_link_between_pages_leads_to_a_file() -> None:
    links = [
        (page, target.partition("#")[0])
        for page in [*PAGES, *ROOT.glob("docs/tasks/*.md")]
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text())
        if not target.startswith(("http", "#"))
    ]
    assert [f"{page.name}: {target}" for page, target in links if not (page.parent / target).exists()] == []


def test_every_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    pages = [*PAGES, *ROOT.glob("docs/tasks/*.md")]
    tables = [
        (page, table.split("\n")) for page in pages for table in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.M)
    ]
    assert len(tables) > 20
    assert [
        f"{page.name}: {row}" for page, table in tables for row in table[:-1] if _cells(row) != _cells(table[0])
    ] == []
    assert [table[0] for _, table in tables if not re.fullmatch(r"[|:-]+", table[1].replace(" ", ""))] == []


def _cells(row: str) -> int:
    """Return how many bars separate cells: neither escaped nor in code."""
    return re.sub(r"\\\||`[^`]*`", "", row).count("|")


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in PAGES if f"{page.name})" not in index and page.parent.name != "docs"] == []
    assert [
        path.name for path in (ROOT / "docs").iterdir() if f"({path.name})" not in index and path.name != "README.md"
    ] == []
