"""The tables of the demo and their first rows: one table for each difficulty of replication.

They follow the server's own tests, ``src/test/subscription/t`` (001_rep_changes, 008_diff_schema, 011_generated,
012_collation, 013_partition). Both sides have the same tables with different column orders and partitions.
"""

from __future__ import annotations

from collections.abc import Mapping

import psycopg

PUBLICATION = "demo"  #: made by :func:`create`

#: Values that are difficult for copies and quoting.
NASTY = (
    "it's \"quoted\", \\'slashed\\'",
    "tab\there, end\t",
    "back\\slash \\N \\. \\t",
    "two\nlines\r\nand a third",
    "🐘 smörgåsbord 你好 \u202eright to left",
    "",
    "  blanks  ",
    '{"a",NULL,(b)}',
    "NULL",
    "\x01\x7f control",
)

_SHARED = """
CREATE SCHEMA shop;
CREATE SCHEMA ops;
CREATE TYPE shop.state AS ENUM ('new', 'paid', 'on its way', 'delivered');
CREATE DOMAIN shop.email AS text CHECK (VALUE ~ '^[^@[:space:]]+@[^@[:space:]]+$');

CREATE TABLE shop.customer (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL, mail shop.email, born date, vip boolean);

CREATE TABLE shop."order" (
    id uuid PRIMARY KEY,
    customer bigint NOT NULL REFERENCES shop.customer,
    sku text NOT NULL REFERENCES shop.product ON UPDATE CASCADE,
    state shop.state NOT NULL, amount integer, placed timestamptz NOT NULL, note text);
CREATE INDEX ON shop."order" (sku);

CREATE TABLE shop.sample (
    id integer PRIMARY KEY,
    words text, number numeric, moment timestamptz, document jsonb, list text[], grid integer[], bytes bytea,
    span int4range, address inet, flag boolean, single real, twice double precision, pause interval, bits varbit);

CREATE TABLE shop.document (id uuid PRIMARY KEY, title text, body text, version integer);
ALTER TABLE shop.document ALTER body SET STORAGE EXTERNAL;

CREATE TABLE shop.note (author text, body text, written timestamptz);
ALTER TABLE shop.note ALTER body SET STORAGE EXTERNAL;

CREATE TABLE shop.basket (id integer PRIMARY KEY, item text);
CREATE TABLE shop."odd ""named"" one" ("größe" integer PRIMARY KEY, "select" text, "a b" text);

CREATE TABLE ops.reading (sensor integer, moment timestamptz, value numeric, comment text);
CREATE INDEX ON ops.reading (sensor);

CREATE TABLE ops.log (moment timestamptz, level text, message text);
"""

_PRODUCT = """
CREATE TABLE shop.product (
    sku text PRIMARY KEY, name text, price numeric(12,2), tax numeric(4,2),
    gross numeric GENERATED ALWAYS AS (price * (1 + tax / 100)) STORED, tags text[], attributes jsonb);
"""

_PRODUCT_ON_TARGET = """
CREATE TABLE shop.product (
    attributes jsonb, tags text[], tax numeric, price numeric(12,2), name text,
    gross numeric GENERATED ALWAYS AS (price * (1 + tax / 100)) STORED, sku text PRIMARY KEY);
"""

_EVENT = """
CREATE TABLE ops.event (id integer, moment timestamptz, kind text, PRIMARY KEY (id, moment))
    PARTITION BY RANGE (moment);
CREATE TABLE ops.event_old PARTITION OF ops.event FOR VALUES FROM (MINVALUE) TO ('2025-01-01 00:00Z');
CREATE TABLE ops.event_2025 PARTITION OF ops.event FOR VALUES FROM ('2025-01-01 00:00Z') TO ('2026-01-01 00:00Z');
CREATE TABLE ops.event_new PARTITION OF ops.event FOR VALUES FROM ('2026-01-01 00:00Z') TO (MAXVALUE);
"""

_EVENT_ON_TARGET = """
CREATE TABLE ops.event (id integer, moment timestamptz, kind text, PRIMARY KEY (id, moment)) PARTITION BY HASH (id);
CREATE TABLE ops.event_even PARTITION OF ops.event FOR VALUES WITH (MODULUS 2, REMAINDER 0);
CREATE TABLE ops.event_odd PARTITION OF ops.event FOR VALUES WITH (MODULUS 2, REMAINDER 1);
"""

_PUBLISHED = """
ALTER TABLE ops.reading REPLICA IDENTITY FULL;
ALTER TABLE shop.note REPLICA IDENTITY FULL;
CREATE PUBLICATION demo FOR ALL TABLES WITH (publish_via_partition_root);
"""

