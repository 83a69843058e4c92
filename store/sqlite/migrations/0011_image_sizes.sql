-- A copy of the record's size, to be summed for a tenant's quota.
ALTER TABLE images ADD COLUMN size BIGINT NOT NULL DEFAULT 0;
UPDATE images SET size = coalesce(json_extract(record, '$.size'), 0);
