-- Effects: what was done outside, recorded before and after. A row is never
-- deleted: without it the same key would be done again.
CREATE TABLE effects (
    key      TEXT    NOT NULL PRIMARY KEY,
    scope    TEXT    NOT NULL, -- whose lease it was begun under last, as the next two
    owner    TEXT    NOT NULL,
    token    INTEGER NOT NULL,
    state    TEXT    NOT NULL, -- begun, done, failed, unknown
    digest   TEXT,             -- of the request, NULL when none was given
    result   TEXT,             -- ASCII-escaped JSON, NULL unless done
    begun_at INTEGER NOT NULL, -- wall clock, nanoseconds since 1970, as the next one
    ended_at INTEGER,          -- when it was told what became of it, NULL while begun
    late     INTEGER NOT NULL, -- 1: told after its lease was lost
    process  TEXT    NOT NULL  -- who began it, '' for nobody in particular
);

CREATE INDEX effects_in_order ON effects (begun_at);

CREATE TRIGGER effects_are_kept BEFORE DELETE ON effects
BEGIN
    SELECT RAISE(ABORT, 'an effect is never deleted: it would be done again');
END;
