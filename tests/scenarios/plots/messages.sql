-- Messages, and transactions of which nothing is published, pass between others.
-- after: test_decoding messages, xact; spock sync_event
-- compare: amid

--- everywhere
CREATE TABLE amid (id int);
CREATE UNLOGGED TABLE aside (id int);

--- publisher
INSERT INTO amid VALUES (1);
SELECT pg_logical_emit_message(true, 'a', 'with it');

--- publisher
SELECT pg_logical_emit_message(false, 'b', repeat('alone', 10000));

--- publisher
SAVEPOINT s;
SELECT pg_logical_emit_message(true, 'c', repeat('undone', 20000));
ROLLBACK TO s;
INSERT INTO aside VALUES (1);

--- publisher
CREATE TEMP TABLE passing AS SELECT 1;
DROP TABLE passing;
INSERT INTO amid VALUES (2);

--- publisher
SELECT pg_current_xact_id();
NOTIFY amid;
