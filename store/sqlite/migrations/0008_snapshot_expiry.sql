-- When a snapshot expires, a copy of the record's: 0 = never. Few do.
ALTER TABLE snapshots ADD COLUMN expires_at BIGINT NOT NULL DEFAULT 0;
CREATE INDEX snapshots_by_expiry ON snapshots (expires_at) WHERE expires_at > 0;
