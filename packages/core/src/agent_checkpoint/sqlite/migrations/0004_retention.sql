-- The one door out of the audit log: events up to here are in an archive that
-- was read back. A row is there only inside the transaction that removes them.
CREATE TABLE archive_door (
    up_to INTEGER NOT NULL
);

DROP TRIGGER events_are_never_deleted;

CREATE TRIGGER events_are_never_deleted BEFORE DELETE ON events
WHEN NOT EXISTS (SELECT 1 FROM archive_door WHERE up_to >= OLD.id)
BEGIN
    SELECT RAISE(ABORT, 'the audit log is append-only');
END;

-- What is kept, and for how long. One row for each rule that was set.
CREATE TABLE retention (
    rule  TEXT NOT NULL PRIMARY KEY,
    value TEXT NOT NULL -- ASCII-escaped JSON
) WITHOUT ROWID;
