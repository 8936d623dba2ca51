# ruff: noqa: E501
"""Every kind of table that a publication can hold, as data: what is made on each side, what is written and compared.

Each kind lives in a schema of its own, which is the session's ``search_path``, and is published by publications of its
own, so that all of them go through one ``create``. ``{rows}`` stands for the number of rows to begin with.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kind.

    :ivar pub: statements for the publisher, with its publications; ``sub`` for the target.
    :ivar writes: transactions of the publisher after the copy, in this order.
    :ivar same: queries whose rows must be equal; a pair is one for the publisher and one for the target.
    :ivar publications: names; the schema's by default.
    :ivar relations: what the subscription then holds, in order.
    :ivar since: first version of a publisher that has it.
    :ivar text_only: types differ, so binary values cannot be sent.
    :ivar utf8_only: a name or value that LATIN1 does not have.
    """

    name: str
    pub: str
    sub: str
    writes: tuple[str, ...]
    same: tuple[str | tuple[str, str], ...]
    relations: tuple[str, ...]
    publications: tuple[str, ...] = ()
    since: int = 14
    text_only: bool = False
    utf8_only: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def subscribed(self) -> tuple[str, ...]:
        """Names of its publications."""
        return self.publications or (self.name,)


_FILL = "INSERT INTO t (id, v) SELECT g, md5(g::text) FROM generate_series(1, {rows}) g; INSERT INTO t VALUES (25000, 'far');"
_TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text);"
_CHANGES = (
    "INSERT INTO t (id, v) SELECT g, 'new' FROM generate_series(9001, 9020) g",
    "UPDATE t SET v = v || ' changed' WHERE id % 3 = 0",
    "UPDATE t SET id = id + 20000 WHERE id = 9001",
    "DELETE FROM t WHERE id % 7 = 0",
)
_T = "SELECT id, v FROM t"


def _simple(
    name: str,
    pub: str,
    sub: str,
    publication: str,
    writes: tuple[str, ...] = _CHANGES,
    same: tuple[str | tuple[str, str], ...] = (_T,),
    relations: tuple[str, ...] = ("t",),
    since: int = 14,
) -> Kind:
    return Kind(
        name,
        f"{pub} {_FILL} CREATE PUBLICATION {name} FOR TABLE {publication}",
        sub,
        writes,
        same,
        relations,
        since=since,
    )


_RANGES = """
    CREATE TABLE t (id int NOT NULL, v text, PRIMARY KEY (id)) PARTITION BY RANGE (id);
    CREATE TABLE low PARTITION OF t FOR VALUES FROM (MINVALUE) TO (200);
    CREATE TABLE high (v text, gone int, id int NOT NULL); ALTER TABLE high DROP gone;
    ALTER TABLE t ATTACH PARTITION high FOR VALUES FROM (200) TO (20000);
    CREATE TABLE far PARTITION OF t FOR VALUES FROM (20000) TO (MAXVALUE) PARTITION BY LIST (id);
    CREATE TABLE farther PARTITION OF far DEFAULT;"""
_HASHES = """
    CREATE TABLE t (v text, id int PRIMARY KEY) PARTITION BY HASH (id);
    CREATE TABLE h0 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 0);
    CREATE TABLE h1 PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER 1);"""
_LEAVES = "".join(f"CREATE TABLE {name} (id int PRIMARY KEY, v text);" for name in ("low", "high", "farther"))
_ROOT = "t WITH (publish_via_partition_root)"

