-- Rows enter and leave the filter of their publication.
-- after: spock and pglogical row_filter, column_filter
-- compare: filtered

--- everywhere
CREATE TABLE filtered (id int PRIMARY KEY, kind text NOT NULL, n int, pad text);
ALTER TABLE filtered REPLICA IDENTITY FULL;
ALTER TABLE filtered ALTER pad SET STORAGE EXTERNAL;
-- how it is published
COMMENT ON TABLE filtered IS 'WHERE (kind = ''in'')';

--- publisher
INSERT INTO filtered
    SELECT g, (ARRAY['in', 'out'])[1 + g % 2], g, repeat(md5(g::text), 200) FROM generate_series(1, 20) g;

--- publisher
UPDATE filtered SET kind = 'in' WHERE id < 6;
UPDATE filtered SET kind = 'out' WHERE id > 15;

--- publisher
UPDATE filtered SET id = id + 100 WHERE kind = 'out';
UPDATE filtered SET n = 0;
DELETE FROM filtered WHERE id % 3 = 0;

--- publisher
UPDATE filtered SET kind = CASE kind WHEN 'in' THEN 'out' ELSE 'in' END;
