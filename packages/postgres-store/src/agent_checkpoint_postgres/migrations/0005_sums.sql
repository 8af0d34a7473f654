-- Sums of the rows, as on SQLite, where a disk's errors reach them; a server has
-- checksums of its own, for whole pages. NULL for a row from before.
ALTER TABLE leases ADD COLUMN sum BIGINT;
ALTER TABLE limits ADD COLUMN sum BIGINT;
ALTER TABLE tickets ADD COLUMN sum BIGINT;
ALTER TABLE events ADD COLUMN sum BIGINT;
ALTER TABLE refusals ADD COLUMN sum BIGINT;
ALTER TABLE floors ADD COLUMN sum BIGINT;
ALTER TABLE retention ADD COLUMN sum BIGINT;
ALTER TABLE effects ADD COLUMN result_sum BIGINT;
ALTER TABLE effects ADD COLUMN sum BIGINT;
ALTER TABLE checkpoints ADD COLUMN data_sum BIGINT;
ALTER TABLE checkpoints ADD COLUMN sum BIGINT;

-- The same keys once more: who does not find a row asks again here.
CREATE INDEX leases_again ON leases ((scope || ''));
CREATE INDEX limits_again ON limits ((scope || ''));
CREATE INDEX floors_again ON floors ((workflow || ''));
CREATE INDEX effects_again ON effects ((key || ''));
CREATE INDEX checkpoints_again ON checkpoints ((workflow || ''), sequence);
