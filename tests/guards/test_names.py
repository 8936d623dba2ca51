"""A name means one thing in its module: a second value would silently replace the first."""

from __future__ import annotations

import re
from collections import Counter

import sources

# what a module defines; a name that is assigned under a condition is indented
_DEFINED = re.compile(r"^(?:(?:async )?def |class )?([A-Za-z_]\w*)(?:(?:: [^=\n]+)? = |[(:\[]|$)", re.MULTILINE)


def test_a_module_gives_no_name_a_second_value() -> None:
    texts = sources.modules() | {
        str(path.relative_to(sources.ROOT)): path.read_text() for path in (sources.ROOT / "tests").rglob("*.py")
    }
    twice: dict[str, list[str]] = {}
    for module, text in texts.items():
        code = re.sub(r'"""(?:.|\n)*?"""', '""', text)
        names = Counter(
            found[1]
            for found in _DEFINED.finditer(code)
            if " = " in found[0] or found[0].startswith(("def ", "class "))
        )
        if again := [name for name, count in names.items() if count > 1]:
            twice[module] = again
    assert twice == {}
    assert len(texts) > 800
