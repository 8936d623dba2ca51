-- Triggers of the targets write a history and keep rows out.
-- after: spock and pglogical triggers
-- compare: watched, sieved, history

--- everywhere
CREATE TABLE watched (id int PRIMARY KEY, v text);
CREATE TABLE sieved (id int PRIMARY KEY, v text);

--- targets
CREATE TABLE history (did text, old text, new text);
CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.history VALUES (tg_op, to_jsonb(old)::text, to_jsonb(new)::text);
    RETURN NULL;
END $$;
CREATE FUNCTION sieve() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RETURN CASE WHEN new.id % 3 = 0 THEN NULL ELSE new END;
END $$;
CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON watched FOR EACH ROW EXECUTE FUNCTION keep();
CREATE TRIGGER sieve BEFORE INSERT OR UPDATE ON sieved FOR EACH ROW EXECUTE FUNCTION sieve();

--- publisher
INSERT INTO watched VALUES (1, 'unseen');
INSERT INTO sieved SELECT g, g::text FROM generate_series(1, 9) g;

--- targets
ALTER TABLE watched ENABLE REPLICA TRIGGER keep;
ALTER TABLE sieved ENABLE REPLICA TRIGGER sieve;

--- publisher
INSERT INTO watched VALUES (2, 'seen');
UPDATE watched SET v = v || '!';
DELETE FROM watched WHERE id = 1;

--- publisher
TRUNCATE sieved;
INSERT INTO sieved SELECT g, g::text FROM generate_series(1, 9) g;
UPDATE sieved SET v = 'x';

--- publisher
UPDATE sieved SET id = id + 100 WHERE id > 4;
