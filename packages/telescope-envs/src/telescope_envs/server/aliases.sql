-- Version 4 of the server's records: aliases are logged, too, and times have milliseconds, so that the
-- log has what was done within a second in its order. Nobody knows when an older alias was added.

ALTER TABLE aliases ADD COLUMN added_at TEXT NOT NULL DEFAULT '';

-- `token`: the id of the token that did it, empty for an administrator. The time of an older
-- namespace has neither a `T` nor a time zone.
DROP VIEW audit;
CREATE VIEW audit AS
SELECT iif(created_at LIKE '%+00:00', created_at, replace(created_at, ' ', 'T') || '+00:00') AS at,
    'namespace added' AS event, owner AS subject, '' AS token, '' AS reason FROM namespaces
UNION ALL SELECT changed_at, 'namespace ' || became, owner, '', reason FROM suspensions
UNION ALL SELECT changed_at, 'publishers changed', owner || ' ' || publishers, '', reason
    FROM publisher_changes
UNION ALL SELECT created_at, 'token created', id || ' ' || label, '', '' FROM tokens
UNION ALL SELECT revoked_at, 'token revoked', id || ' ' || label, '', ''
    FROM tokens WHERE revoked_at <> ''
UNION ALL SELECT added_at, 'alias added', name || ' ' || environment, '', ''
    FROM aliases WHERE added_at <> ''
UNION ALL SELECT received_at, 'published', environment || ' ' || version, token, '' FROM releases
UNION ALL SELECT changed_at, 'status changed', environment, token, ''
    FROM statuses WHERE revision > 0;
