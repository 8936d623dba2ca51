-- Subtransactions of a transaction that is streamed, or spilled, end in every order.
-- after: test_decoding spill, subxact; spock spill_transaction
-- compare: spilled

--- everywhere
CREATE TABLE spilled (id int, v text);

--- publisher
INSERT INTO spilled VALUES (1, 'first');
SAVEPOINT s1;
INSERT INTO spilled SELECT -g, repeat(md5(g::text), 60) FROM generate_series(1, 900) g;
SAVEPOINT s2;
INSERT INTO spilled SELECT 2000 + g, repeat(md5(g::text), 60) FROM generate_series(1, 900) g;
RELEASE s2;
INSERT INTO spilled VALUES (0, 'between');
RELEASE s1;

--- publisher
INSERT INTO spilled SELECT g, repeat(md5(g::text), 60) FROM generate_series(1, 900) g;
SAVEPOINT s1;
INSERT INTO spilled VALUES (-1, 'inner');
SAVEPOINT s2;
INSERT INTO spilled SELECT 2000 + g, repeat(md5(g::text), 60) FROM generate_series(1, 900) g;
ROLLBACK TO s2;
INSERT INTO spilled VALUES (0, 'between');
RELEASE s1;

--- publisher
INSERT INTO spilled SELECT g, repeat(md5(g::text), 60) FROM generate_series(1, 900) g;
SAVEPOINT s1;
INSERT INTO spilled SELECT -g, repeat(md5(g::text), 60) FROM generate_series(1, 900) g;
SAVEPOINT s2;
INSERT INTO spilled SELECT 2000 + g, repeat(md5(g::text), 60) FROM generate_series(1, 900) g;
RELEASE s2;
INSERT INTO spilled VALUES (0, 'between');
ROLLBACK TO s1;
INSERT INTO spilled VALUES (1, 'last');

--- publisher
SAVEPOINT s1;
INSERT INTO spilled SELECT g, repeat(md5(g::text), 60) FROM generate_series(1, 2000) g;
ROLLBACK TO s1;
