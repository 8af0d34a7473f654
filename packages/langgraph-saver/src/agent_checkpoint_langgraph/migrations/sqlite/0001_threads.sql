-- No number in these tables is ever used again: what was found out about a row
-- without the lock holds for that row only.

-- A history is the checkpoints of one namespace of a thread: the graph's own (''), or a subgraph's.
CREATE TABLE langgraph_histories (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    thread_id TEXT NOT NULL,
    checkpoint_ns TEXT NOT NULL,
    UNIQUE (thread_id, checkpoint_ns)
);

-- A checkpoint without its state. Its number is its place in the order; saved
-- once more under its id it keeps its place, in another revision. By both a
-- writer knows that what it remembers of it still holds.
CREATE TABLE langgraph_checkpoints (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    history INTEGER NOT NULL,
    checkpoint_id TEXT NOT NULL,
    revision INTEGER NOT NULL,
    parent_id TEXT,
    format INTEGER NOT NULL,
    source TEXT,
    step INTEGER,
    run_id TEXT,
    metadata_kind TEXT NOT NULL,
    metadata BLOB NOT NULL,
    -- The checkpoint's dictionary without the values of its channels.
    kind TEXT NOT NULL,
    data BLOB NOT NULL,
    UNIQUE (history, checkpoint_id)
);

CREATE INDEX langgraph_checkpoints_in_order ON langgraph_checkpoints (history, number);

CREATE INDEX langgraph_checkpoints_of_runs ON langgraph_checkpoints (run_id) WHERE run_id IS NOT NULL;

-- The value of a channel, serialised. With a base it is what differs from that
-- one; weight is how many bytes of differences lie between it and the full copy
-- that they go back to, depth how many values were based on that one after another.
-- A value that no checkpoint has any more stays while it is the base of another one.
CREATE TABLE langgraph_values (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    history INTEGER NOT NULL,
    channel TEXT NOT NULL,
    base INTEGER,
    depth INTEGER NOT NULL,
    weight INTEGER NOT NULL,
    kind TEXT NOT NULL,
    data BLOB NOT NULL
);

CREATE INDEX langgraph_values_of_history ON langgraph_values (history);

-- Which values a checkpoint has.
CREATE TABLE langgraph_state (
    checkpoint INTEGER NOT NULL,
    value INTEGER NOT NULL,
    PRIMARY KEY (checkpoint, value)
) WITHOUT ROWID;

-- What tasks wrote on top of a checkpoint, which may be saved after them: no reference to it.
CREATE TABLE langgraph_writes (
    history INTEGER NOT NULL,
    checkpoint_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    idx INTEGER NOT NULL,
    task_path TEXT NOT NULL,
    channel TEXT NOT NULL,
    kind TEXT NOT NULL,
    data BLOB NOT NULL,
    UNIQUE (history, checkpoint_id, task_id, idx)
);
