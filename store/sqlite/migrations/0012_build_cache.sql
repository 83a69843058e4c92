-- What builds of images made and were given: layers, files, images, by what they
-- are known by. It can be lost: it is made again.

CREATE TABLE build_cache (
    tenant   TEXT   NOT NULL,
    key      TEXT   NOT NULL,
    record   TEXT   NOT NULL,
    manifest TEXT   NOT NULL, -- content it keeps; '' = none
    size     BIGINT NOT NULL,
    used_at  BIGINT NOT NULL,
    PRIMARY KEY (tenant, key)
);
CREATE INDEX build_cache_manifest ON build_cache (manifest);
