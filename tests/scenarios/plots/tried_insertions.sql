-- Insertions that were only tried leave no trace; MERGE and writing CTEs are rows like others.
-- after: test_decoding ddl (ON CONFLICT), spock basic
-- compare: tried

--- everywhere
CREATE TABLE tried (id int PRIMARY KEY, n int, v text);

--- publisher
INSERT INTO tried VALUES (1, 1, 'a');
INSERT INTO tried VALUES (1, 2, 'b') ON CONFLICT (id) DO UPDATE SET n = 3;

--- publisher
INSERT INTO tried SELECT g % 40, g, repeat(md5(g::text), 60) FROM generate_series(1, 400) g ON CONFLICT DO NOTHING;

--- publisher
MERGE INTO tried t USING generate_series(30, 50) g ON t.id = g
    WHEN MATCHED AND g < 35 THEN DELETE
    WHEN MATCHED THEN UPDATE SET n = -g
    WHEN NOT MATCHED THEN INSERT VALUES (g, g, 'merged');

--- publisher
WITH gone AS (DELETE FROM tried WHERE id < 5 RETURNING *)
    INSERT INTO tried SELECT id + 100, n, v FROM gone;
