-- What happened to a run or an instance, in order of time. $1 is its id. Rows of one transaction share the time after
-- the slash, which is when the transaction began.
WITH subject AS (
    SELECT $1::uuid AS id, s.token, coalesce(s.instance, i.instance) AS instance, s.run IS NULL AS whole
    FROM (SELECT $1::uuid AS id) x LEFT JOIN t.step s ON s.run = x.id LEFT JOIN t.instance i ON i.instance = x.id
), runs AS (
    SELECT id AS run FROM subject
    UNION SELECT t.run FROM subject JOIN t.step t USING (instance) WHERE whole
), all_of_it AS (
    SELECT x.at, x.begun, concat_ws(' ', 'run', left(x.run::text, 8), right(x.run::text, 4), coalesce(x.was, 'new'), '>', x.status, 'lease', x.lease_no, 'by', x.app, x.code,
           CASE WHEN x.lease_no > x.lease_no_was THEN 'attempt ' || x.attempt WHEN x.attempt < x.attempt_was THEN 'attempt given back' END,
           CASE WHEN x.was = 'leased' AND x.status IS DISTINCT FROM 'leased' AND get_byte(uuid_send(x.token_was), 6) >> 4 = 8 THEN 'leased ahead' END) AS what
    FROM runs JOIN t.transition x USING (run)
    UNION ALL
    SELECT DISTINCT m.at, NULL::timestamptz, concat_ws(' ', 'mark', left(x.run::text, 8), right(x.run::text, 4), 'may begin')
    FROM runs JOIN t.transition x USING (run) JOIN t.may_begin m ON m.token = x.token_was
    UNION ALL
    SELECT l.at, NULL, concat_ws(' ', 'handler', left(l.run::text, 8), right(l.run::text, 4), 'lease', l.lease_no, l.event, l.outcome, 'at', l.worker) FROM runs JOIN t.exec_log l USING (run)
    UNION ALL
    SELECT u.at, u.begun, concat_ws(' ', 'instance', coalesce(u.was, 'new'), '>', u.status, u.ending, CASE WHEN u.paused THEN 'paused' END) FROM subject JOIN t.turn u USING (instance)
    UNION ALL
    SELECT m.at, NULL, concat_ws(' ', 'token', left(m.token::text, 8), right(m.token::text, 4), m.state, 'at', m.node, m.mode) FROM subject s JOIN t.movement m USING (instance) WHERE s.whole OR m.token = s.token
    UNION ALL
    SELECT c.at, c.sent, concat_ws(' ', 'call', c.kind, c.answer) FROM subject s JOIN t.call c ON c.run IN (s.id, s.instance)
)
SELECT concat_ws(' ', to_char(at, 'HH24:MI:SS.US') || coalesce('/' || to_char(begun, 'SS.US'), ''), what)
FROM (SELECT * FROM all_of_it ORDER BY at DESC LIMIT 100) latest ORDER BY at
