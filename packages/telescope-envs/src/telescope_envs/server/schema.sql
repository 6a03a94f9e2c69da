-- Version 1 of the server's records. Rows of releases, artifacts, statuses and aliases are only
-- ever added: triggers refuse to change or delete them, also with REPLACE.

CREATE TABLE settings (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT;

CREATE TABLE changes (number INTEGER NOT NULL) STRICT;
INSERT INTO changes VALUES (0);

CREATE TABLE namespaces (
    owner TEXT PRIMARY KEY,
    status TEXT NOT NULL CHECK (status IN ('active', 'suspended')),
    publishers TEXT NOT NULL,
    created_at TEXT NOT NULL
) STRICT;

CREATE TABLE tokens (
    id TEXT PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    label TEXT NOT NULL,
    scope TEXT NOT NULL CHECK (scope IN ('read', 'publish', 'admin')),
    owners TEXT NOT NULL,
    created_at TEXT NOT NULL,
    expires_at TEXT NOT NULL,
    revoked_at TEXT NOT NULL DEFAULT ''
) STRICT;

-- One row per release. `line` is its index line, byte for byte as it is served.
CREATE TABLE releases (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    environment TEXT NOT NULL,
    version TEXT NOT NULL,
    distribution TEXT NOT NULL,
    line TEXT NOT NULL,
    received_at TEXT NOT NULL,
    token TEXT NOT NULL,
    UNIQUE (environment, version)
) STRICT;
CREATE INDEX releases_of_distribution ON releases (distribution);

-- Files below artifacts/, by the path they are served at. The bytes are in a file named by hash.
CREATE TABLE artifacts (
    path TEXT PRIMARY KEY,
    sha256 TEXT NOT NULL,
    size INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Every status record that was ever stored; the one with the highest revision is current.
CREATE TABLE statuses (
    environment TEXT NOT NULL,
    revision INTEGER NOT NULL,
    record TEXT NOT NULL,
    changed_at TEXT NOT NULL,
    token TEXT NOT NULL,
    PRIMARY KEY (environment, revision)
) STRICT, WITHOUT ROWID;

CREATE TABLE aliases (
    name TEXT PRIMARY KEY,
    environment TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TRIGGER releases_stay BEFORE UPDATE ON releases
BEGIN SELECT RAISE(ABORT, 'a release is never changed'); END;
CREATE TRIGGER releases_are_kept BEFORE DELETE ON releases
BEGIN SELECT RAISE(ABORT, 'a release is never removed; yank it'); END;
CREATE TRIGGER artifacts_stay BEFORE UPDATE ON artifacts
BEGIN SELECT RAISE(ABORT, 'an artifact is never changed'); END;
CREATE TRIGGER artifacts_are_kept BEFORE DELETE ON artifacts
BEGIN SELECT RAISE(ABORT, 'an artifact is never removed'); END;
CREATE TRIGGER statuses_stay BEFORE UPDATE ON statuses
BEGIN SELECT RAISE(ABORT, 'a status is never changed; add the next revision'); END;
CREATE TRIGGER statuses_are_kept BEFORE DELETE ON statuses
BEGIN SELECT RAISE(ABORT, 'a status is never removed'); END;
CREATE TRIGGER aliases_stay BEFORE UPDATE ON aliases
BEGIN SELECT RAISE(ABORT, 'an alias is never reassigned'); END;
CREATE TRIGGER aliases_are_kept BEFORE DELETE ON aliases
BEGIN SELECT RAISE(ABORT, 'an alias is never removed'); END;

-- Caches of anything computed from the records compare this number: everything that is served to
-- readers, except reserved.txt, depends only on the records that it counts.
CREATE TRIGGER releases_change AFTER INSERT ON releases
BEGIN UPDATE changes SET number = number + 1; END;
CREATE TRIGGER statuses_change AFTER INSERT ON statuses
BEGIN UPDATE changes SET number = number + 1; END;
CREATE TRIGGER namespaces_insert AFTER INSERT ON namespaces
BEGIN UPDATE changes SET number = number + 1; END;
CREATE TRIGGER namespaces_update AFTER UPDATE ON namespaces
BEGIN UPDATE changes SET number = number + 1; END;
CREATE TRIGGER namespaces_delete AFTER DELETE ON namespaces
BEGIN UPDATE changes SET number = number + 1; END;
CREATE TRIGGER settings_insert AFTER INSERT ON settings
BEGIN UPDATE changes SET number = number + 1; END;
CREATE TRIGGER settings_update AFTER UPDATE ON settings
BEGIN UPDATE changes SET number = number + 1; END;
CREATE TRIGGER settings_delete AFTER DELETE ON settings
BEGIN UPDATE changes SET number = number + 1; END;
CREATE TRIGGER aliases_insert AFTER INSERT ON aliases
BEGIN UPDATE changes SET number = number + 1; END;