_FILL = (
    """INSERT INTO shop.customer (name, mail, born, vip)
    SELECT (%(nasty)s::text[])[1 + g %% 10] || ' ' || g, 'user' || g || '@example.org', '1950-01-01'::date + g %% 20000,
           CASE g %% 3 WHEN 0 THEN true WHEN 1 THEN false END
      FROM generate_series(1, %(customers)s) g""",
    """INSERT INTO shop.product (sku, name, price, tax, tags, attributes)
    SELECT 'SKU-' || lpad(g::text, 8, '0'), (%(nasty)s::text[])[1 + g %% 10], g * 0.37, g %% 3 * 9.5,
           ARRAY['tag ' || g %% 7, NULL, (%(nasty)s::text[])[1 + g %% 10]],
           jsonb_build_object('weight', g %% 50, 'label', (%(nasty)s::text[])[1 + g %% 9], 'none', NULL)
      FROM generate_series(1, %(products)s) g""",
    """INSERT INTO shop."order"
    SELECT gen_random_uuid(), 1 + g %% %(customers)s, 'SKU-' || lpad((1 + g %% %(products)s)::text, 8, '0'),
           (enum_range(NULL::shop.state))[1 + g %% 4], g %% 9,
           '2024-01-01 00:00Z'::timestamptz + g * interval '7.25 min',
           CASE WHEN g %% 5 = 0 THEN (%(nasty)s::text[])[1 + g / 5 %% 10] END
      FROM generate_series(1, %(orders)s) g""",
    """INSERT INTO shop.sample
    SELECT g, (%(nasty)s::text[])[1 + g %% 10],
           CASE g %% 5 WHEN 0 THEN 'NaN' WHEN 1 THEN 'Infinity' WHEN 2 THEN '-Infinity' WHEN 3 THEN 10.0 ^ (g %% 40)
                       END::numeric,
           CASE g %% 4 WHEN 0 THEN 'infinity' WHEN 1 THEN '-infinity'
                       WHEN 2 THEN '0044-03-15 12:00:00.000001+00 BC' END::timestamptz,
           CASE WHEN g %% 7 > 0 THEN jsonb_build_object((%(nasty)s::text[])[1 + g %% 9], ARRAY[g, NULL],
                                                         'é', '🐘'::text) END,
           CASE WHEN g %% 3 > 0 THEN (%(nasty)s::text[])[1 + g %% 5 : 5] END,
           ARRAY[[g, NULL], [-g, 2147483647]], decode(md5(g::text), 'hex') || '\\x00275c0a09'::bytea,
           int4range(g, g + g %% 3), ('10.0.0.0/8'::cidr)::inet + g, g %% 3 = 0,
           CASE g %% 4 WHEN 0 THEN 'NaN' WHEN 1 THEN '-0' ELSE 1.0 / g END::real,
           CASE g %% 4 WHEN 0 THEN '-Infinity'::float8 ELSE sqrt(g) END, make_interval(0, g, 0, g, g),
           (g %% 16)::bit(4)
      FROM generate_series(1, %(samples)s) g""",
    """INSERT INTO shop.document
    SELECT gen_random_uuid(), (%(nasty)s::text[])[1 + g %% 10],
           (SELECT string_agg(md5(g::text || i), E'\\n') FROM generate_series(1, 280) i), 1
      FROM generate_series(1, %(documents)s) g""",
    """INSERT INTO shop.note
    SELECT 'author ' || g %% 20, (SELECT string_agg(md5(g::text || i), ' ') FROM generate_series(1, 100) i), now()
      FROM generate_series(1, %(notes)s) g""",
    """INSERT INTO ops.reading
    SELECT g %% %(sensors)s, '2026-01-01 00:00Z'::timestamptz + g / 3 * interval '1 s',
           CASE g %% 11 WHEN 0 THEN 'NaN' WHEN 1 THEN NULL ELSE g %% 1000 / 8.0 END,
           CASE g %% 4 WHEN 0 THEN (%(nasty)s::text[])[1 + g %% 10] END
      FROM generate_series(1, %(readings)s) g""",
    """INSERT INTO ops.event
    SELECT g, '2024-06-01 00:00Z'::timestamptz + g * interval '15 min', 'kind ' || g %% 12
      FROM generate_series(1, %(events)s) g""",
    """INSERT INTO ops.log
    SELECT now(), (ARRAY['LOG', 'ERROR', NULL])[1 + g %% 3], 'message ' || g || (%(nasty)s::text[])[1 + g %% 10]
      FROM generate_series(1, %(lines)s) g""",
    "INSERT INTO shop.basket SELECT g, 'item ' || g FROM generate_series(1, 40) g",
    """INSERT INTO shop."odd ""named"" one"
    SELECT g, (%(nasty)s::text[])[1 + g %% 10], NULL FROM generate_series(1, 40) g""",
)


#: Initial rows of each kind, as divisors of the rows of the largest table.
_SHARES = {
    **{"orders": 1, "readings": 2, "events": 2, "lines": 2, "customers": 5},
    **{"products": 10, "samples": 10, "sensors": 20, "documents": 100, "notes": 250},
}


def sizes(orders: int) -> dict[str, int]:
    """Return the initial rows of each kind, by the names that the statements use.

    :param orders: rows of the largest table, which determine the others.
    """
    return {kind: max(orders // share, 10) for kind, share in _SHARES.items()}


def create(publisher: psycopg.Connection, target: psycopg.Connection) -> None:
    """Make the tables on both sides and the publication.

    :param publisher: a session in autocommit mode, like ``target``.
    """
    publisher.execute((_before_orders(_PRODUCT) + _EVENT + _PUBLISHED).encode())
    target.execute((_before_orders(_PRODUCT_ON_TARGET) + _EVENT_ON_TARGET).encode())


def _before_orders(product: str) -> str:
    """Insert the table of products, which differs between the sides, before that of orders, which refers to it."""
    head, orders, tail = _SHARED.partition('CREATE TABLE shop."order"')
    return head + product + orders + tail


def fill(publisher: psycopg.Connection, rows: Mapping[str, int]) -> int:
    """Write the first rows.

    :param rows: from :func:`sizes`.
    :return: the number of rows.
    """
    values = {**rows, "nasty": list(NASTY)}
    count = sum(publisher.execute(statement.encode(), values).rowcount for statement in _FILL)
    publisher.execute("ANALYZE")
    return count
