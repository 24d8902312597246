-- What must be true of instances at every moment: each row is an instance that violates it. It is one statement, so
-- that everything is of one moment.
SELECT 'nothing can move it, and no incident says why', i.id
FROM process_instance i
WHERE i.completed_at IS NULL
  AND NOT EXISTS (SELECT FROM process_token k JOIN workflow_run r ON r.token_id = k.id AND r.status IN ('pending', 'leased') WHERE k.instance_id = i.id)
  AND NOT EXISTS (SELECT FROM message_wait w WHERE w.instance_id = i.id)
  AND NOT EXISTS (SELECT FROM user_task u WHERE u.instance_id = i.id AND u.state = 'open')
  AND NOT EXISTS (SELECT FROM incident x WHERE x.instance_id = i.id AND x.resolved_at IS NULL)
  AND NOT EXISTS (SELECT FROM process_token k JOIN process_instance c ON c.parent_token_id = k.id AND c.completed_at IS NULL WHERE k.instance_id = i.id)
  AND NOT EXISTS (SELECT FROM process_token k JOIN workflow_run r ON r.type = 'graph.start.v1' AND r.status IN ('pending', 'leased')
                                                               AND r.payload->'parent'->>'token' = k.id::text WHERE k.instance_id = i.id)
UNION ALL
SELECT 'a token is ready without exactly one open run', k.instance_id
FROM process_token k
WHERE k.state = 'Ready'
  AND (SELECT count(*) FROM workflow_run r WHERE r.token_id = k.id AND r.status IN ('pending', 'leased') AND r.node NOT LIKE '%/on/%') <> 1
UNION ALL
SELECT 'something lives in it though it is over', i.id
FROM process_instance i JOIN process_token k ON k.instance_id = i.id
WHERE i.completed_at IS NOT NULL
  AND (k.state IN ('Created', 'Ready', 'Waiting') OR EXISTS (SELECT FROM workflow_run r WHERE r.token_id = k.id AND r.status IN ('pending', 'leased')))
UNION ALL
SELECT 'its counts differ from its tokens', i.id
FROM process_instance i JOIN (
    SELECT k.instance_id, count(*) FILTER (WHERE k.state IN ('Created', 'Ready', 'Waiting')) AS live, count(*) FILTER (WHERE k.state = 'Ready') AS ready
    FROM process_token k GROUP BY k.instance_id) k ON k.instance_id = i.id
WHERE i.completed_at IS NULL AND (i.live_tokens, i.ready_tokens) <> (k.live, k.ready)
