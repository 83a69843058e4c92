-- Snapshots, templates, and where sandboxes and snapshots stand in their tree.

-- name is the column's alone, not the record's: it moves from one snapshot to
-- another without touching either record.
CREATE TABLE snapshots (
    id         TEXT     NOT NULL PRIMARY KEY,
    name       TEXT     UNIQUE, -- NULL = none
    kind       TEXT     NOT NULL,
    sandbox_id TEXT     NOT NULL,
    manifest   TEXT     NOT NULL,
    hidden     SMALLINT NOT NULL,
    created_at BIGINT   NOT NULL,
    record     TEXT     NOT NULL
);
CREATE INDEX snapshots_by_age ON snapshots (hidden, created_at, id);
CREATE INDEX snapshots_by_sandbox ON snapshots (sandbox_id, hidden, created_at, id);

CREATE TABLE snapshot_labels (
    snapshot_id TEXT NOT NULL REFERENCES snapshots (id) ON DELETE CASCADE,
    name        TEXT NOT NULL,
    value       TEXT NOT NULL,
    PRIMARY KEY (snapshot_id, name)
);
CREATE INDEX snapshot_labels_by_value ON snapshot_labels (name, value, snapshot_id);

-- Other content a snapshot cannot be used without: directories mounted in it.
CREATE TABLE snapshot_needs (
    snapshot_id TEXT NOT NULL REFERENCES snapshots (id) ON DELETE CASCADE,
    manifest    TEXT NOT NULL,
    PRIMARY KEY (snapshot_id, manifest)
);

-- Which images a snapshot cannot be used without.
CREATE TABLE snapshot_images (
    snapshot_id TEXT NOT NULL REFERENCES snapshots (id) ON DELETE CASCADE,
    image_id    TEXT NOT NULL,
    PRIMARY KEY (snapshot_id, image_id)
);
CREATE INDEX snapshot_images_by_image ON snapshot_images (image_id);

-- A node (sandbox or snapshot) and two of its ancestors: the nearest, and the
-- farthest it knows. Those two hold a tree together, also when what was between
-- them is gone; all 256 would cost a create 256 rows. Neither side is a foreign
-- key: an ancestor may be gone, and a node is in one of two tables.
CREATE TABLE lineage (
    node_id     TEXT NOT NULL,
    ancestor_id TEXT NOT NULL,
    PRIMARY KEY (node_id, ancestor_id)
);
CREATE INDEX lineage_by_ancestor ON lineage (ancestor_id, node_id);

-- The last version ever given out stays after it is deleted: "name@3" never
-- comes to mean something else.
CREATE TABLE template_names (
    name         TEXT   NOT NULL PRIMARY KEY,
    last_version BIGINT NOT NULL
);
CREATE TABLE templates (
    name        TEXT   NOT NULL REFERENCES template_names (name),
    version     BIGINT NOT NULL,
    snapshot_id TEXT   NOT NULL REFERENCES snapshots (id),
    created_at  BIGINT NOT NULL,
    record      TEXT   NOT NULL,
    PRIMARY KEY (name, version)
);
CREATE INDEX templates_by_snapshot ON templates (snapshot_id);
