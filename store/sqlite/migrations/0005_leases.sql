-- Leases: while they last. When one expires is known to the server alone.

CREATE TABLE leases (
    id         TEXT   NOT NULL PRIMARY KEY,
    tenant     TEXT   NOT NULL,
    created_at BIGINT NOT NULL,
    record     TEXT   NOT NULL
);

CREATE INDEX leases_by_tenant ON leases (tenant);
