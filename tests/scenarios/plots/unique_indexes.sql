-- Unique indexes with predicates, and with NULLs that are alike or not, hold where they hold on the publisher.
-- after: spock and pglogical conflict_secondary_unique
-- compare: partly, nulls, onenull

--- everywhere
CREATE TABLE partly (a int PRIMARY KEY, b int, checked bool);
CREATE UNIQUE INDEX ON partly (b) WHERE checked;
CREATE TABLE nulls (a int PRIMARY KEY, b int UNIQUE);
CREATE TABLE onenull (a int PRIMARY KEY, b int UNIQUE NULLS NOT DISTINCT);

--- publisher
INSERT INTO partly VALUES (1, 1, false), (2, 1, false), (3, 2, true), (4, 2, false);

--- publisher
INSERT INTO nulls VALUES (1, NULL), (2, NULL), (3, 10), (4, NULL);
INSERT INTO onenull VALUES (1, NULL), (2, 1);

--- publisher
UPDATE partly SET checked = false WHERE a = 3;
UPDATE partly SET checked = true WHERE a = 4;
UPDATE onenull SET b = 2 WHERE a = 1;
UPDATE onenull SET b = NULL WHERE a = 2;

--- publisher
DELETE FROM onenull WHERE a = 2;
INSERT INTO onenull VALUES (3, NULL);
