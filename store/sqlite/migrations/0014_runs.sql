-- Runs of trainers, their checkpoints, and which run a sandbox is of.
CREATE TABLE runs (
    id         TEXT     NOT NULL PRIMARY KEY,
    tenant     TEXT     NOT NULL,
    name       TEXT     NOT NULL,
    ended      SMALLINT NOT NULL,
    created_at BIGINT   NOT NULL,
    record     TEXT     NOT NULL,
    UNIQUE (tenant, name)
);
CREATE INDEX runs_by_age ON runs (ended, created_at, id);

CREATE TABLE run_checkpoints (
    run        TEXT   NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    version    BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    size       BIGINT NOT NULL,
    doc        BLOB   NOT NULL,
    PRIMARY KEY (run, version)
);

-- '' = of none. A copy of the record's, which never changes.
ALTER TABLE sandboxes ADD COLUMN run TEXT NOT NULL DEFAULT '';
CREATE INDEX sandboxes_by_run ON sandboxes (run, ended, created_at, id) WHERE run <> '';
