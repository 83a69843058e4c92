-- Tenants, their keys, and the audit log. All that was there before is the
-- default tenant's, and its keys are the installation's: they could do
-- everything and go on doing it.

CREATE TABLE tenants (
    id         TEXT   NOT NULL PRIMARY KEY,
    name       TEXT   NOT NULL UNIQUE,
    created_at BIGINT NOT NULL,
    record     TEXT   NOT NULL
);
INSERT INTO tenants (id, name, created_at, record) VALUES ('default', 'default', 0, '{"id":"default","name":"default","quota":{},"created_at":"1970-01-01T00:00:00Z"}');

ALTER TABLE sandboxes ADD COLUMN tenant TEXT NOT NULL DEFAULT 'default';
CREATE INDEX sandboxes_by_tenant ON sandboxes (tenant, ended, created_at, id);

ALTER TABLE snapshots ADD COLUMN tenant TEXT NOT NULL DEFAULT 'default';
-- A copy of the record's content.stored, to be summed.
ALTER TABLE snapshots ADD COLUMN stored BIGINT NOT NULL DEFAULT 0;
UPDATE snapshots SET stored = coalesce(json_extract(record, '$.content.stored'), 0);
CREATE INDEX snapshots_by_tenant ON snapshots (tenant, hidden, created_at, id);

-- Names are a table of their own now: the column's UNIQUE cannot be taken back,
-- so it stays empty.
CREATE TABLE snapshot_names (
    tenant      TEXT NOT NULL,
    name        TEXT NOT NULL,
    snapshot_id TEXT NOT NULL UNIQUE REFERENCES snapshots (id) ON DELETE CASCADE,
    PRIMARY KEY (tenant, name)
);
INSERT INTO snapshot_names (tenant, name, snapshot_id) SELECT 'default', name, id FROM snapshots WHERE name IS NOT NULL;
UPDATE snapshots SET name = NULL;

CREATE TABLE idempotency_keys_3 (
    tenant     TEXT NOT NULL,
    idem_key   TEXT NOT NULL,
    hash       TEXT NOT NULL,
    sandbox_id TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    PRIMARY KEY (tenant, idem_key)
);
INSERT INTO idempotency_keys_3 (tenant, idem_key, hash, sandbox_id) SELECT 'default', idem_key, hash, sandbox_id FROM idempotency_keys;
DROP TABLE idempotency_keys;
ALTER TABLE idempotency_keys_3 RENAME TO idempotency_keys;
CREATE INDEX idempotency_keys_by_sandbox ON idempotency_keys (sandbox_id);

-- tenant '' is everybody's. The base image is what sandboxes start from that ask
-- for none.
CREATE TABLE image_names_3 (
    tenant   TEXT NOT NULL,
    name     TEXT NOT NULL,
    image_id TEXT NOT NULL REFERENCES images (id),
    PRIMARY KEY (tenant, name)
);
INSERT INTO image_names_3 (tenant, name, image_id) SELECT CASE WHEN name = 'base' THEN '' ELSE 'default' END, name, image_id FROM image_names;
DROP TABLE image_names;
ALTER TABLE image_names_3 RENAME TO image_names;
CREATE INDEX image_names_by_image ON image_names (image_id);

CREATE TABLE template_names_3 (
    tenant       TEXT   NOT NULL,
    name         TEXT   NOT NULL,
    last_version BIGINT NOT NULL,
    PRIMARY KEY (tenant, name)
);
INSERT INTO template_names_3 (tenant, name, last_version) SELECT 'default', name, last_version FROM template_names;
CREATE TABLE templates_3 (
    tenant      TEXT   NOT NULL,
    name        TEXT   NOT NULL,
    version     BIGINT NOT NULL,
    snapshot_id TEXT   NOT NULL REFERENCES snapshots (id),
    created_at  BIGINT NOT NULL,
    record      TEXT   NOT NULL,
    PRIMARY KEY (tenant, name, version)
);
INSERT INTO templates_3 (tenant, name, version, snapshot_id, created_at, record) SELECT 'default', name, version, snapshot_id, created_at, record FROM templates;
DROP TABLE templates;
DROP TABLE template_names;
ALTER TABLE templates_3 RENAME TO templates;
ALTER TABLE template_names_3 RENAME TO template_names;
CREATE INDEX templates_by_snapshot ON templates (snapshot_id);

ALTER TABLE api_keys ADD COLUMN tenant TEXT NOT NULL DEFAULT 'default';
ALTER TABLE api_keys ADD COLUMN role TEXT NOT NULL DEFAULT 'root';
ALTER TABLE api_keys ADD COLUMN scopes TEXT NOT NULL DEFAULT ''; -- separated by spaces
ALTER TABLE api_keys ADD COLUMN expires_at BIGINT NOT NULL DEFAULT 0; -- 0 = never
ALTER TABLE api_keys ADD COLUMN old_hash TEXT NOT NULL DEFAULT ''; -- of the secret before the last rotation
ALTER TABLE api_keys ADD COLUMN old_until BIGINT NOT NULL DEFAULT 0;
CREATE INDEX api_keys_by_old_hash ON api_keys (old_hash) WHERE old_hash <> '';
CREATE INDEX api_keys_by_tenant ON api_keys (tenant, created_at, id);

-- Each entry's hash covers the one before, so that what was changed or taken
-- out of the middle shows. Old ones go from the front; audit_head keeps the
-- chain's end, also when nothing is left of it.
CREATE TABLE audit (
    seq    BIGINT NOT NULL PRIMARY KEY,
    at     BIGINT NOT NULL,
    tenant TEXT   NOT NULL,
    record TEXT   NOT NULL
);
CREATE INDEX audit_by_tenant ON audit (tenant, seq);
CREATE INDEX audit_by_time ON audit (at);
CREATE TABLE audit_head (
    one  SMALLINT NOT NULL PRIMARY KEY,
    seq  BIGINT   NOT NULL,
    hash TEXT     NOT NULL
);
INSERT INTO audit_head (one, seq, hash) VALUES (1, 0, '');
