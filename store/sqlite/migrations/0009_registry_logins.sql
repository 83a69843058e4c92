-- Who a tenant is to a registry. sealed is the password, encrypted as the values
-- of secrets are.

CREATE TABLE registry_logins (
    tenant     TEXT   NOT NULL,
    registry   TEXT   NOT NULL,
    username   TEXT   NOT NULL,
    sealed     TEXT   NOT NULL,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (tenant, registry)
);
