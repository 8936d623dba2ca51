-- What a refresh writes into a materialized view is nobody's business.
-- after: spock and pglogical matview
-- compare: base, seen

--- everywhere
CREATE TABLE base (id int PRIMARY KEY);
CREATE MATERIALIZED VIEW seen AS SELECT * FROM base;
CREATE UNIQUE INDEX ON seen (id);

--- publisher
INSERT INTO base VALUES (1);
REFRESH MATERIALIZED VIEW seen;

--- publisher
INSERT INTO base VALUES (2);
REFRESH MATERIALIZED VIEW CONCURRENTLY seen;
INSERT INTO base VALUES (3);
