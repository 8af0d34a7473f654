-- Leases: one row for each slot of a scope, for ever.
-- A released or expired lease keeps its row: the scope's last token is in it,
-- and a token that restarted could be granted twice.
-- No CHECK constraints here: they would cost a sixth of every grant, and a
-- statement journal for the upsert; the rules decide what is written.
CREATE TABLE leases (
    scope        TEXT    NOT NULL,
    slot         INTEGER NOT NULL,
    owner        TEXT    NOT NULL,
    token        INTEGER NOT NULL,
    state        TEXT    NOT NULL, -- live, expired, released, force-released
    ttl_ns       INTEGER NOT NULL,
    acquired_at  INTEGER NOT NULL, -- wall clock, nanoseconds since 1970, as the two below
    heartbeat_at INTEGER NOT NULL,
    expires_at   INTEGER NOT NULL,
    domain       TEXT    NOT NULL, -- the boot in which beat_ticks means something, '' unknown
    beat_ticks   INTEGER NOT NULL, -- monotonic nanoseconds of the grant or the last heartbeat
    metadata     TEXT    NOT NULL, -- ASCII-escaped JSON object
    PRIMARY KEY (scope, slot)
) WITHOUT ROWID;

CREATE TRIGGER leases_keep_the_token BEFORE DELETE ON leases
BEGIN
    SELECT RAISE(ABORT, 'a lease row holds the last token of its scope and is never deleted');
END;

-- Checkpoints. The payload is the last column: a look at the others need not
-- read through its overflow pages.
CREATE TABLE checkpoints (
    id         INTEGER PRIMARY KEY,
    workflow   TEXT    NOT NULL,
    sequence   INTEGER NOT NULL CHECK (sequence >= 1),
    size_bytes INTEGER NOT NULL,
    saved_at   INTEGER NOT NULL,
    scope      TEXT,
    owner      TEXT,
    token      INTEGER,
    data       TEXT    NOT NULL,
    CHECK ((scope IS NULL) = (owner IS NULL) AND (scope IS NULL) = (token IS NULL))
);

CREATE UNIQUE INDEX checkpoints_of_workflow ON checkpoints (workflow, sequence);

-- Events: the audit log. Its last line is never removed, so an id is never reused.
CREATE TABLE events (
    id       INTEGER PRIMARY KEY,
    at       INTEGER NOT NULL,
    kind     TEXT    NOT NULL,
    scope    TEXT,
    owner    TEXT,
    token    INTEGER,
    workflow TEXT,
    sequence INTEGER,
    detail   TEXT    NOT NULL
);

CREATE INDEX events_of_scope ON events (scope) WHERE scope IS NOT NULL;
CREATE INDEX events_of_workflow ON events (workflow) WHERE workflow IS NOT NULL;

CREATE TRIGGER events_are_never_changed BEFORE UPDATE ON events
BEGIN
    SELECT RAISE(ABORT, 'the audit log is append-only');
END;

CREATE TRIGGER events_are_never_deleted BEFORE DELETE ON events
BEGIN
    SELECT RAISE(ABORT, 'the audit log is append-only');
END;

-- Refused writes after the first of their (scope, token, action, reason): counted, not
-- logged, so that a stale worker in a loop cannot flood the log. Token 0: the
-- write presented no fence.
CREATE TABLE refusals (
    scope    TEXT    NOT NULL,
    token    INTEGER NOT NULL,
    action   TEXT    NOT NULL,
    reason   TEXT    NOT NULL,
    times    INTEGER NOT NULL,
    first_at INTEGER NOT NULL,
    last_at  INTEGER NOT NULL,
    PRIMARY KEY (scope, token, action, reason)
) WITHOUT ROWID;
