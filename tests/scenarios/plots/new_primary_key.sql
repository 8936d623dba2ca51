-- Another index becomes the primary key on the publisher first, while changes are on their way.
-- after: spock primary_key
-- compare: rekeyed

--- everywhere
CREATE TABLE rekeyed (id int PRIMARY KEY, other int NOT NULL UNIQUE, v text);

--- publisher
INSERT INTO rekeyed SELECT g, 100 + g, 'a' FROM generate_series(1, 5) g;

--- publisher
UPDATE rekeyed SET v = 'b' WHERE id = 1;
CREATE UNIQUE INDEX spare ON rekeyed (other);
ALTER TABLE rekeyed DROP CONSTRAINT rekeyed_pkey, ADD CONSTRAINT rekeyed_pkey PRIMARY KEY USING INDEX spare;

--- targets
ALTER TABLE rekeyed DROP CONSTRAINT rekeyed_pkey;
ALTER TABLE rekeyed ADD PRIMARY KEY (other);

--- publisher
UPDATE rekeyed SET v = 'd' WHERE other = 103;
INSERT INTO rekeyed VALUES (3, 200, 'twin');

--- publisher
DELETE FROM rekeyed WHERE id = 3;
UPDATE rekeyed SET id = 9 WHERE id = 4;
UPDATE rekeyed SET other = other + 1000;
