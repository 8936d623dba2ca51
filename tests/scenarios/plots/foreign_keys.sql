-- Foreign keys act where a change was made, and nowhere again.
-- after: spock foreign_key
-- compare: parent, child, loose

--- everywhere
CREATE TABLE parent (id int PRIMARY KEY);
CREATE TABLE child (id int PRIMARY KEY, p int REFERENCES parent ON DELETE CASCADE ON UPDATE CASCADE);
CREATE TABLE loose (
    id int PRIMARY KEY,
    p int REFERENCES parent ON DELETE SET NULL ON UPDATE CASCADE DEFERRABLE INITIALLY DEFERRED
);

--- publisher
INSERT INTO loose VALUES (1, 2);
INSERT INTO parent VALUES (1), (2), (3);
INSERT INTO child VALUES (1, 1), (2, 2);

--- publisher
UPDATE parent SET id = id + 10;

--- targets
DELETE FROM child;

--- publisher
DELETE FROM parent WHERE id < 13;

--- publisher
TRUNCATE parent, child, loose;
INSERT INTO parent VALUES (1);
