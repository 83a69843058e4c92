-- Grades: what a sandbox's work was worth. They outlive the sandbox.

CREATE TABLE grades (
    id         TEXT   NOT NULL PRIMARY KEY,
    tenant     TEXT   NOT NULL,
    sandbox    TEXT   NOT NULL,
    state      TEXT   NOT NULL,
    created_at BIGINT NOT NULL,
    record     TEXT   NOT NULL
);

CREATE INDEX grades_by_tenant ON grades (tenant, created_at, id);
CREATE INDEX grades_by_sandbox ON grades (sandbox);
