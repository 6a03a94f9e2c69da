-- Version 3 of the server's records: changes of who publishes under an owner are logged, too.

-- Each row has the publishers since that change, as text; `namespaces` has what holds now.
CREATE TABLE publisher_changes (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    publishers TEXT NOT NULL,
    reason TEXT NOT NULL,
    changed_at TEXT NOT NULL
) STRICT;
CREATE TRIGGER publisher_changes_stay BEFORE UPDATE ON publisher_changes
BEGIN SELECT RAISE(ABORT, 'a change of publishers is never rewritten; add the next one'); END;
CREATE TRIGGER publisher_changes_are_kept BEFORE DELETE ON publisher_changes
BEGIN SELECT RAISE(ABORT, 'a change of publishers is never forgotten'); END;

-- `token`: the id of the token that did it, empty for an administrator.
DROP VIEW audit;
CREATE VIEW audit AS
SELECT replace(created_at, ' ', 'T') || '+00:00' AS at, 'namespace added' AS event,
    owner AS subject, '' AS token, '' AS reason FROM namespaces
UNION ALL SELECT changed_at, 'namespace ' || became, owner, '', reason FROM suspensions
UNION ALL SELECT changed_at, 'publishers changed', owner || ' ' || publishers, '', reason
    FROM publisher_changes
UNION ALL SELECT created_at, 'token created', id || ' ' || label, '', '' FROM tokens
UNION ALL SELECT revoked_at, 'token revoked', id || ' ' || label, '', ''
    FROM tokens WHERE revoked_at <> ''
UNION ALL SELECT received_at, 'published', environment || ' ' || version, token, '' FROM releases
UNION ALL SELECT changed_at, 'status changed', environment, token, ''
    FROM statuses WHERE revision > 0;
