"""SQL of a publisher is used in a statement to paste only if it cannot be more than the part that it stands for."""

from __future__ import annotations

import pytest

from pgsub.commands.switchover.obstacles import definition_statements as statements
from pgsub.commands.switchover.obstacles.definition_statements import Part
from pgsub.common.quoting import fragment


@pytest.mark.parametrize(
    "text",
    [
        "nextval('s_id_seq'::regclass)",
        "CHECK (((n > 0) AND (v ~ '^\\d+$'::text) AND (v <> 'it''s; -- \"so\"'::text)))",
        'FOREIGN KEY (o, p) REFERENCES "a;b".t(id, x) ON DELETE CASCADE DEFERRABLE',
        "CHECK ((a[1:2] = ARRAY['x'::text, '--'::text]) AND ((j -> 'k'::text) ->> 'l'::text) = ANY ('{a,b}'::text[]))",
        "'d'::\"char\"",
        "(-1)",
    ],
)
def test_definitions_as_servers_write_them_are_taken_unchanged(text: str) -> None:
    assert fragment(text) == text


def test_the_lines_of_a_subquery_are_joined_and_a_literal_with_a_line_break_is_rejected() -> None:
    assert fragment("(EXISTS ( SELECT 1\n   FROM u\n  WHERE true))") == "(EXISTS ( SELECT 1 FROM u WHERE true))"
    assert fragment("'a\nb'::text") is None


_MORE = [
    "0; DROP TABLE t",
    "0 -- ",
    "0 /* ",
    "0, OWNER TO mallory",
    "(0)), OWNER TO mallory, ADD CHECK ((true)",
    "(0",
    "[0)",
    "'x",
    '"x',
    "'\\'; DROP TABLE t; --'",
    "'\\''",
    "$$;$$",
    "\\! touch /tmp/x",
    "0\n\\! touch /tmp/x",
    ":'name'",
    ":name",
    "'\x1b[2J'",
    "'\u2028'",
    "0\u2028",
    "",
]


@pytest.mark.parametrize("text", _MORE)
def test_text_that_could_end_its_statement_is_rejected(text: str) -> None:
    assert fragment(text) is None
    one = Part(("s", "t"), ("s", "t"), "n", "CREATE INDEX", text)
    writers = (statements.constraint, statements.default, statements.trigger)
    assert [write(one) for write in writers] == [None, None, None]


def test_a_trigger_must_be_create_trigger_and_words_of_a_policy_must_be_known() -> None:
    assert statements.trigger(Part(("s", "t"), ("s", "t"), "n", "", "ALTER ROLE mallory SUPERUSER")) is None
    row = ("s", "t", "n", "", "PERMISSIVE", "ALL", ["public"], "true", None)
    assert statements.policy(("s", "t"), row) == (
        'CREATE POLICY "n" ON "s"."t" AS PERMISSIVE FOR ALL TO PUBLIC USING (true);'
    )
    for column, word in ((4, "PERMISSIVE TO mallory"), (5, "ALL TO mallory; --"), (7, "true) OR (true"), (8, "0;")):
        assert statements.policy(("s", "t"), (*row[:column], word, *row[column + 1 :])) is None
