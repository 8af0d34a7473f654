-- The one door out of the audit log: events up to here are in an archive that
-- was read back. A row is there only inside the transaction that removes them.
CREATE TABLE archive_door (
    up_to BIGINT NOT NULL
);

CREATE FUNCTION refuse_unarchived() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM archive_door WHERE up_to >= OLD.id) THEN
        RAISE EXCEPTION 'the audit log is append-only' USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN OLD;
END
$$;

DROP TRIGGER events_are_never_changed ON events;

CREATE TRIGGER events_are_never_changed BEFORE UPDATE ON events FOR EACH ROW
EXECUTE FUNCTION refuse_change('the audit log is append-only');

CREATE TRIGGER events_are_never_deleted BEFORE DELETE ON events FOR EACH ROW
EXECUTE FUNCTION refuse_unarchived();

-- What is kept, and for how long. One row for each rule that was set.
CREATE TABLE retention (
    rule  TEXT COLLATE "C" PRIMARY KEY,
    value TEXT NOT NULL -- ASCII-escaped JSON
);
