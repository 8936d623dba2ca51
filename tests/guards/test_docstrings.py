"""The docstring of a function begins with an imperative verb, that of a class with a noun (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "pgsub"
#: Words that begin a noun phrase, a clause or a fragment.
NO_VERBS = frozenset(re.findall(r"\w+", """
    a an the this that these those one its their our other more most first last next some any all every each both
    either nothing everything something nobody whether what which who whose how where when why if in by as so for from
    with without of on at until before after inside outside behind beyond never always only no not true false none
    there then per further two eight whatever remote schema oid decimal row kind spark fingerprint number bound
"""))  # fmt: skip
#: Imperatives that end as plurals and participles do.
VERBS = {"address", "bring", "embed", "feed", "focus", "need", "pass", "proceed", "process", "seed", "suppress"}
#: Nouns with which classes begin, and which are forms of a verb as well.
NOUNS = {"changes", "fingerprints", "messages", "options", "reads", "records", "remote", "rows", "updates"}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def documented() -> Iterator[tuple[str, Definition, str]]:
    """Yield place, definition and first word of each docstring; a property's reads as an attribute's."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, Definition) else None
            if text is None or any("property" in ast.unparse(one) for one in node.decorator_list):
                continue
            yield f"{path.relative_to(PACKAGE.parent)}:{node.body[0].lineno} {node.name}", node, text.split()[0]


def is_imperative(word: str) -> bool:
    """Return whether a word can be a verb in the imperative: no article, plural, participle, markup or SQL."""
    plain = word.rstrip(".,;:").lower()
    if not re.fullmatch("[A-Z][a-z-]*[.,;:]?", word) or plain in NO_VERBS:
        return False
    return plain in VERBS or not re.search("(?<!s)s$|ed$|ing$", plain)


def test_the_docstring_of_a_function_begins_with_an_imperative_verb() -> None:
    others = [f"{place}: {word}" for place, node, word in documented() if not isinstance(node, ast.ClassDef)
              and not is_imperative(word)]  # fmt: skip
    assert others == []


def test_the_docstring_of_a_class_begins_with_a_noun() -> None:
    found = list(documented())
    verbs = {word.rstrip(".,;:").lower() for _, node, word in found if not isinstance(node, ast.ClassDef)}
    verbs |= {form for verb in verbs for form in (f"{verb}s", f"{verb}es", f"{verb[:-1]}ies")}
    others = []
    for place, node, word in found:
        plain = word.strip("`:.,;").lower()
        fragment = plain in NO_VERBS - {"a", "an", "the", "one", "both", "all"}
        if isinstance(node, ast.ClassDef) and plain not in NOUNS and (plain in verbs or fragment):
            others.append(f"{place}: {word}")
    assert others == []
