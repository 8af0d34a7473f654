-- Effects: what was done outside, recorded before and after. A row is never
-- deleted: without it the same key would be done again.
CREATE TABLE effects (
    key      TEXT   COLLATE "C" PRIMARY KEY,
    scope    TEXT   COLLATE "C" NOT NULL, -- whose lease it was begun under last, as the next two
    owner    TEXT   COLLATE "C" NOT NULL,
    token    BIGINT NOT NULL,
    state    TEXT   COLLATE "C" NOT NULL, -- begun, done, failed, unknown
    digest   TEXT,            -- of the request, NULL when none was given
    result   TEXT,            -- ASCII-escaped JSON, NULL unless done
    begun_at BIGINT NOT NULL, -- the server's clock, nanoseconds since 1970, as the next one
    ended_at BIGINT,          -- when it was told what became of it, NULL while begun
    late     BIGINT NOT NULL, -- 1: told after its lease was lost
    process  TEXT   NOT NULL  -- who began it, '' for nobody in particular
);

CREATE INDEX effects_in_order ON effects (begun_at);

CREATE TRIGGER effects_are_kept BEFORE DELETE ON effects FOR EACH ROW
EXECUTE FUNCTION refuse_change('an effect is never deleted: it would be done again');

CREATE TRIGGER effects_are_never_emptied BEFORE TRUNCATE ON effects
EXECUTE FUNCTION refuse_change('an effect is never deleted: it would be done again');
