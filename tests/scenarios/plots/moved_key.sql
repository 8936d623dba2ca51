-- A key moves twice in the transaction that made it, and its row is gone on the targets when it changes again.
-- after: spock tuple_origin
-- compare: moved

--- everywhere
CREATE TABLE moved (id int PRIMARY KEY, boss int);

--- publisher
INSERT INTO moved VALUES (1, 5);
UPDATE moved SET id = id + 1;
UPDATE moved SET id = id + 1;

--- targets
DELETE FROM moved;

--- publisher
UPDATE moved SET boss = 99;
DELETE FROM moved;

--- publisher
INSERT INTO moved VALUES (3, 1), (5, 1);
UPDATE moved SET id = -id;
UPDATE moved SET id = id - 1;

--- publisher
DELETE FROM moved WHERE id = -4;
INSERT INTO moved VALUES (-4, 7);