_SAFELY_NAMED = (
    Kind(
        "plain",
        """CREATE TABLE t (id bigint PRIMARY KEY, v text, n numeric, f float8, at timestamptz, b bytea, j jsonb, a text[],
            iv interval, r int4range, u uuid, ok boolean, d date);
        INSERT INTO t SELECT g, e'tab\\tback\\\\slash\\nline \\\\. \\\\N é' || g, g / 7.0, 1 / g::float8,
            timestamptz '2026-01-01 12:34:56.789+05' + g * interval '1 h', decode(md5(g::text), 'hex'),
            jsonb_build_object('k', g, 'q', '"'), ARRAY[NULL, 'x"y', '{}', ''], g * interval '1 day 3 s',
            int4range(g, g + 9), md5(g::text)::uuid, g % 2 = 0, date '2026-01-01' - g FROM generate_series(1, {rows}) g;
        INSERT INTO t (id, f, v, n) VALUES (-1, 'NaN', '', 'Infinity'), (-2, '-Infinity', NULL, 'NaN');
        CREATE PUBLICATION plain FOR TABLE t""",
        """CREATE TABLE t (id bigint PRIMARY KEY, v text, n numeric, f float8, at timestamptz, b bytea, j jsonb, a text[],
            iv interval, r int4range, u uuid, ok boolean, d date)""",
        (
            "UPDATE t SET f = -f, at = at + interval '1 s', a = a || ARRAY['more'] WHERE id % 5 = 0",
            "INSERT INTO t SELECT id + 100000, v, n, f, at, b, j, a, iv, r, u, ok, d FROM t WHERE id < 40",
            "DELETE FROM t WHERE id < 0",
        ),
        ("SELECT * FROM t",),
        ("t",),
    ),
    _simple("truncated", _TABLE, _TABLE, "t", writes=("TRUNCATE t", "INSERT INTO t VALUES (1, 'after')")),
    Kind(
        "without_key",
        """CREATE TABLE t (v text, n int); ALTER TABLE t REPLICA IDENTITY FULL; CREATE TABLE log (v text);
        INSERT INTO t SELECT 'twice', g / 2 FROM generate_series(1, {rows}) g; INSERT INTO t VALUES (NULL, NULL);
        INSERT INTO log SELECT 'same' FROM generate_series(1, {rows});
        CREATE PUBLICATION without_key FOR TABLE t; CREATE PUBLICATION without_identity FOR TABLE log WITH (publish = 'insert')""",
        "CREATE TABLE t (v text, n int); CREATE TABLE log (v text)",
        (
            "INSERT INTO t VALUES ('twice', 7), (NULL, NULL); INSERT INTO log VALUES ('same'), ('other')",
            "UPDATE t SET v = 'one of them' WHERE ctid = (SELECT min(ctid) FROM t WHERE n = 7)",
            "DELETE FROM t WHERE v IS NULL; DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t WHERE n = 9)",
        ),
        ("SELECT * FROM t", "SELECT * FROM log"),
        ("log", "t"),
        publications=("without_key", "without_identity"),
    ),
    Kind(
        "without_columns",
        """CREATE TABLE t (); INSERT INTO t SELECT FROM generate_series(1, {rows} * 3);
        CREATE PUBLICATION without_columns FOR TABLE t WITH (publish = 'insert')""",
        "CREATE TABLE t ()",
        ("INSERT INTO t DEFAULT VALUES", "INSERT INTO t SELECT FROM t"),
        ("SELECT count(*) FROM t",),
        ("t",),
    ),
    _simple("leaves_to_partitions", _RANGES, _RANGES, "t", relations=("farther", "high", "low")),
    _simple(
        "leaves_to_tables",
        _RANGES,
        _LEAVES,
        "t",
        same=tuple(f"SELECT id, v FROM {name}" for name in ("low", "high", "farther")),
        relations=("farther", "high", "low"),
    ),
    _simple("root_to_partitions", _RANGES, _RANGES, _ROOT),
    _simple("root_to_other_partitions", _RANGES, _HASHES, _ROOT),
    _simple("root_to_a_table", _RANGES, _TABLE, _ROOT),
    _simple("table_to_partitions", _TABLE, _RANGES, "t"),
    Kind(
        "root_and_leaf",
        f"""{_RANGES} {_FILL} CREATE PUBLICATION root_and_leaf FOR TABLE t WITH (publish_via_partition_root);
        CREATE PUBLICATION the_leaf FOR TABLE high WITH (publish_via_partition_root);
        CREATE PUBLICATION another_leaf FOR TABLE low""",
        _RANGES,
        _CHANGES,
        (_T,),
        ("t",),
        publications=("root_and_leaf", "the_leaf", "another_leaf"),
    ),
    Kind(
        "inheritance",
        f"""{_TABLE} CREATE TABLE child (more int) INHERITS (t); ALTER TABLE child ADD PRIMARY KEY (id); {_FILL}
        INSERT INTO child SELECT g + 100000, 'child', g FROM generate_series(1, {{rows}}) g;
        CREATE PUBLICATION inheritance FOR TABLE t""",
        f"{_TABLE} CREATE TABLE child (more int) INHERITS (t); ALTER TABLE child ADD PRIMARY KEY (id);",
        (*_CHANGES, "UPDATE child SET more = -more"),
        ("SELECT * FROM ONLY t", "SELECT * FROM child"),
        ("child", "t"),
    ),
    Kind(
        "parent_only",
        f"""{_TABLE} CREATE TABLE child (more int) INHERITS (t); ALTER TABLE child ADD PRIMARY KEY (id); {_FILL}
        INSERT INTO child VALUES (100001, 'not published', 1); CREATE PUBLICATION parent_only FOR TABLE ONLY t""",
        _TABLE,
        (*_CHANGES, "INSERT INTO child VALUES (100002, 'not published', 2)"),
        (("SELECT id, v FROM ONLY t", _T),),
        ("t",),
    ),
    Kind(
        "column_list",
        """CREATE TABLE t (secret text, id int PRIMARY KEY, unknown int, v text);
        INSERT INTO t SELECT 'hidden', g, g, md5(g::text) FROM generate_series(1, {rows}) g;
        CREATE PUBLICATION column_list FOR TABLE t (v, id)""",
        "CREATE TABLE t (id int PRIMARY KEY, v text, secret text DEFAULT 'not sent')",
        (*_CHANGES, "UPDATE t SET secret = 'still hidden'"),
        (("SELECT id, v, 'not sent' FROM t", "SELECT id, v, secret FROM t"),),
        ("t",),
        since=15,
    ),
    Kind(
        "row_filters",
        f"""{_TABLE} {_FILL} CREATE PUBLICATION row_filters FOR TABLE t WHERE (id < 100 AND id % 2 = 0);
        CREATE PUBLICATION or_these FOR TABLE t WHERE (id > 300 OR id = 7)""",
        _TABLE,
        (
            "INSERT INTO t VALUES (-1, 'no'), (-2, 'yes')",
            "UPDATE t SET id = id - 1000 WHERE id = 302",  # into another part of what is published
            "UPDATE t SET id = -201 WHERE id = 400",  # leaves what is published
            "UPDATE t SET id = 40000 WHERE id = 202",  # enters it
            "DELETE FROM t WHERE id IN (7, 8, 203)",
        ),
        (("SELECT * FROM t WHERE id < 100 AND id % 2 = 0 OR id > 300 OR id = 7", "SELECT * FROM t"),),
        ("t",),
        publications=("row_filters", "or_these"),
        since=15,
    ),
    Kind(
        "filter_cancelled",
        f"""{_TABLE} {_FILL} CREATE PUBLICATION filter_cancelled FOR TABLE t WHERE (id = 5);
        CREATE PUBLICATION no_filter FOR TABLE t""",
        _TABLE,
        _CHANGES,
        (_T,),
        ("t",),
        publications=("filter_cancelled", "no_filter"),
        since=15,
    ),
    Kind(
        "filtered_root",
        f"""{_RANGES} {_FILL} CREATE PUBLICATION filtered_root FOR TABLE t (id, v) WHERE (id % 10 <> 3)
            WITH (publish_via_partition_root)""",
        _HASHES,
        _CHANGES,
        (("SELECT id, v FROM t WHERE id % 10 <> 3", _T),),
        ("t",),
        since=15,
    ),
    Kind(
        "generated_on_both",
        """CREATE TABLE t (id int PRIMARY KEY, v text, g int GENERATED ALWAYS AS (id * 2) STORED);
        INSERT INTO t SELECT g, 'x' FROM generate_series(1, {rows}) g; CREATE PUBLICATION generated_on_both FOR TABLE t""",
        "CREATE TABLE t (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 3) STORED, v text)",
        _CHANGES,
        (("SELECT id, v, id * 3 FROM t", "SELECT id, v, g FROM t"),),
        ("t",),
    ),
    Kind(
        "generated_published",
        """CREATE TABLE t (id int PRIMARY KEY, v text, g int GENERATED ALWAYS AS (id * 2) STORED);
        INSERT INTO t SELECT g, 'x' FROM generate_series(1, {rows}) g;
        CREATE PUBLICATION generated_published FOR TABLE t WITH (publish_generated_columns = stored)""",
        "CREATE TABLE t (id int PRIMARY KEY, g int, v text)",
        _CHANGES,
        ("SELECT id, v, g FROM t",),
        ("t",),
        since=18,
    ),
    Kind(
        "generated_here_only",
        f"{_TABLE} {_FILL} CREATE PUBLICATION generated_here_only FOR TABLE t",
        "CREATE TABLE t (up text GENERATED ALWAYS AS (upper(v)) STORED, id int PRIMARY KEY, v text)",
        _CHANGES,
        (("SELECT id, upper(v) FROM t", "SELECT id, up FROM t"),),
        ("t",),
    ),
    Kind(
        "identities",
        """CREATE TABLE always (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text);
        CREATE TABLE by_default (id int GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, v text);
        INSERT INTO always (v) SELECT 'x' FROM generate_series(1, {rows});
        INSERT INTO by_default (v) SELECT 'x' FROM generate_series(1, {rows});
        CREATE PUBLICATION identities FOR TABLE always, by_default""",
        """CREATE TABLE always (v text, id int GENERATED ALWAYS AS IDENTITY (START 50) PRIMARY KEY);
        CREATE TABLE by_default (id int GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, v text)""",
        (
            "INSERT INTO always (v) VALUES ('new'); INSERT INTO by_default VALUES (-7, 'new')",
            "UPDATE always SET v = 'changed' WHERE id % 3 = 0; UPDATE by_default SET id = -id WHERE id = 5",
            "DELETE FROM always WHERE id = 4; DELETE FROM by_default WHERE id = 4",
        ),
        ("SELECT id, v FROM always", "SELECT id, v FROM by_default"),
        ("always", "by_default"),
    ),
    Kind(
        "in_schema",
        f"""{_TABLE} CREATE UNLOGGED TABLE left_out (id int PRIMARY KEY); CREATE VIEW a_view AS SELECT 1 AS id;
        CREATE MATERIALIZED VIEW m AS SELECT 1 AS id; CREATE SEQUENCE a_sequence; {_FILL}
        CREATE PUBLICATION in_schema FOR TABLES IN SCHEMA in_schema""",
        _TABLE,
        (*_CHANGES, "INSERT INTO left_out VALUES (1)"),
        (_T,),
        ("t",),
        since=15,
    ),
    Kind(
        "other_order",
        """CREATE TABLE t (gone int, id int PRIMARY KEY, v text, gone_too int, n int); ALTER TABLE t DROP gone, DROP gone_too;
        INSERT INTO t SELECT g, 'v' || g, g FROM generate_series(1, {rows}) g; CREATE PUBLICATION other_order FOR TABLE t""",
        """CREATE SEQUENCE numbers; CREATE TABLE t (n int, mine text NOT NULL DEFAULT 'mine', v text, gone int,
            serial bigint DEFAULT nextval('numbers'), nothing int, id int PRIMARY KEY, at timestamptz DEFAULT now());
        ALTER TABLE t DROP gone""",
        (*_CHANGES, "UPDATE t SET n = -n WHERE id < 50"),
        (
            (
                "SELECT id, v, n, 'mine', true, true, NULL::int FROM t",
                "SELECT id, v, n, mine, serial > 0, at IS NOT NULL, nothing FROM t",
            ),
        ),
        ("t",),
    ),
    Kind(
        "identity_index",
        """CREATE TABLE t (id int PRIMARY KEY, v text NOT NULL, w text); CREATE UNIQUE INDEX i ON t (v);
        ALTER TABLE t REPLICA IDENTITY USING INDEX i; CREATE TABLE f (id int PRIMARY KEY, v text);
        ALTER TABLE f REPLICA IDENTITY FULL; INSERT INTO f SELECT g, 'f' FROM generate_series(1, {rows}) g;
        INSERT INTO t SELECT g, md5(g::text), 'w' FROM generate_series(1, {rows}) g;
        CREATE PUBLICATION identity_index FOR TABLE t, f""",
        """CREATE TABLE t (id int, v text NOT NULL UNIQUE, w text); ALTER TABLE t REPLICA IDENTITY USING INDEX t_v_key;
        CREATE TABLE f (id int PRIMARY KEY, v text)""",
        (
            "UPDATE t SET v = 'changed' WHERE id = 3; UPDATE t SET w = 'other' WHERE id % 4 = 0; UPDATE f SET v = 'x'",
            "DELETE FROM t WHERE id % 5 = 0; UPDATE f SET id = -id WHERE id < 9; DELETE FROM f WHERE id = 20",
        ),
        ("SELECT id, v, w FROM t", "SELECT id, v FROM f"),
        ("f", "t"),
    ),
    Kind(
        "own_types",
        """CREATE TYPE mood AS ENUM ('sad', 'it''s ok'); CREATE DOMAIN small AS int CHECK (VALUE < 10);
        CREATE TYPE pair AS (a int, b text);
        CREATE TABLE t (id int PRIMARY KEY, m mood, s small, p pair, ms mood[]);
        INSERT INTO t SELECT g, 'it''s ok', g % 10, ROW(g, 'a "b", c')::pair, '{sad,"it''s ok"}'
            FROM generate_series(1, {rows}) g; CREATE PUBLICATION own_types FOR TABLE t""",
        """CREATE TYPE unrelated AS (x int); CREATE DOMAIN small AS int CHECK (VALUE < 10); CREATE TYPE pair AS (a int, b text);
        CREATE TYPE mood AS ENUM ('sad', 'it''s ok');
        CREATE TABLE t (id int PRIMARY KEY, m mood, s small, p pair, ms mood[])""",
        ("UPDATE t SET m = 'sad', s = 1, p = NULL WHERE id % 2 = 0", "DELETE FROM t WHERE id = 1"),
        ("SELECT * FROM t",),
        ("t",),
    ),
    Kind(
        "wider_types",
        """CREATE TABLE t (id int PRIMARY KEY, v varchar(40), n int); CREATE PUBLICATION wider_types FOR TABLE t;
        INSERT INTO t SELECT g, 'v' || g, g FROM generate_series(1, {rows}) g""",
        "CREATE TABLE t (id bigint PRIMARY KEY, v text, n numeric)",
        _CHANGES,
        ("SELECT id, v, n::int FROM t",),
        ("t",),
        text_only=True,
    ),
    Kind(
        "large_values",
        """CREATE TABLE t (id int PRIMARY KEY, v text, n int); ALTER TABLE t ALTER v SET STORAGE EXTERNAL;
        INSERT INTO t SELECT g, repeat(md5(g::text), 20000), g FROM generate_series(1, 6) g;
        INSERT INTO t SELECT g, repeat('short', 2), g FROM generate_series(7, {rows}) g;
        CREATE PUBLICATION large_values FOR TABLE t""",
        "CREATE TABLE t (id int PRIMARY KEY, v text, n int)",
        ("UPDATE t SET n = -n", "UPDATE t SET v = v || 'longer' WHERE id = 2", "UPDATE t SET id = -id WHERE id = 3"),
        ("SELECT id, md5(v), n FROM t",),
        ("t",),
    ),
    Kind(
        "foreign_keys",
        """CREATE TABLE parent (id int PRIMARY KEY, v text); CREATE TABLE a_child (id int PRIMARY KEY REFERENCES parent);
        INSERT INTO parent SELECT g, 'p' FROM generate_series(1, {rows}) g; INSERT INTO a_child SELECT id FROM parent;
        CREATE PUBLICATION foreign_keys FOR TABLE a_child, parent""",
        """CREATE TABLE parent (id int PRIMARY KEY, v text);
        CREATE TABLE a_child (id int PRIMARY KEY REFERENCES parent ON DELETE CASCADE);
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'a local trigger fired'; END $$;
        CREATE TRIGGER no BEFORE INSERT OR UPDATE OR DELETE ON a_child FOR EACH ROW EXECUTE FUNCTION refuse()""",
        (
            "DELETE FROM a_child WHERE id < 20; DELETE FROM parent WHERE id < 10",
            "UPDATE parent SET v = 'q' WHERE id < 50",
        ),
        ("SELECT * FROM parent", "SELECT * FROM a_child"),
        ("a_child", "parent"),
    ),
)

