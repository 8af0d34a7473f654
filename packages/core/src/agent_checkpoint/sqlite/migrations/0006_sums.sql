-- Sums: a row that a disk has changed is not taken for what was written. NULL
-- for a row from before, until it is written the next time. What goes into a
-- sum is decided in ledger/sums.py.
ALTER TABLE leases ADD COLUMN sum INTEGER;
ALTER TABLE limits ADD COLUMN sum INTEGER;
ALTER TABLE tickets ADD COLUMN sum INTEGER;
ALTER TABLE events ADD COLUMN sum INTEGER;
ALTER TABLE refusals ADD COLUMN sum INTEGER;
ALTER TABLE floors ADD COLUMN sum INTEGER;
ALTER TABLE retention ADD COLUMN sum INTEGER;
ALTER TABLE effects ADD COLUMN result_sum INTEGER;
ALTER TABLE effects ADD COLUMN sum INTEGER;

-- Checkpoints are written anew: a look at the sums must not read through the payload.
CREATE TABLE summed_checkpoints (
    id         INTEGER PRIMARY KEY,
    workflow   TEXT    NOT NULL,
    sequence   INTEGER NOT NULL CHECK (sequence >= 1),
    size_bytes INTEGER NOT NULL,
    saved_at   INTEGER NOT NULL,
    scope      TEXT,
    owner      TEXT,
    token      INTEGER,
    data_sum   INTEGER,
    sum        INTEGER,
    data       TEXT    NOT NULL,
    CHECK ((scope IS NULL) = (owner IS NULL) AND (scope IS NULL) = (token IS NULL))
);

INSERT INTO summed_checkpoints (id, workflow, sequence, size_bytes, saved_at, scope, owner, token, data)
SELECT id, workflow, sequence, size_bytes, saved_at, scope, owner, token, data FROM checkpoints
ORDER BY id;

DROP TABLE checkpoints;

ALTER TABLE summed_checkpoints RENAME TO checkpoints;

CREATE UNIQUE INDEX checkpoints_of_workflow ON checkpoints (workflow, sequence);

-- The same keys once more: who does not find a row asks again here, for damage
-- may have hidden it. As expressions, so that nobody else uses these indexes.
CREATE INDEX leases_again ON leases (scope || '');
CREATE INDEX limits_again ON limits (scope || '');
CREATE INDEX floors_again ON floors (workflow || '');
CREATE INDEX effects_again ON effects (key || '');
CREATE INDEX checkpoints_again ON checkpoints (workflow || '', sequence);
