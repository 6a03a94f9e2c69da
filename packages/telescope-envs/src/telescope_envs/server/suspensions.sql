-- Version 2 of the server's records: owners that are suspended, and a log of who changed what.

ALTER TABLE namespaces ADD COLUMN withheld INTEGER NOT NULL DEFAULT 0 CHECK (withheld IN (0, 1));

-- Each row says what became of an owner; `namespaces` has what holds now.
CREATE TABLE suspensions (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    became TEXT NOT NULL CHECK (became IN ('suspended', 'withheld', 'restored')),
    reason TEXT NOT NULL,
    changed_at TEXT NOT NULL
) STRICT;
CREATE TRIGGER suspensions_stay BEFORE UPDATE ON suspensions
BEGIN SELECT RAISE(ABORT, 'a suspension is never rewritten; add what came after it'); END;
CREATE TRIGGER suspensions_are_kept BEFORE DELETE ON suspensions
BEGIN SELECT RAISE(ABORT, 'a suspension is never forgotten'); END;

-- `token`: the id of the token that did it, empty for an administrator.
CREATE VIEW audit AS
SELECT replace(created_at, ' ', 'T') || '+00:00' AS at, 'namespace added' AS event,
    owner AS subject, '' AS token, '' AS reason FROM namespaces
UNION ALL SELECT changed_at, 'namespace ' || became, owner, '', reason FROM suspensions
UNION ALL SELECT created_at, 'token created', id || ' ' || label, '', '' FROM tokens
UNION ALL SELECT revoked_at, 'token revoked', id || ' ' || label, '', ''
    FROM tokens WHERE revoked_at <> ''
UNION ALL SELECT received_at, 'published', environment || ' ' || version, token, '' FROM releases
UNION ALL SELECT changed_at, 'status changed', environment, token, ''
    FROM statuses WHERE revision > 0;