_HARD_NAMES = (
    "tab'le",
    "a'",
    "B",
    "dot.dot",
    "with space",
    "per%cent %s",
    "back\\slash",
    'qu"ote',
    "{}",
    "$1",
    "sélect",
    "x" * 63,
)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def hard_names(name: str, tables: tuple[str, ...], **more: bool) -> Kind:
    """Tables and columns with names that need quoting, in a schema whose name does."""
    pub, sub, writes, same = [], [], [], []
    for table in map(_quoted, tables):
        key, value = table[:-1] + 'k"' if len(table) < 60 else '"K"', '"Value %"'
        sub.append(f"CREATE TABLE {table} ({value} text, {key} int PRIMARY KEY);")
        pub.append(
            f"CREATE TABLE {table} ({key} int PRIMARY KEY, {value} text);"
            f"INSERT INTO {table} SELECT g, 'v' || g FROM generate_series(1, {{rows}}) g;"
        )
        writes.append(f"INSERT INTO {table} VALUES (-1, 'new'); UPDATE {table} SET {value} = 'c' WHERE {key} % 9 = 1")
        writes.append(f"DELETE FROM {table} WHERE {key} = 4")
        same.append(f"SELECT {key}, {value} FROM {table}")
    publication = f"CREATE PUBLICATION {_quoted(name)} FOR TABLE {', '.join(map(_quoted, tables))}"
    return Kind(
        name, "".join(pub) + publication, "".join(sub), tuple(writes), tuple(same), tuple(sorted(tables)), **more
    )


KINDS = (
    *_SAFELY_NAMED,
    hard_names("""na.mes "of" it's %s""", _HARD_NAMES),
    hard_names("ünïcödé 表", ("таблица", "🐘 elephant", "e\u0301"), utf8_only=True),
)
