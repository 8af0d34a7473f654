-- The process a lease is bound to, as JSON; '' for none. When that process is
-- provably dead the lease ends at once.
ALTER TABLE leases ADD COLUMN process TEXT NOT NULL DEFAULT '';

-- How many leases a scope may have at once. No row: one.
CREATE TABLE limits (
    scope        TEXT    PRIMARY KEY,
    slots        INTEGER NOT NULL CHECK (slots >= 1),
    domain       TEXT    NOT NULL, -- the boot in which since_ticks means something, '' unknown
    since_ticks  INTEGER NOT NULL  -- monotonic nanoseconds: no new slot has been free for longer
) WITHOUT ROWID;

-- Who waits for a scope. A number is never used again (AUTOINCREMENT): a waiter
-- that slept must not take another's ticket for its own.
CREATE TABLE tickets (
    number     INTEGER PRIMARY KEY AUTOINCREMENT,
    scope      TEXT    NOT NULL,
    owner      TEXT    NOT NULL,
    ttl_ns     INTEGER NOT NULL, -- its own life, renewed by the waiter
    asked_at   INTEGER NOT NULL, -- wall clock, nanoseconds since 1970, as the next one
    expires_at INTEGER NOT NULL,
    domain     TEXT    NOT NULL, -- the boot in which beat_ticks means something, '' unknown
    beat_ticks INTEGER NOT NULL,
    passed     INTEGER NOT NULL, -- 1: somebody behind it was served first
    process    TEXT    NOT NULL,
    bell       TEXT    NOT NULL  -- how to wake its waiter up, '' for none
);

CREATE INDEX tickets_of_scope ON tickets (scope, number);
