-- Columns come and go in the middle of a transaction, also in a part of it that is rolled back.
-- after: test_decoding ddl, concurrent_ddl_dml
-- compare: changing

--- everywhere
CREATE TABLE changing (id int PRIMARY KEY, a text);

--- targets
ALTER TABLE changing ADD b bigint, ADD d text;

--- publisher
INSERT INTO changing VALUES (1, 'x');
ALTER TABLE changing ADD b int DEFAULT 7;
INSERT INTO changing VALUES (2, 'y', 8);
SAVEPOINT s;
ALTER TABLE changing ADD c int;
INSERT INTO changing VALUES (3, 'z', 9, 10);
ROLLBACK TO s;
INSERT INTO changing VALUES (4, 'v', 11);
ALTER TABLE changing DROP a;
INSERT INTO changing VALUES (5, 12);
ALTER TABLE changing ADD a text DEFAULT 'again';
UPDATE changing SET b = b + 1;

--- publisher
ALTER TABLE changing ALTER b TYPE bigint;
UPDATE changing SET b = b * 1000000000000;

--- publisher
DELETE FROM changing WHERE id < 3;
ALTER TABLE changing RENAME a TO d;
INSERT INTO changing VALUES (6, 1, 'e');
