-- Objects with the names of the server's own in schema evil: whatever calls one of them fails.
-- plant.names and plant.operators: functions and operators that are worth it.
DO $plant$
DECLARE
    it record;
    names CONSTANT text[] := current_setting('plant.names');
    operators CONSTANT text[] := current_setting('plant.operators');
    here CONSTANT oid := 'pg_catalog'::regnamespace;
    types CONSTANT oid[] := ARRAY(
        SELECT oid FROM pg_type WHERE typnamespace = here AND typtype = 'b' AND (typelem = 0 OR typname = 'name'));
    operands CONSTANT oid[] := types || 'anyarray'::regtype::oid || 'anyelement'::regtype::oid || 0::oid;
    body CONSTANT text := 'BEGIN RAISE EXCEPTION %L; END';
BEGIN
    CREATE SCHEMA evil;
    GRANT USAGE ON SCHEMA evil TO PUBLIC;
    CREATE FUNCTION evil.trap(what text) RETURNS bool LANGUAGE plpgsql AS
        $f$BEGIN RAISE EXCEPTION 'captured: %', what; END$f$;
    FOR it IN
        SELECT oid, proname, prokind, pg_get_function_identity_arguments(oid) AS arguments,
               pg_get_function_result(oid) AS result, format(body, 'captured: ' || proname) AS body
          FROM pg_proc WHERE pronamespace = here AND prokind IN ('a', 'f') AND proname = ANY (names)
    LOOP
        BEGIN
            IF it.prokind = 'f' THEN
                EXECUTE format('CREATE FUNCTION evil.%I(%s) RETURNS %s LANGUAGE plpgsql AS %L',
                               it.proname, it.arguments, it.result, it.body);
            ELSE
                EXECUTE format('CREATE FUNCTION evil.step_%s(%s) RETURNS bool LANGUAGE plpgsql AS %L',
                               it.oid, concat_ws(', ', 'bool', nullif(it.arguments, '')), it.body);
                EXECUTE format('CREATE AGGREGATE evil.%I(%s) (sfunc = evil.step_%s, stype = bool)',
                               it.proname, coalesce(nullif(it.arguments, ''), '*'), it.oid);
            END IF;
        EXCEPTION WHEN OTHERS THEN  -- of types that only the server's own may have
        END;
    END LOOP;
    FOR it IN
        SELECT oid, oprname, nullif(oprleft, 0) AS before, format_type(oprleft, NULL) AS l,
               format_type(oprright, NULL) AS r, format_type(oprresult, NULL) AS result,
               format(body, 'captured: operator ' || oprname) AS body
          FROM pg_operator
         WHERE oprnamespace = here AND oprname = ANY (operators) AND oprleft = ANY (operands) AND oprright = ANY (operands)
    LOOP
        BEGIN
            EXECUTE format('CREATE FUNCTION evil.operator_%s(%s) RETURNS %s LANGUAGE plpgsql AS %L',
                           it.oid, concat_ws(', ', CASE WHEN it.before IS NOT NULL THEN it.l END, it.r), it.result, it.body);
            EXECUTE format('CREATE OPERATOR evil.%s (%s RIGHTARG = %s, FUNCTION = evil.operator_%s)',
                           it.oprname, CASE WHEN it.before IS NOT NULL THEN format('LEFTARG = %s,', it.l) END, it.r, it.oid);
        EXCEPTION WHEN OTHERS THEN
        END;
    END LOOP;
    FOR it IN SELECT relname FROM pg_class WHERE relnamespace = here AND relkind IN ('r', 'v')
    LOOP
        BEGIN
            EXECUTE format('CREATE VIEW evil.%1$I AS SELECT * FROM pg_catalog.%1$I WHERE evil.trap(%1$L)', it.relname);
        EXCEPTION WHEN OTHERS THEN
        END;
    END LOOP;
    FOR it IN SELECT typname FROM pg_type WHERE oid = ANY (types)
    LOOP
        BEGIN
            EXECUTE format('CREATE DOMAIN evil.%1$I AS pg_catalog.%1$I CHECK (evil.trap(%1$L))', it.typname);
        EXCEPTION WHEN OTHERS THEN
        END;
    END LOOP;
    -- beside the operators of an extension, in its schema, for domains over its types
    FOR it IN
        SELECT d.oid, o.oid AS operator, o.oprname, format_type(d.oid, NULL) AS l, format_type(d.oid, NULL) AS r,
               format_type(o.oprresult, NULL) AS result, n.nspname, format(body, 'captured: domain ' || o.oprname) AS body
          FROM pg_type d JOIN pg_operator o ON o.oprleft = d.typbasetype AND o.oprright = d.typbasetype
          JOIN pg_namespace n ON n.oid = o.oprnamespace
         WHERE d.typtype = 'd' AND n.nspname = 'public' AND o.oprname = ANY (operators)
    LOOP
        EXECUTE format('CREATE FUNCTION evil.domain_%s_%s(%s, %s) RETURNS %s LANGUAGE plpgsql AS %L',
                       it.oid, it.operator, it.l, it.r, it.result, it.body);
        EXECUTE format('CREATE OPERATOR %I.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = evil.domain_%s_%s)',
                       it.nspname, it.oprname, it.l, it.r, it.oid, it.operator);
    END LOOP;
END
$plant$
