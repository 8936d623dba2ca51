-- Times of the hour that comes twice, and of the one that never comes, are read where clocks go otherwise.
-- after: pglogical 030_pglogical_daylight_times_switching, spock 005_daylight_savings
-- compare: hours

--- everywhere
CREATE TABLE hours (
    id int PRIMARY KEY, moment timestamptz, local timestamp, day date, clock timetz, span tstzrange, written text
);

--- publisher
SET LOCAL timezone = 'Europe/Berlin';
INSERT INTO hours
    SELECT g, t, t AT TIME ZONE 'Europe/Berlin', t::date, t::timetz, tstzrange(t, t + '1 hour'), t::text
    FROM generate_series(0, 23) g, LATERAL (SELECT '2026-10-24 22:30:00+00'::timestamptz + g * interval '30 min') x (t);

--- publisher
SET LOCAL timezone = 'America/New_York';
UPDATE hours SET moment = '2026-03-08 02:30:00', clock = '02:30:00' WHERE id < 3;
UPDATE hours SET moment = moment + '1 day', written = moment::text WHERE id > 20;
