"""The docstring of a function begins with an imperative verb, that of a class with a noun (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache

import sources

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


def _definitions(statements: Iterable[ast.AST]) -> Iterator[Definition]:
    for node in statements:
        if isinstance(node, Definition):
            yield node
        for block in ("body", "orelse", "handlers", "finalbody", "cases"):
            inner = getattr(node, block, ())
            yield from _definitions(inner if isinstance(inner, list) else ())


@cache
def documented() -> list[tuple[str, bool, str]]:
    """Return place, whether it is a class's, and first word of each docstring, without those of properties."""
    return [
        (f"{name}:{node.lineno} {node.name}", isinstance(node, ast.ClassDef), text.split()[0])
        for name, tree in sources.trees()
        for node in _definitions(tree.body)
        if (text := ast.get_docstring(node, clean=False)) is not None
        and not any("property" in ast.unparse(one) for one in node.decorator_list)
    ]


def is_imperative(word: str) -> bool:
    """Return whether a word can be a verb in the imperative: no article, plural, participle, markup or SQL."""
    plain = word.rstrip(".,;:").lower()
    if not re.fullmatch("[A-Z][a-z-]*[.,;:]?", word) or plain in NO_VERBS:
        return False
    return plain in VERBS or not re.search("(?<!s)s$|ed$|ing$", plain)


def test_the_docstring_of_a_function_begins_with_an_imperative_verb() -> None:
    found = [(place, word) for place, is_class, word in documented() if not is_class]
    assert len(found) > 2000
    assert [f"{place}: {word}" for place, word in found if not is_imperative(word)] == []


def test_the_docstring_of_a_class_begins_with_a_noun() -> None:
    verbs = {word.rstrip(".,;:").lower() for _, is_class, word in documented() if not is_class}
    verbs |= {form for verb in verbs for form in (f"{verb}s", f"{verb}es", f"{verb[:-1]}ies")}
    fragments = NO_VERBS - {"a", "an", "the", "one", "both", "all"}
    found = [(place, word) for place, is_class, word in documented() if is_class]
    assert len(found) > 300
    assert [
        f"{place}: {word}"
        for place, word in found
        if (plain := word.strip("`:.,;").lower()) not in NOUNS and plain in verbs | fragments
    ] == []
