-- Secrets that requests of sandboxes leave with. sealed is the value, encrypted
-- by the server with a key that is not in this file, as hex.

CREATE TABLE secrets (
    tenant     TEXT   NOT NULL,
    name       TEXT   NOT NULL,
    updated_at BIGINT NOT NULL,
    sealed     TEXT   NOT NULL,
    record     TEXT   NOT NULL,
    PRIMARY KEY (tenant, name)
);
