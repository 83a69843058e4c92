-- Secrets before the last rotation but one, each with its own grace. The last one
-- is in api_keys.
CREATE TABLE old_secrets (
    hash   TEXT   NOT NULL PRIMARY KEY,
    key_id TEXT   NOT NULL REFERENCES api_keys (id) ON DELETE CASCADE,
    until  BIGINT NOT NULL
);
CREATE INDEX old_secrets_by_key ON old_secrets (key_id);
