-- Tables are rewritten and emptied with changes before and behind, and some of that is rolled back.
-- after: test_decoding rewrite, truncate
-- compare: rewritten, emptied

--- everywhere
CREATE TABLE rewritten (id int PRIMARY KEY, v text);
CREATE TABLE emptied (id int PRIMARY KEY, v text);

--- publisher
INSERT INTO rewritten SELECT g, g::text FROM generate_series(1, 9) g;
INSERT INTO emptied SELECT * FROM rewritten;

--- publisher
INSERT INTO rewritten VALUES (10, 'a');
ALTER TABLE rewritten ALTER v TYPE varchar(9000);
UPDATE rewritten SET v = v || 'b';
ALTER TABLE rewritten ALTER id TYPE bigint;
UPDATE rewritten SET v = v || 'c';

--- publisher
SAVEPOINT a;
TRUNCATE emptied;
INSERT INTO emptied VALUES (1, 'gone');
ROLLBACK TO a;
UPDATE emptied SET v = 'kept';

--- publisher
TRUNCATE emptied;
INSERT INTO emptied VALUES (1, 'new');
TRUNCATE rewritten, emptied;
INSERT INTO emptied VALUES (2, '');

--- publisher
INSERT INTO rewritten SELECT g, repeat('w', 3000) FROM generate_series(1, 50) g;
CLUSTER rewritten USING rewritten_pkey;
UPDATE rewritten SET v = 'x' WHERE id < 10;

--- publisher
TRUNCATE emptied RESTART IDENTITY CASCADE;
