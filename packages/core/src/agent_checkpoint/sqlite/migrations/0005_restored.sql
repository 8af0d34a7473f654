-- Sequences that were handed out in a store that a backup replaced: a workflow
-- goes on behind them.
CREATE TABLE floors (
    workflow TEXT    NOT NULL PRIMARY KEY,
    sequence INTEGER NOT NULL
) WITHOUT ROWID;
