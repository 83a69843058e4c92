-- Written for SQLite and PostgreSQL alike. Times are nanoseconds since 1970,
-- because paging orders by them exactly; hashes are hex; ended is 0 or 1.
-- Ids and names are compared by bytes: PostgreSQL needs COLLATE "C" for that.
--
-- record is the whole sandbox or image as JSON. A column beside it is a copy of
-- what a query needs to find or order by, so that a new field of the domain
-- needs no migration.

CREATE TABLE sandboxes (
    id         TEXT     NOT NULL PRIMARY KEY,
    ended      SMALLINT NOT NULL,
    state      TEXT     NOT NULL,
    image_id   TEXT     NOT NULL,
    created_at BIGINT   NOT NULL,
    ended_at   BIGINT   NOT NULL, -- 0 until it ends
    version    BIGINT   NOT NULL, -- +1 per change, for compare-and-set
    record     TEXT     NOT NULL
);

-- The ended outnumber the living by far: no list of the living reads them.
CREATE INDEX sandboxes_by_age ON sandboxes (ended, created_at, id);
CREATE INDEX sandboxes_by_end ON sandboxes (ended_at) WHERE ended = 1;
CREATE INDEX sandboxes_by_image ON sandboxes (image_id) WHERE ended = 0;

-- ended and created_at are copies, so that one index finds a label's living
-- sandboxes in the order of the list.
CREATE TABLE sandbox_labels (
    sandbox_id TEXT     NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    name       TEXT     NOT NULL,
    value      TEXT     NOT NULL,
    ended      SMALLINT NOT NULL,
    created_at BIGINT   NOT NULL,
    PRIMARY KEY (sandbox_id, name)
);
CREATE INDEX sandbox_labels_by_age ON sandbox_labels (name, value, ended, created_at, sandbox_id);

CREATE TABLE idempotency_keys (
    idem_key   TEXT NOT NULL PRIMARY KEY,
    hash       TEXT NOT NULL,
    sandbox_id TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE
);
CREATE INDEX idempotency_keys_by_sandbox ON idempotency_keys (sandbox_id);

CREATE TABLE images (
    id         TEXT   NOT NULL PRIMARY KEY,
    created_at BIGINT NOT NULL,
    record     TEXT   NOT NULL
);
CREATE TABLE image_names (
    name     TEXT NOT NULL PRIMARY KEY,
    image_id TEXT NOT NULL REFERENCES images (id)
);
CREATE INDEX image_names_by_image ON image_names (image_id);

CREATE TABLE api_keys (
    id           TEXT   NOT NULL PRIMARY KEY,
    hash         TEXT   NOT NULL UNIQUE,
    name         TEXT   NOT NULL,
    created_at   BIGINT NOT NULL,
    last_used_at BIGINT NOT NULL -- 0 = never
);
