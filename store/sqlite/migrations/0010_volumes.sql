-- Volumes and recordings, which nodes kept the records of until now. Those there
-- are come in when the server first sees what its node has.

CREATE TABLE volumes (
    id     TEXT   NOT NULL PRIMARY KEY,
    tenant TEXT   NOT NULL,
    name   TEXT   NOT NULL,
    size   BIGINT NOT NULL,
    state  TEXT   NOT NULL,
    record TEXT   NOT NULL, -- but for size and state
    UNIQUE (tenant, name)
);

CREATE TABLE recordings (
    id         TEXT   NOT NULL PRIMARY KEY,
    tenant     TEXT   NOT NULL,
    name       TEXT,            -- NULL = it is called by its id
    state      TEXT   NOT NULL,
    created_at BIGINT NOT NULL,
    record     TEXT   NOT NULL, -- but for the state
    UNIQUE (tenant, name)
);
CREATE INDEX recordings_by_tenant ON recordings (tenant, created_at, id);
