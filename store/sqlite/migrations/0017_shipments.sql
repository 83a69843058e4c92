-- Shipments: records of runs on their way out, and how far each is.

CREATE TABLE shipments (
    id         TEXT   NOT NULL PRIMARY KEY,
    tenant     TEXT   NOT NULL,
    name       TEXT   NOT NULL,
    created_at BIGINT NOT NULL,
    record     TEXT   NOT NULL,
    UNIQUE (tenant, name)
);

CREATE TABLE shipment_positions (
    shipment TEXT   NOT NULL REFERENCES shipments (id) ON DELETE CASCADE,
    run      TEXT   NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    at       BIGINT NOT NULL,
    pending  BIGINT NOT NULL,
    records  BIGINT NOT NULL,
    PRIMARY KEY (shipment, run)
);
CREATE INDEX shipment_positions_by_run ON shipment_positions (run);

-- Verdicts that the log of their run does not have yet: written first here, then
-- there, and a server that died in between finds them.
ALTER TABLE grades ADD COLUMN unlogged SMALLINT NOT NULL DEFAULT 0;
CREATE INDEX grades_unlogged ON grades (id) WHERE unlogged <> 0;
