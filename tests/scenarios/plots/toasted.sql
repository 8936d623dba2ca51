-- Large values that are not sent again stay, by the primary key, by an index that holds them, and by the whole row.
-- after: spock toasted, test_decoding toast
-- compare: large

--- everywhere
CREATE TABLE large (id int PRIMARY KEY, small text, big text NOT NULL, spare text);
ALTER TABLE large ALTER big SET STORAGE EXTERNAL;
CREATE UNIQUE INDEX large_small ON large (id, small);
ALTER TABLE large ALTER small SET NOT NULL;

--- publisher
INSERT INTO large SELECT g, 'a', repeat(md5(g::text), 300), 'k' FROM generate_series(1, 20) g;

--- publisher
UPDATE large SET small = 'b';
UPDATE large SET id = id + 100 WHERE id < 5;

--- everywhere
ALTER TABLE large REPLICA IDENTITY USING INDEX large_small;

--- publisher
UPDATE large SET spare = 'c' WHERE id > 100;
UPDATE large SET small = 'd' WHERE id = 6;
UPDATE large SET big = big || 'x' WHERE id = 6;

--- everywhere
ALTER TABLE large REPLICA IDENTITY FULL;

--- publisher
UPDATE large SET spare = NULL WHERE id < 9;
UPDATE large SET big = repeat(md5(small), 300) WHERE id = 7;
DELETE FROM large WHERE id = 101;
